"""The design of a stage: weights of the rows, made without labels, of exact sensitivity.

Phi (N, m) are the columns of `features`, without what earlier stages have released of them, U
(N, r) an orthonormal basis of their leading directions (from the eigenvectors of the m x m matrix
Phi^T Phi; of large tables, that of a sample of rows), and h_i = |U_i|^2 a row's leverage:

    A_i = U_i / sqrt(max(h_i, r / 10 N))

Almost every row of A has norm 1, so that every label is charged the same and none for nothing
(row-wise weighting in the matrix mechanism of Li et al., PODS 2010). Weights as
integers make the bound exact (below).

Releasing the directions of the stage before again would only average noise away. So the next design
chooses its directions from what is left of the columns Phi once they are predicted from noisy sums
with the weights A (N, R) of the earlier stages, as the labels will be:

    Phi - A C,    C = (A^T A + D / q)^-1 A^T Phi,    D = diag(sigma^2),    q = 1

A direction with little noise vanishes, and one that noise still hides stays. q is 4 times the
largest variance of a label, since directions that were chosen hold more of the labels than others;
measured, 1/4 is .007 of test AUC worse on texts, and 2 and 4 are no better. C follows from weights,
columns and the sizes of the noise, never from labels.

Weights are integers, so that their sensitivity is decided exactly: each is an int16 times a power
of 2, the unit. Squared norms and products of rows are integers times unit^2, and "at most 1" is a
comparison of integers: weights are rounded towards zero, and what still exceeds 1 is shrunk and
rounded again. A sum of entries over rows is a multiple of the unit, below 2^53 of them for fewer
than 2^38 rows, and so exact in float64: in any order, on any number of threads and workers and by
any BLAS, with or without fused operations. No bit of A^T y depends on anything but the exact sum.

Rows of one subject share the bound: for changes d_i of -1, 0 or 1 to any of its labels,

    |sum_i d_i A_i|^2 = sum_ij d_i d_j A_i . A_j <= sum_ij |A_i . A_j|,

and the subject's rows are shrunk until the right-hand side is at most 1. With several classes, a
change moves A_i (e_b - e_a), and the right-hand side doubles as it does for a single row. Subjects
of many rows are held to sum_i |A_i| <= 1 instead, which is less and takes no pairs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.projected.features import SAMPLE_ROWS, Chunks, columns_of

BLOCK_ROWS = 2048  # rows that are handled at a time: their values stay in a processor's cache

_BITS = 14  # bits of the largest entry

_PAIRWISE_ROWS = 64  # rows of a subject up to which their products are taken pair by pair

_JUST_ABOVE_1 = 1 + 2.0**-20  # divisor that makes up for the rounding of norms in float32

_SHRINK = 1 - 2.0**-10
"""Factor below what is needed, so that rounding rarely makes another round necessary."""


SquaredBound = Callable[[Tensor], Tensor]
"""Maps groups of rows, (groups, rows, r) float64, to their squared bounds, (groups,)."""


class BoundedWeights:
    """Collects weights (N, r), rounds them to a grid, and shrinks what exceeds a bound of 1.

    Subjects, (N,) int64, are equal for rows that share one bound; None if every row has its own.
    """

    def __init__(self, num_rows: int, rank: int, subjects: Tensor | None) -> None:
        self._subjects = None if subjects is None else subjects.cpu()
        # Rows of subjects are shrunk before they are rounded, since their steps may be finer.
        kind = torch.int16 if subjects is None else torch.float32
        self._weights = torch.zeros(num_rows, rank, dtype=kind)

    def add(self, start: int, weights: Tensor) -> None:
        """Set the weights of consecutive rows, (rows, r) float32; what is not finite becomes 0."""
        for block in torch.split(weights, BLOCK_ROWS):
            rows = torch.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0)
            kept = _rounded(rows, 2.0**-_BITS) if self._subjects is None else rows
            self._weights[start : start + len(block)] = kept
            start += len(block)

    def finish(self) -> tuple[Tensor, float]:
        """Return the weights in steps, (N, r) int16, and a step's value, a power of 2."""
        unit = 2.0**-_BITS
        if self._subjects is None:
            return self._weights, unit
        self._weights /= torch.linalg.vector_norm(self._weights, dim=1, keepdim=True).clamp_min(1.0)
        for rows, bound in _groups(self._subjects):
            squared = bound(self._weights[rows].double()).clamp_min(1.0)
            self._weights[rows] /= squared.sqrt().float()[:, None, None]
        largest = max(float(self._weights.abs().amax()), 2.0**-16)
        unit *= 2.0 ** math.ceil(math.log2(largest))
        steps = torch.empty(self._weights.shape, dtype=torch.int16)
        for block, into in zip(
            torch.split(self._weights, BLOCK_ROWS), torch.split(steps, BLOCK_ROWS), strict=True
        ):
            into.copy_(_rounded(block, unit))
        for rows, bound in _groups(self._subjects):
            steps[rows] = _shrunk(steps[rows], bound, unit)
        return steps, unit


def _rounded(rows: Tensor, unit: float) -> Tensor:
    """Return rows in steps, int16, of norm 1 or less, exactly."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    scaled = (rows / (norms.clamp_min(1.0) * (unit * _JUST_ABOVE_1))).trunc_()
    return _shrunk(scaled.to(torch.int16), _squared_norm, unit)


def _shrunk(steps: Tensor, bound: SquaredBound, unit: float) -> Tensor:
    """Return groups of rows, (groups, ..., r) int16, whose squared bounds are at most 1.

    Sums of products of steps are integers below 2^53, and so exact in float64.
    """
    one = unit**-2
    while True:
        squared = bound(steps.double())
        over = (squared > one).nonzero()[:, 0]
        if not len(over):
            return steps
        factor = (one / squared[over]).sqrt() * _SHRINK
        factor = factor.reshape(-1, *(1,) * (steps.ndim - 1))
        steps[over] = (steps[over].double() * factor).trunc_().to(torch.int16)


def _groups(subjects: Tensor) -> Iterator[tuple[Tensor, SquaredBound]]:
    """Yield places of subjects with the same number of rows, (subjects, rows), and their bound."""
    _, place, sizes = torch.unique(subjects, return_inverse=True, return_counts=True)
    order = place.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    for size in torch.unique(sizes).tolist():
        if size == 1:
            continue
        bound = _pairwise if size <= _PAIRWISE_ROWS else _sum_of_norms
        alike = (sizes == size).nonzero()[:, 0]
        for some in torch.split(alike, max(1, BLOCK_ROWS // size)):
            yield order[first[some][:, None] + torch.arange(size)], bound


def _squared_norm(rows: Tensor) -> Tensor:
    return rows.square_().sum(dim=1)


def _pairwise(rows: Tensor) -> Tensor:
    """Return sum_ij |A_i . A_j| of each group of rows."""
    return (rows @ rows.mT).abs_().sum(dim=(1, 2))


def _sum_of_norms(rows: Tensor) -> Tensor:
    """Return (sum_i |A_i|)^2 of each group of rows, and 2e-9 more than any rounding."""
    return (rows.square_().sum(dim=2).sqrt_().sum(dim=1) * (1 + 1e-9)).square()


_SMALLEST_SHARE = 0.1  # leverage, in shares of the mean, below which a row is no longer weighted up

_NEGLIGIBLE = 1e-5
"""Eigenvalue of Phi^T Phi, in units of the largest, below which a direction may be no more than the
rounding of float32."""

_VARIANCE = 1.0  # q


class Design(NamedTuple):
    """Weights of the training rows for the sums of one stage."""

    steps: Tensor
    """A in steps of ``unit``, (N, r) int16; the bound of every row or subject is at most 1."""

    unit: float  # a power of 2

    @property
    def num_rows(self) -> int:
        return len(self.steps)

    @property
    def rank(self) -> int:
        return self.steps.shape[1]

    @property
    def rows(self) -> Tensor:
        """A, (N, r) float32: a copy, twice as large as ``steps``."""
        return self.steps.float() * self.unit

    def block(self, start: int) -> Tensor:
        """Return ``BLOCK_ROWS`` rows of A from ``start`` on, or what is left, in float32."""
        return self.steps[start : start + BLOCK_ROWS].float() * self.unit


@dataclass(frozen=True)
class ReleasedStages:
    """Weights A (N, R) and noise of the stages whose sums were released, all of them together."""

    designs: Sequence[Design]  # of each stage; at least one
    sigmas: Sequence[float]  # standard deviation of the noise in each sum of each stage
    gram: Tensor  # A^T A, (R, R) float64

    def steps(self, rows: slice) -> Tensor:
        """Return A / units of some rows, (rows, R) float32."""
        return torch.cat([one.steps[rows] for one in self.designs], dim=1).float()

    def blocks(self, stride: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Yield the steps of every ``stride``-th row, and the places of a block among them."""
        for start in range(0, -(-self.designs[0].num_rows // stride), BLOCK_ROWS):
            stop = start + BLOCK_ROWS
            yield slice(start, stop), self.steps(slice(start * stride, stop * stride, stride))

    @cached_property
    def units(self) -> Tensor:
        return self._of_each_sum(one.unit for one in self.designs)

    @cached_property
    def noise(self) -> Tensor:
        """Standard deviation of the noise in each sum, D^(1/2), (R, 1) float64."""
        return self._of_each_sum(self.sigmas)

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (R, 1) and eigenvectors (R, R) of A^T A in units of the noise, float64.

        A peer can make the columns of several stages equal. The Gram matrix, whose sums are
        rounded, then has eigenvalues slightly below 0, which count as 0.
        """
        powers, vectors = torch.linalg.eigh(self.gram / self.noise / self.noise.T)
        return powers.clamp(min=0.0)[:, None], vectors

    def sums_of(self, values: Tensor, stride: int = 1) -> Tensor:
        """Return A^T X, (R, m) float64, of X (rows, m) float32 for every ``stride``-th row."""
        sums = torch.zeros(len(self.gram), values.shape[1], dtype=torch.float64)
        for rows, steps in self.blocks(stride):
            sums += steps.T @ values[rows]
        return sums * self.units

    def add_to(self, values: Tensor, coefficients: Tensor, stride: int = 1) -> None:
        """Add A C to X (rows, m) float32 of every ``stride``-th row, for C (R, m) float64."""
        of_steps = (coefficients * self.units).float()
        for rows, steps in self.blocks(stride):
            values[rows] += steps @ of_steps

    def solve(self, variance: float, sums: Tensor) -> Tensor:
        """Return (A^T A + D / q)^-1 X, (R, m), for X (R, m) float64."""
        powers, vectors = self.spectrum
        parts = vectors.T @ (sums / self.noise) / (powers + 1 / variance)
        return vectors @ parts / self.noise

    def _of_each_sum(self, values: Iterable[float]) -> Tensor:
        parts = zip(self.designs, values, strict=True)
        return torch.cat([torch.full((d.rank, 1), v, dtype=torch.float64) for d, v in parts])


def design(
    chunks: Chunks,
    num_rows: int,
    rank: int,
    *,
    subjects: Tensor | None = None,
    excluded: Tensor | None = None,
    earlier: ReleasedStages | None = None,
) -> Design:
    """Choose the weights of a stage.

    The chunks are the training rows, read once for a sample that directions are chosen from, and
    once for weights; the rank is the most columns. Subjects, (N,) int64, are equal for rows that
    share one bound; None if every row has its own. Excluded rows, (N,) bool, get weights of
    0 and are charged nothing.
    """
    if rank < 1:
        raise ValueError(f"expected a rank of at least 1, got {rank}")
    for name, given in (("subjects", subjects), ("excluded", excluded)):
        if given is not None and given.shape != (num_rows,):
            raise ValueError(f"expected {name} of shape ({num_rows},), got {tuple(given.shape)}")
    included = torch.ones(num_rows) if excluded is None else (~excluded.cpu()).float()
    stride = max(1, -(-num_rows // SAMPLE_ROWS))
    sample = list(chunks(stride))
    counted = included[::stride, None]
    found = sum(len(part.logits) for part in sample)
    if found != len(counted) or found < 1:
        raise ValueError(f"expected chunks of {len(counted)} rows, at least 1, got {found}")
    columns = columns_of(sample)
    phi = torch.cat([columns.of(part).cpu() for part in sample]).mul_(counted)
    if earlier is not None:
        coefficients = earlier.solve(_VARIANCE, stride * earlier.sums_of(phi, stride))
        earlier.add_to(phi, -coefficients, stride)
    basis = _basis((phi.T @ phi).double(), rank)
    if earlier is not None:
        of_steps = (coefficients * earlier.units).float() @ basis
    least = math.sqrt(_SMALLEST_SHARE * basis.shape[1] / max(1.0, float(counted.sum())))
    bounded = BoundedWeights(num_rows, basis.shape[1], subjects)
    start = 0
    for chunk in chunks(1):
        rows = slice(start, start + len(chunk.logits))
        weights = (columns.of(chunk).cpu() @ basis).mul_(included[rows, None])
        if earlier is not None:
            weights -= earlier.steps(rows) @ of_steps
        norms = torch.linalg.vector_norm(weights, dim=1)
        bounded.add(start, weights.div_(norms.clamp_min(least)[:, None]))
        start = rows.stop
    if start != num_rows:
        raise ValueError(f"expected chunks of {num_rows} rows, got {start}")
    return Design(*bounded.finish())


def stage_shares(num_stages: int) -> list[float]:
    """Return the share of mu^2 that each stage takes, falling as 1, 1/2, 1/3 and so on.

    The first stages say the most: later ones correct a model that has learned the larger
    part of what all of them say together, and their sums are combined with those before.
    """
    if num_stages < 1:
        raise ValueError(f"expected at least 1 stage, got {num_stages}")
    total = sum(1 / (stage + 1) for stage in range(num_stages))
    return [1 / (stage + 1) / total for stage in range(num_stages)]


def stage_sigma(mu: float, share: float, num_classes: int = 2) -> float:
    """Return the noise of a stage that takes a share of mu^2: all are mu-GDP together.

    A label of two classes moves the sums by a row of A. A label of several classes moves the sums
    of two classes, by a row of A each, and so all of them by sqrt 2.
    """
    if not mu > 0 or not 0 < share <= 1:
        raise ValueError(f"expected mu > 0 and a share within (0, 1], got {mu} and {share}")
    sensitivity = 1.0 if num_classes <= 2 else math.sqrt(2)
    return sensitivity / (mu * math.sqrt(share))


def _basis(gram: Tensor, rank: int) -> Tensor:
    """Return V_r L_r^(-1/2), (m, r): Phi times it has orthonormal columns."""
    values, vectors = torch.linalg.eigh(gram)
    if not float(values[-1]) > 0:  # no row counts: one column of zeros
        return torch.zeros(len(gram), 1)
    kept = values > _NEGLIGIBLE * values[-1]
    kept[:-rank] = False
    basis: Tensor = vectors[:, kept] / values[kept].sqrt()
    return basis.flip(1).float()

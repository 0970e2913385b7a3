"""Weights as integers, so that their sensitivity is decided exactly.

A weight is an int16 times a power of 2, the unit. Squared norms and products of rows are integers
times unit^2, and "at most 1" is a comparison of integers: weights are rounded towards zero, and
what still exceeds 1 is shrunk and rounded again. A sum of entries over rows is a multiple of the
unit, below 2^53 of them for fewer than 2^38 rows, and so exact in float64: in any order, on any
number of threads and workers and by any BLAS, with or without fused operations. No bit of A^T y
depends on anything but the exact sum.

Rows of one subject share the bound: for changes d_i of -1, 0 or 1 to any of its labels,

    |sum_i d_i A_i|^2 = sum_ij d_i d_j A_i . A_j <= sum_ij |A_i . A_j|,

and the subject's rows are shrunk until the right-hand side is at most 1. With several classes, a
change moves A_i (e_b - e_a), and the right-hand side doubles as it does for a single row. Subjects
of many rows are held to sum_i |A_i| <= 1 instead, which is less and takes no pairs.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = 16_384
"""Rows that are handled at a time."""

_BITS = 14
"""Bits of the largest entry."""

_PAIRWISE_ROWS = 64
"""Rows of a subject up to which their products are taken pair by pair."""

_JUST_ABOVE_1 = 1 + 2.0**-20
"""Divisor that makes up for the rounding of norms in float32."""

_SHRINK = 1 - 2.0**-10
"""Factor below what is needed, so that rounding rarely makes another round necessary."""


class GridWeights(NamedTuple):
    """Weights of rows on a grid; the bound of every row or subject is at most 1, exactly."""

    steps: Tensor
    """(N, r) int16."""

    unit: float
    """Value of one step, a power of 2."""


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

    def finish(self) -> GridWeights:
        unit = 2.0**-_BITS
        if self._subjects is None:
            return GridWeights(self._weights, unit)
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
        return GridWeights(steps, unit)


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

"""The design of a stage: weights of the rows, made without labels, of exact sensitivity.

Phi (N, m) are the columns of `features`, without what earlier stages have told of them (`earlier`),
U (N, r) an orthonormal basis of their leading directions (from the eigenvectors of the m x m matrix
Phi^T Phi; of large tables, that of a sample of rows), and h_i = |U_i|^2 a row's leverage:

    A_i = U_i / sqrt(max(h_i, r / 10 N))

Almost every row of A has norm 1, so that every label is charged the same and none for nothing
(row-wise weighting in the matrix mechanism of Li et al., PODS 2010). `grid` makes the bound exact.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.projection.earlier import Earlier, Told
from splitveil.active_party.defenses.projection.features import (
    Chunks,
    columns_of,
    sample_of,
)
from splitveil.active_party.defenses.projection.grid import BLOCK_ROWS, BoundedWeights

_SMALLEST_SHARE = 0.1
"""Leverage, in shares of the mean, below which a row is no longer weighted up."""

_NEGLIGIBLE = 1e-5
"""Eigenvalue of Phi^T Phi, in units of the largest, below which a direction may be no more than the
rounding of float32."""


class Design(NamedTuple):
    """Weights of the training rows for the sums of one stage."""

    steps: Tensor
    """A in steps of ``unit``, (N, r) int16; the bound of every row or subject is at most 1."""

    unit: float
    """A power of 2."""

    effective_rows: float
    """Share of the rows that carry the design, (sum_i |U_i|)^2 / (N sum_i |U_i|^2): 1 if all are
    alike, near 0 if a few of them outweigh all others, as a peer can bring about."""

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.steps)

    @property
    def rank(self) -> int:
        """r, at most the rank that was asked for."""
        return self.steps.shape[1]

    @property
    def rows(self) -> Tensor:
        """A, (N, r) float32: a copy, twice as large as ``steps``."""
        return self.steps.float() * self.unit

    def block(self, start: int) -> Tensor:
        """Return ``BLOCK_ROWS`` rows of A from ``start`` on, or what is left, in float32."""
        return self.steps[start : start + BLOCK_ROWS].float() * self.unit


def design(
    chunks: Chunks,
    num_rows: int,
    rank: int,
    *,
    subjects: Tensor | None = None,
    excluded: Tensor | None = None,
    earlier: Told | None = None,
) -> Design:
    """Choose the weights of a stage.

    Args:
        chunks: the training rows; read twice.
        num_rows: N.
        rank: most columns of the design, >= 1.
        subjects: (N,) int64, equal for rows that share one bound; None if every row has its own.
        excluded: (N,) bool, rows that get weights of 0 and are charged nothing.
        earlier: stages that were released before; None for the first.

    Raises:
        ValueError: rank is below 1, or shapes and number of rows do not fit.
    """
    if rank < 1:
        raise ValueError(f"expected a rank of at least 1, got {rank}")
    for name, given in (("subjects", subjects), ("excluded", excluded)):
        if given is not None and given.shape != (num_rows,):
            raise ValueError(f"expected {name} of shape ({num_rows},), got {tuple(given.shape)}")
    included = torch.ones(num_rows) if excluded is None else (~excluded.cpu()).float()
    sample = sample_of(chunks, num_rows)
    columns = columns_of(sample.rows)
    counted = included[:: sample.stride, None]
    phi = columns.of(sample.rows).cpu() * counted
    known = None if earlier is None else Earlier.of_sample(earlier, phi, sample.stride)
    if known is not None:
        phi -= known.of(slice(None, None, sample.stride))
    basis = _basis((phi.T @ phi).double(), rank)
    known = None if known is None else known.projected(basis)
    least = math.sqrt(_SMALLEST_SHARE * basis.shape[1] / max(1.0, float(counted.sum())))
    bounded = BoundedWeights(num_rows, basis.shape[1], subjects)
    norms = torch.empty(num_rows)
    start = 0
    for chunk in chunks():
        rows = columns.of(chunk).cpu() @ basis
        rows *= included[start : start + len(rows), None]
        if known is not None:
            rows -= known.of(slice(start, start + len(rows)))
        norm = torch.linalg.vector_norm(rows, dim=1)
        norms[start : start + len(rows)] = norm
        bounded.add(start, rows.div_(norm.clamp_min(least)[:, None]))
        start += len(rows)
    return Design(*bounded.finish(), _effective_rows(norms))


def stage_shares(num_stages: int) -> list[float]:
    """Return the share of mu^2 that each stage takes, falling as 1, 1/2, 1/3 and so on.

    The first stages have the most to tell: later ones correct a model that has learned the larger
    part of what all of them say together, and their sums are combined with those before.

    Raises:
        ValueError: there is no stage.
    """
    if num_stages < 1:
        raise ValueError(f"expected at least 1 stage, got {num_stages}")
    total = sum(1 / (stage + 1) for stage in range(num_stages))
    return [1 / (stage + 1) / total for stage in range(num_stages)]


def stage_sigma(mu: float, share: float, num_classes: int = 2) -> float:
    """Return the noise of a stage that takes a share of mu^2: all are mu-GDP together.

    A label of two classes moves the sums by a row of A. A label of several classes moves the sums
    of two classes, by a row of A each, and so all of them by sqrt 2.

    Raises:
        ValueError: mu or the share is not positive.
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


def _effective_rows(norms: Tensor) -> float:
    total = float(norms.double().square().sum())
    return float(norms.double().sum()) ** 2 / (len(norms) * total) if total > 0 else 0.0

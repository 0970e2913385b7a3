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
from collections.abc import Callable
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


SquaredBound = Callable[[Tensor], Tensor]
"""Maps groups of rows in steps, int64, to squared bounds in squared steps, one for each group."""


class GridWeights(NamedTuple):
    """Weights of rows on a grid; the bound of every row or subject is at most 1, exactly."""

    steps: Tensor
    """(N, r) int16."""

    unit: float
    """Value of one step, a power of 2."""


def on_grid(weights: Tensor, subjects: Tensor | None) -> GridWeights:
    """Round weights to a grid, shrinking rows or subjects whose bound exceeds 1.

    Args:
        weights: (N, r) float32; values that are not finite become 0.
        subjects: (N,) int64, equal for rows that share one bound; None if every row has its own.
    """
    largest = max((_largest(part) for part in torch.split(weights, BLOCK_ROWS)), default=0.0)
    unit = 2.0 ** (math.ceil(math.log2(min(1.0, max(largest, 2.0**-16)))) - _BITS)
    one = round(1 / unit) ** 2
    steps = torch.empty(weights.shape, dtype=torch.int16)
    for part, into in zip(
        torch.split(weights, BLOCK_ROWS), torch.split(steps, BLOCK_ROWS), strict=True
    ):
        rows = torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows = (rows / (norms.clamp_min(1.0) * (unit * _JUST_ABOVE_1))).trunc_()
        into.copy_(rows)
        exact = rows.double()  # products of less than 2^30
        over = (exact.square_().sum(dim=1) > one).nonzero()[:, 0]
        if len(over):  # rare: the norm was rounded down, and no entry was
            shrunk = into[over]
            _shrink(shrunk, lambda rows: rows.square().sum(dim=1), one)
            into[over] = shrunk
    if subjects is not None:
        _bound_subjects(steps, subjects.cpu(), one)
    return GridWeights(steps, unit)


def _largest(part: Tensor) -> float:
    return float(torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0).abs().amax())


def _shrink(steps: Tensor, squared_bound: SquaredBound, one: int) -> None:
    """Shrink groups of rows in place until no squared bound, an integer, exceeds ``one``.

    Args:
        steps: (groups, ..., r) int16.
        squared_bound: from such rows as int64 to (groups,), int64 or rounded up float64.
        one: the square of 1 in squared steps.
    """
    while True:
        squared = squared_bound(steps.long())
        over = squared > one
        if not bool(over.any()):
            return
        factor = (one / squared[over].double()).sqrt() * _SHRINK
        rows = steps[over]
        factor = factor.reshape(-1, *(1,) * (rows.ndim - 1))
        steps[over] = (rows.double() * factor).trunc().to(torch.int16)


def _bound_subjects(steps: Tensor, subjects: Tensor, one: int) -> None:
    _, place, sizes = torch.unique(subjects, return_inverse=True, return_counts=True)
    order = place.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    for size in torch.unique(sizes).tolist():
        if size == 1:
            continue
        bound = _pairwise if size <= _PAIRWISE_ROWS else _sum_of_norms
        groups = (sizes == size).nonzero()[:, 0]
        for some in torch.split(groups, max(1, BLOCK_ROWS // size)):
            rows = order[first[some][:, None] + torch.arange(size)]
            together = steps[rows]
            _shrink(together, bound, one)
            steps[rows] = together


def _pairwise(rows: Tensor) -> Tensor:
    """Return sum_ij |A_i . A_j| of each group of rows, (groups,) int64."""
    exact = rows.double()  # products of 2^30, and sums of fewer than 2^23 of them
    return (exact @ exact.mT).abs().sum(dim=(1, 2)).long()


def _sum_of_norms(rows: Tensor) -> Tensor:
    """Return (sum_i |A_i|)^2 of each group of rows, rounded up, (groups,) float64."""
    norms = rows.square().sum(dim=2).double().sqrt().sum(dim=1)
    return (norms * (1 + 1e-9)).square()

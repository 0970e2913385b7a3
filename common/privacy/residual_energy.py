"""Scores rows by their energy outside the directions in which the batch stretches most.

Gradients of a network hardly vary outside a few strong directions. Noise that only one class gets,
as that of fresh ``marvell`` across the gap of the class means (Li et al., ICLR 2022, theorem 1), is
almost alone in the rest, so that the energy of a row there reveals its class, however strong the
noise is.

With right-singular vectors v_1, v_2, ... of the batch's rows g_i and their singular values s_j, the
score is

    log sum_j <g_i, v_j>^2 / (s_j^2 + r),  j beyond the strongest quarter,

where r is the mean of these s_j^2 times the number of columns over the number of rows. A batch of
many rows therefore counts each weak direction alike, by its own spread. A batch with fewer rows
than columns counts them by their energy: there, every row would lie in the span of its own
direction, and each would have the same share.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.gradient_rows import Gradients, prepared
from splitveil.common.privacy.top_direction import gram

STRONGEST = 0.25  # share of a batch's directions that count as strong

_MAX_DIRECTIONS = 64
"""A batch with more rows and more columns than this is folded to this number of columns first: more
directions would cost several times as much, and reveal little more."""

_NEGLIGIBLE = 1e-12  # of the strongest direction's energy, below which it is rounding error

_LOWEST = 1e-30  # fraction of the batch's largest energy below which all energies count alike

_MAX_MOVES = 50


def residual_energy(gradients: Gradients) -> Tensor:
    """Score each example by the log energy of its gradient outside the batch's strong directions.

    Finite scores, (batch,), whose smaller cluster is above 0: positives are the minority. Zeros if
    no example differs from the others outside the strong directions.
    """
    rows = _folded(prepared(gradients).rows)
    if not rows.numel():
        return rows.new_zeros(len(rows))
    energies = _weak_energies(rows)
    largest = energies.amax()
    if not largest > 0:
        return torch.zeros_like(energies)
    return rare_cluster_up((energies / largest).clamp_(min=_LOWEST).log_())


def rare_cluster_up(scores: Tensor) -> Tensor:
    """Turn and shift scores so that the smaller of two clusters lies above 0."""
    values = np.sort(scores.cpu().numpy())
    if not len(values) or values[0] == values[-1]:
        return torch.zeros_like(scores)
    sums = np.concatenate(([0.0], values.cumsum()))
    border, below = (values[0] + values[-1]) / 2, 0
    for _ in range(_MAX_MOVES):
        before, below = below, int(np.searchsorted(values, border, side="right"))
        if below in (0, len(values), before):
            break
        above = (sums[-1] - sums[below]) / (len(values) - below)
        border = (sums[below] / below + above) / 2
    centred = scores - float(border)
    return centred if 2 * (len(values) - below) <= len(values) else -centred


def _weak_energies(rows: Tensor) -> Tensor:
    """Return each row's energy in the weak directions, in units of these, (batch,)."""
    num_rows, row_dim = rows.shape
    is_tall = num_rows >= row_dim
    powers, vectors = torch.linalg.eigh(gram(rows.T if is_tall else rows))  # ascending
    num_weak = len(powers) - min(round(STRONGEST * len(powers)), len(powers) - 1)
    weak = powers[:num_weak].clamp(min=0.0)
    if is_tall:
        energies = (rows @ vectors[:, :num_weak]).square_()
    else:
        energies = vectors[:, :num_weak].square() * weak
    ridge = weak.mean() * (row_dim / num_rows) + _NEGLIGIBLE * powers[-1].clamp(min=0.0)
    weighted: Tensor = energies @ torch.where(weak + ridge > 0, 1.0 / (weak + ridge), 0.0)
    return weighted


def _folded(rows: Tensor) -> Tensor:
    """Add up columns with random signs where both sides of a batch are large.

    Directions that the rows share stay few, and noise in all directions stays that.
    """
    if min(rows.shape) <= _MAX_DIRECTIONS:
        return rows
    folded = rows.new_zeros(len(rows), _MAX_DIRECTIONS)
    signs = _signs(rows.shape[1]).to(rows.device)
    parts = torch.split(rows, _MAX_DIRECTIONS, dim=1)
    for part, of_part in zip(parts, torch.split(signs, _MAX_DIRECTIONS), strict=True):
        folded[:, : part.shape[1]].addcmul_(part, of_part)
    return folded


@lru_cache(maxsize=8)
def _signs(row_dim: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], row_dim))

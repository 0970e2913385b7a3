"""Noise along each gradient that brings it, on average, to the largest norm of its batch.

Row g becomes g (1 + s n) with n ~ N(0, 1) and s^2 = |g_max|^2/|g|^2 - 1, one scalar per row, so
that E|row|^2 = |g_max|^2 for every row (Li et al., ICLR 2022, section 4.1). g_max is the largest
row, not the batch: noise up to the norm of the whole batch, spread over all directions, leaves a
smaller row more of it, and the norm leaks with its sign turned.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_statistics import (
    BatchClasses,
    ClassEstimate,
    measure_means,
)
from splitveil.active_party.defenses.interface import (
    ClassMemory,
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    release,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import as_positive, as_rows
from splitveil.active_party.defenses.sum_kl import sum_kl_along_gap


class MaxNorm(ClassMemory):
    """Aligns every row to the batch's largest norm.

    A row without a direction of its own (zero, or too small to be divided by) gets a random one,
    and the largest norm itself. The labels decide what is charged for an answer, and nothing in it.
    """

    def __init__(self, noise: NoiseSource) -> None:
        super().__init__()
        self._noise = noise

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,  # noqa: ARG002
        probabilities: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Add noise."""
        rows = as_rows(gradients)
        positive = as_positive(labels, rows)
        batch, norms = measure_means(rows, positive)
        noise = stretch_rows(rows, norms, missing_norms(norms), self._noise)
        charge = charge_rows(noise, norms, positive, batch, self.classes.take_in(batch))
        defended = noise.directions.mul_(noise.scalars).add_(rows)
        return release(defended, gradients), DefenseReport(
            noise_power=float(noise.norms.square().mean()), charge=charge
        )


class RowNoise(NamedTuple):
    """Noise along each row."""

    directions: Tensor  # (batch, cut_dim), unit vectors; random where a row has none
    scalars: Tensor  # (batch, 1), how far along them
    norms: Tensor  # (batch,) float64, root-mean-square
    bare: Tensor  # (bare rows,) positions of the rows without a direction


def missing_norms(norms: Tensor) -> Tensor:
    """Return the root-mean-square noise norm that takes each row to the largest, (batch,)."""
    largest = norms.max()
    shares = norms / torch.where(largest > 0, largest, 1.0)
    return ((1 - shares) * (1 + shares)).clamp_(min=0).sqrt_().mul_(largest)


def stretch_rows(rows: Tensor, norms: Tensor, noise_norms: Tensor, noise: NoiseSource) -> RowNoise:
    """Draw noise along each row.

    Args:
        rows: raw gradients, (batch, cut_dim).
        norms: theirs, (batch,) float64.
        noise_norms: root-mean-square noise norm of each row, (batch,) float64, on the rows' device.
            A row without a direction gets the batch's largest norm instead, without a random size.
        noise: the only source of randomness.
    """
    scalars = noise.standard_normal((rows.shape[0], 1), rows)
    scalars *= noise_norms[:, None].to(rows.dtype)
    directions = rows / norms[:, None].to(rows.dtype)
    bare = (norms < torch.finfo(rows.dtype).tiny).nonzero().squeeze(1)
    if len(bare):
        largest = norms.max()
        random = noise.standard_normal((len(bare), rows.shape[1]), rows)
        directions[bare] = random.div_(torch.linalg.vector_norm(random, dim=1, keepdim=True))
        scalars[bare] = largest.to(rows.dtype)
        noise_norms = noise_norms.index_fill(0, bare, float(largest))
    return RowNoise(directions, scalars, noise_norms, bare)


def charge_rows(
    noise: RowNoise,
    norms: Tensor,
    positive: Tensor,
    batch: BatchClasses,
    estimate: ClassEstimate | None,
) -> LeakCharge:
    """Charge the gap against the mean noise variance that each class has on it.

    In a batch of one class, a row at the other's running mean stands in for it, stretched to the
    largest norm of the answer: if that mean is longer, such a row would have had no noise, and the
    charge is infinite. It is infinite, too, where the other class has never been seen.
    """
    target = float(torch.hypot(norms, noise.norms).max())
    if target == 0:
        return LeakCharge(0.0)
    if estimate is None or estimate.gap_squared == 0:
        return LeakCharge(math.inf)
    direction = estimate.gap / math.sqrt(estimate.gap_squared)
    cosines = (noise.directions @ direction.to(noise.directions.dtype)).double()
    cosines[noise.bare] = noise.directions.shape[1] ** -0.5  # on average over random directions
    squares = (cosines * (noise.norms / target)).square_()
    members = torch.stack((~positive, positive)).double()
    neg_sum, pos_sum = (members @ squares).tolist()
    other = estimate.gap * (estimate.unit / target)
    neg_variance = (
        neg_sum / batch.neg_rows
        if batch.neg or not batch.pos
        else _stand_in_variance(batch.pos.mean / target - other, direction)
    )
    pos_variance = (
        pos_sum / batch.pos_rows
        if batch.pos or not batch.neg
        else _stand_in_variance(batch.neg.mean / target + other, direction)
    )
    return LeakCharge(
        sum_kl_along_gap(
            math.sqrt(neg_variance), math.sqrt(pos_variance), estimate.gap_length / target
        )
    )


def _stand_in_variance(mean: Tensor, direction: Tensor) -> float:
    """Return the variance along the gap of a row at ``mean``, stretched to norm 1."""
    along = float(mean.dot(direction))
    length = float(torch.linalg.vector_norm(mean))
    return max(along * along / (length * length) - along * along, 0.0) if length else 0.0

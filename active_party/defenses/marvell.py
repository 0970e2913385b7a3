"""The noise that leaves the classes the least divergence for its power (Li et al., ICLR 2022).

Each class k gets N(0, l2k I + (l1k - l2k) D D^T / c), where D is the gap between the class means
and c = |D|^2. It is sampled as one scalar along D and, where l2k > 0, an isotropic vector.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from active_party.defenses.class_statistics import (
    ClassEstimate,
    RunningClasses,
    measure_classes,
)
from active_party.defenses.iso import isotropic_noise
from active_party.defenses.noise import NoiseSource
from active_party.defenses.report import DefendedGradient, DefenseReport, release
from active_party.defenses.rows import as_positive, as_rows, row_norms
from active_party.defenses.sum_kl import NoiseSolution, leak_auc_bound, solve_noise


class Marvell:
    """Adds to each class the noise that a solver chose for the batch.

    A batch of one class borrows the other from earlier batches. Where there is none yet, or where
    the solution would leave the labels bare (no gap to measure the power by, and spreads of which
    one is zero), the answer is noise of the batch's largest norm without any signal: to skip an
    answer, or to send zeros, would tell the peer what the batch contained. Only a batch of zeros
    has no scale at all: with both classes, or before any statistics, it is answered by zeros.

    Args:
        power_ratio: noise power in units of the squared gap of the class means.
        noise: the only source of randomness.
    """

    def __init__(self, power_ratio: float, noise: NoiseSource) -> None:
        self._power_ratio = power_ratio
        self._noise = noise
        self._classes = RunningClasses()

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,  # noqa: ARG002
        probabilities: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Add noise; unbiased, save where there is no signal in the answer at all."""
        rows = as_rows(gradients)
        positive = as_positive(labels, rows)
        batch = measure_classes(rows, positive)
        estimate = self._classes.take_in(batch)
        if estimate is None:
            return self._noise_alone(rows, gradients)
        solution = self._solve(estimate, rows.shape[1], self._power_ratio * estimate.gap_squared)
        if math.isinf(solution.sum_kl):
            return self._noise_alone(rows, gradients)
        before = self._solve(estimate, rows.shape[1], 0.0).sum_kl
        pos_share = batch.pos_rows / (batch.pos_rows + batch.neg_rows)
        defended = self._draw(solution, estimate, rows, positive).add_(rows)
        area = estimate.unit * estimate.unit
        across_dim = rows.shape[1] - 1
        return release(defended, gradients), DefenseReport(
            noise_power=area
            * (
                pos_share * (solution.pos_along + across_dim * solution.pos_across)
                + (1 - pos_share) * (solution.neg_along + across_dim * solution.neg_across)
            ),
            sum_kl_before=before,
            sum_kl_after=solution.sum_kl,
            leak_auc_bound=leak_auc_bound(solution.sum_kl),
            solution=NoiseSolution(
                neg_along=area * solution.neg_along,
                neg_across=area * solution.neg_across,
                pos_along=area * solution.pos_along,
                pos_across=area * solution.pos_across,
                sum_kl=solution.sum_kl,
            ),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running class statistics."""
        return self._classes.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the running class statistics."""
        self._classes.load_state_dict(state)

    @staticmethod
    def _solve(estimate: ClassEstimate, cut_dim: int, noise_power: float) -> NoiseSolution:
        return solve_noise(
            neg_variance=estimate.neg_variance,
            pos_variance=estimate.pos_variance,
            gap_squared=estimate.gap_squared,
            cut_dim=cut_dim,
            pos_fraction=estimate.pos_fraction,
            noise_power=noise_power,
        )

    def _draw(
        self, solution: NoiseSolution, estimate: ClassEstimate, rows: Tensor, positive: Tensor
    ) -> Tensor:
        """Sample both classes' noise.

        Rows of the class without noise across the gap draw numbers too, times zero: the time of an
        answer must not depend on the labels.
        """
        neg_along = math.sqrt(max(solution.neg_along - solution.neg_across, 0.0))
        pos_along = math.sqrt(max(solution.pos_along - solution.pos_across, 0.0))
        along = _per_row(positive, pos_along * estimate.unit, neg_along * estimate.unit, rows)
        along *= self._noise.standard_normal((rows.shape[0], 1), rows)
        length = math.sqrt(estimate.gap_squared) or 1.0
        direction = (estimate.gap / length).to(rows.dtype)
        if solution.neg_across == 0 and solution.pos_across == 0:
            return along * direction
        across = _per_row(
            positive,
            math.sqrt(solution.pos_across) * estimate.unit,
            math.sqrt(solution.neg_across) * estimate.unit,
            rows,
        )
        noise = self._noise.standard_normal(tuple(rows.shape), rows)
        return noise.mul_(across).addcmul_(along, direction)

    def _noise_alone(
        self, rows: Tensor, gradients: Tensor
    ) -> tuple[DefendedGradient, DefenseReport]:
        largest = float(row_norms(rows).max())
        report = DefenseReport(noise_power=largest * largest, sum_kl_after=0.0, leak_auc_bound=0.5)
        return release(isotropic_noise(rows, largest, self._noise), gradients), report


def _per_row(positive: Tensor, pos: float, neg: float, rows: Tensor) -> Tensor:
    """Give each row its class's number, as a column."""
    numbers = torch.tensor((neg, pos), dtype=rows.dtype, device=rows.device)
    return numbers[positive.long()][:, None]

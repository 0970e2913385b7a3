"""The noise that leaves the classes the least divergence for its power (Li et al., ICLR 2022).

Each class k gets N(0, l2k I + (l1k - l2k) D D^T / c), where D is the gap between the class means
and c = |D|^2. It is sampled as one scalar along D and, where l2k > 0, an isotropic vector.

Across D only one class gets noise. Where the gradients hardly vary, its energy tells that class
from the other, at every strength. An answer is charged for the gap alone, against the noise on it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_statistics import ClassEstimate, measure_classes
from splitveil.active_party.defenses.interface import (
    ClassMemory,
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    release,
)
from splitveil.active_party.defenses.iso import noise_alone
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import as_positive, as_rows, row_norms
from splitveil.active_party.defenses.strength import PowerRule
from splitveil.active_party.defenses.sum_kl import (
    NoiseSolution,
    leak_auc_bound,
    solve_noise,
    sum_kl_along_gap,
)


class Marvell(ClassMemory):
    """Adds to each class the noise that a solver chose for the batch.

    A batch of one class borrows the other from earlier batches. Where there is none yet, or where
    the solution would leave the labels bare (no gap to measure the power by, and spreads of which
    one is zero), the answer is noise of the batch's largest norm without any signal: to skip an
    answer, or to send zeros, would tell the peer what the batch contained. Only a batch of zeros
    has no scale at all: with both classes, or before any statistics, it is answered by zeros.

    Args:
        power: how much noise the classes call for.
        noise: the only source of randomness.
        from_earlier: fit the noise to the batches before this one, so that this one's share of
            positives does not show in its scale. The first batches, until both classes have been
            seen, get noise without signal.
        reduce: adds up a tensor over all workers that hold parts of the same batch, so that they
            add the noise that one worker with all of it would. Only an answer without signal goes
            by the worker's own part.
    """

    def __init__(
        self,
        power: PowerRule,
        noise: NoiseSource,
        *,
        from_earlier: bool = False,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._power = power
        self._noise = noise
        self._from_earlier = from_earlier
        self._reduce = reduce

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
        batch = measure_classes(rows, positive, self._reduce)
        earlier = self.classes.earlier(rows.device) if self._from_earlier else None
        current = self.classes.take_in(batch)
        estimate = earlier if self._from_earlier else current
        if estimate is None or current is None:
            return noise_alone(rows, gradients, float(row_norms(rows).max()), self._noise)
        cut_dim = rows.shape[1]
        solution = self._solve(estimate, cut_dim, self._power(estimate, cut_dim))
        if math.isinf(solution.sum_kl):
            return noise_alone(rows, gradients, float(row_norms(rows).max()), self._noise)
        before = self._solve(estimate, cut_dim, 0.0).sum_kl
        defended = self._draw(solution, estimate, rows, positive).add_(rows)
        pos_share = batch.pos_rows / (batch.pos_rows + batch.neg_rows)
        return release(defended, gradients), DefenseReport(
            noise_power=_mean_power(solution, pos_share, cut_dim) * estimate.unit * estimate.unit,
            sum_kl_before=before,
            sum_kl_after=solution.sum_kl,
            leak_auc_bound=leak_auc_bound(solution.sum_kl),
            solution=_in_units_of_one(solution, estimate.unit),
            charge=_charge(solution, estimate, current),
        )

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


def _charge(solution: NoiseSolution, estimate: ClassEstimate, current: ClassEstimate) -> LeakCharge:
    """Charge the gap against the noise on it.

    Where the noise was fitted to earlier batches, this one's gap counts if it is the longer one.
    """
    if not any((current.gap_squared, current.neg_variance, current.pos_variance)):
        return LeakCharge(0.0)
    return LeakCharge(
        sum_kl_along_gap(
            math.sqrt(solution.neg_along),
            math.sqrt(solution.pos_along),
            max(estimate.gap_length, current.gap_length) / estimate.unit,
        )
    )


def _mean_power(solution: NoiseSolution, pos_share: float, cut_dim: int) -> float:
    pos = solution.pos_along + (cut_dim - 1) * solution.pos_across
    neg = solution.neg_along + (cut_dim - 1) * solution.neg_across
    return pos_share * pos + (1 - pos_share) * neg


def _in_units_of_one(solution: NoiseSolution, unit: float) -> NoiseSolution:
    area = unit * unit
    return NoiseSolution(
        neg_along=area * solution.neg_along,
        neg_across=area * solution.neg_across,
        pos_along=area * solution.pos_along,
        pos_across=area * solution.pos_across,
        sum_kl=solution.sum_kl,
    )


def _per_row(positive: Tensor, pos: float, neg: float, rows: Tensor) -> Tensor:
    """Give each row its class's number, as a column."""
    numbers = torch.tensor((neg, pos), dtype=rows.dtype, device=rows.device)
    return numbers[positive.long()][:, None]

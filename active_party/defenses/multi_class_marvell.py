"""``marvell`` for more than two classes: one noise distribution for all of them.

An answer is charged the divergence of the pair of classes that it leaves furthest apart, computed
as if the classes had zero spread, see ``gaps``. Until every class has been seen, the answer is
noise without signal.

The noise is placed by square-root water-filling (see ``multi_class``). All classes get the same
weight, and their spread does not get credit:

- With the batch's shares as weights, the gap of a rare class would get little noise; its pair would
  then be the worst one, which counts. The shares would also show in the noise.
- With the spread counted, a direction under water does not get noise at all. A peer may predict
  the spread from its activations, so that the ledger would have to charge infinity.

A power ratio s is noise power s c, with c the squared distance of the two classes furthest apart.
It has to cover up to K - 1 directions: of K classes the worst pair is left between 1/s and
(K - 1)(1 + sqrt(K - 1))/(2 s), and (K - 1)/s where all are equally far apart; for K = 2 all three
are 1/s. The other strengths bound what is left of the worst pair, and meet it exactly.
"""

import math

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_statistics import (
    RunningMeans,
    longest_gap,
    measure_class_means,
    squared_distances,
)
from splitveil.active_party.defenses.interface import (
    Defended,
    DefenseReport,
    LeakCharge,
    RawBatch,
    RememberingDefense,
    release,
)
from splitveil.active_party.defenses.multi_class import (
    draw_shared_noise,
    pair_divergences,
    power_for_worst_pair,
    solve_shared_noise,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.row_noise import noise_alone
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.strength import PowerRatio, Strength, allowed_sum_kl
from splitveil.active_party.defenses.sum_kl import leak_auc_bound


class MultiClassMarvell(RememberingDefense):
    """Adds the noise, the same for all classes, that leaves them the least divergence.

    An answer before every class was seen, or in a batch whose classes have one mean, is noise of
    the batch's largest norm without any signal. Only a batch of zeros is answered by zeros. With
    ``from_earlier`` the noise is fitted to the batches before this one.
    """

    def __init__(
        self,
        strength: Strength,
        noise: NoiseSource,
        num_classes: int,
        *,
        from_earlier: bool = False,
    ) -> None:
        self._classes = RunningMeans(num_classes)
        super().__init__(self._classes)
        self._strength = strength
        self._noise = noise
        self._from_earlier = from_earlier
        self._weights = torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)

    def defend(self, batch: RawBatch) -> Defended:
        rows = as_rows(batch.gradients)
        num_classes = self._classes.num_classes
        measured = measure_class_means(
            rows, as_classes(batch.labels, rows, num_classes), num_classes
        )
        earlier = self._classes.earlier(measured) if self._from_earlier else None
        current = self._classes.take_in(measured)
        estimate = earlier if self._from_earlier else current
        unit = float(measured.norms.max())
        if estimate is None or current is None or longest_gap(estimate.means) == 0:
            return noise_alone(rows, batch.gradients, unit, self._noise)
        # In a unit in which squares stay in range, whatever the size of the gradients.
        unit = max(unit, float(estimate.means.abs().max()))
        means, weights = estimate.means / unit, self._weights.to(rows.device)
        power = self._power(means, weights)
        solution = solve_shared_noise(means, weights, 0.0, power)
        noise = draw_shared_noise(solution, rows, self._noise).mul_(unit)
        left = pair_divergences(means, solution)
        spread = (measured.deviation / unit) ** 2
        bare = solution._replace(variances=torch.zeros_like(solution.variances))
        after = float(pair_divergences(means, solution, spread).max())
        charged = left if current is estimate else _charged(left, means, current.means / unit)
        report = DefenseReport(
            noise_power=power * unit * unit,
            sum_kl_before=float(pair_divergences(means, bare, spread).max()),
            sum_kl_after=after,
            leak_auc_bound=leak_auc_bound(after),
            charge=LeakCharge(float(charged.max())),
        )
        return Defended(release(noise.add_(rows), batch.gradients), report)

    def _power(self, means: Tensor, weights: Tensor) -> float:
        if isinstance(self._strength, PowerRatio):
            return self._strength.power_ratio * float(squared_distances(means).max())
        return power_for_worst_pair(means, weights, allowed_sum_kl(self._strength))


def _charged(left: Tensor, fitted_means: Tensor, means: Tensor) -> Tensor:
    """Charge each pair for its gap in the batch if that is longer than the fitted gap."""
    gaps, fitted = squared_distances(means), squared_distances(fitted_means)
    of_new_gaps = torch.where(gaps > 0, math.inf, 0.0)
    return torch.where(fitted > 0, left * (gaps / fitted).clamp(min=1.0), of_new_gaps)


def worst_pair_factor(num_classes: int) -> float:
    """Return the largest possible product of a power ratio and the worst pair's divergence.

    With Z the K class means around their centre, in rows and over sqrt K, and singular values r_k,
    the noise is h r_k along each direction, where h times the sum of the r_k is the power. A pair's
    gap is sqrt K r_k (u_ik - u_jk), and the sum over k of (u_ik - u_jk)^2 at most 2: the pair is
    left 2 K r_1 / h at most. The sum of the r_k^2 is at most c (K - 1)/(2 K), c the longest squared
    gap, and r_1 times the sum of K - 1 values r_k at most (1 + sqrt(K - 1))/2 times that.
    """
    return (num_classes - 1) * (1 + math.sqrt(num_classes - 1)) / 2

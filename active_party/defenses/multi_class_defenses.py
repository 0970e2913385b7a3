"""The defenses of several classes: ``iso``, ``max_norm`` and ``marvell`` for a softmax.

What an answer is charged is the divergence of the pair of classes that it leaves furthest apart, as
if the classes had no spread of their own. It bounds every other pair, and any class against the
rest: the rest is a mixture of classes, and no mixture is easier to tell from a class than the
easiest of what it is made of. A class that no batch has held so far leaves the worst pair unknown,
and the charge of ``iso`` and ``max_norm`` infinite; ``marvell`` answers by noise without signal
until then.

``marvell`` places one noise, the same for all classes, by square-root water-filling (see
``multi_class``). It weighs all classes alike and gives their spread no credit:

- With the batch's shares for weights, the gap of a rare class would get little noise; that pair is
  then the worst one, which is what counts. The shares would also show in the noise.
- With the spread counted, a direction under water gets no noise at all. The spread is what a peer
  may predict from its activations, so that the ledger would have to charge infinity.

A power ratio s is noise power s c, with c the squared distance of the two classes furthest apart.
It has to cover up to K - 1 directions: of K classes the worst pair is left between 1/s and
(K - 1)(1 + sqrt(K - 1))/(2 s), and (K - 1)/s where all are equally far apart; for K = 2 all three
are 1/s. The other strengths bound what is left of the worst pair, and meet it exactly.
"""

import math

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_means import (
    ClassMeans,
    MeansMemory,
    longest_gap,
    measure_class_means,
    squared_distances,
)
from splitveil.active_party.defenses.interface import (
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    release,
)
from splitveil.active_party.defenses.iso import isotropic_noise, noise_alone
from splitveil.active_party.defenses.max_norm import RowNoise, missing_norms, stretch_rows
from splitveil.active_party.defenses.multi_class import (
    draw_shared_noise,
    pair_divergences,
    power_for_worst_pair,
    solve_shared_noise,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.settings import PowerRatio, Strength
from splitveil.active_party.defenses.strength import allowed_sum_kl
from splitveil.active_party.defenses.sum_kl import leak_auc_bound, sum_kl_along_gap


class MultiClassIsotropic(MeansMemory):
    """Adds the same amount of Gaussian noise to every example, as ``Isotropic`` does.

    Args:
        noise_ratio: root-mean-square noise norm r in units of the batch's largest gradient norm.
        noise: the only source of randomness.
        num_classes: how many classes there are.
    """

    def __init__(self, noise_ratio: float, noise: NoiseSource, num_classes: int) -> None:
        super().__init__(num_classes)
        self._noise_ratio = noise_ratio
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
        classes = as_classes(labels, rows, self.num_classes)
        batch = measure_class_means(rows, classes, self.num_classes)
        noise_norm = self._noise_ratio * float(batch.norms.max())
        defended = isotropic_noise(rows, noise_norm, self._noise).add_(rows)
        deviation = noise_norm / math.sqrt(rows.shape[1])
        charge = self._charge(self.classes.take_in(batch), deviation)
        return release(defended, gradients), DefenseReport(
            noise_power=noise_norm * noise_norm, charge=charge
        )

    @staticmethod
    def _charge(estimate: ClassMeans | None, deviation: float) -> LeakCharge:
        """Charge the longest gap against the noise on it."""
        if estimate is None:
            return LeakCharge(math.inf)
        if float(estimate.norms.max()) == 0:
            return LeakCharge(0.0)
        return LeakCharge(sum_kl_along_gap(deviation, deviation, longest_gap(estimate.means)))


class MultiClassMaxNorm(MeansMemory):
    """Stretches every row to the batch's largest norm, as ``MaxNorm`` does.

    Args:
        noise: the only source of randomness.
        num_classes: how many classes there are.
    """

    def __init__(self, noise: NoiseSource, num_classes: int) -> None:
        super().__init__(num_classes)
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
        classes = as_classes(labels, rows, self.num_classes)
        batch = measure_class_means(rows, classes, self.num_classes)
        noise = stretch_rows(rows, batch.norms, missing_norms(batch.norms), self._noise)
        charge = _charge_rows(noise, classes, batch, self.classes.take_in(batch))
        defended = noise.directions.mul_(noise.scalars).add_(rows)
        return release(defended, gradients), DefenseReport(
            noise_power=float(noise.norms.square().mean()), charge=charge
        )


class MultiClassMarvell(MeansMemory):
    """Adds the noise, the same for all classes, that leaves them the least divergence.

    An answer before every class was seen, or in a batch whose classes have one mean, is noise of
    the batch's largest norm without any signal. Only a batch of zeros is answered by zeros.

    Args:
        strength: how much noise.
        noise: the only source of randomness.
        num_classes: how many classes there are.
        from_earlier: fit the noise to the batches before this one.
    """

    def __init__(
        self,
        strength: Strength,
        noise: NoiseSource,
        num_classes: int,
        *,
        from_earlier: bool = False,
    ) -> None:
        super().__init__(num_classes)
        self._strength = strength
        self._noise = noise
        self._from_earlier = from_earlier
        self._weights = torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)

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
        classes = as_classes(labels, rows, self.num_classes)
        batch = measure_class_means(rows, classes, self.num_classes)
        earlier = self.classes.earlier(batch) if self._from_earlier else None
        current = self.classes.take_in(batch)
        estimate = earlier if self._from_earlier else current
        unit = float(batch.norms.max())
        if estimate is None or current is None or longest_gap(estimate.means) == 0:
            return noise_alone(rows, gradients, unit, self._noise)
        # In a unit in which squares stay in range, whatever the size of the gradients.
        unit = max(unit, float(estimate.means.abs().max()))
        means, weights = estimate.means / unit, self._weights.to(rows.device)
        power = self._power(means, weights)
        solution = solve_shared_noise(means, weights, 0.0, power)
        noise = draw_shared_noise(solution, rows, self._noise).mul_(unit)
        left = pair_divergences(means, solution)
        spread = (batch.deviation / unit) ** 2
        bare = solution._replace(variances=torch.zeros_like(solution.variances))
        after = float(pair_divergences(means, solution, spread).max())
        charged = left if current is estimate else _charged(left, means, current.means / unit)
        return release(noise.add_(rows), gradients), DefenseReport(
            noise_power=power * unit * unit,
            sum_kl_before=float(pair_divergences(means, bare, spread).max()),
            sum_kl_after=after,
            leak_auc_bound=leak_auc_bound(after),
            charge=LeakCharge(float(charged.max())),
        )

    def _power(self, means: Tensor, weights: Tensor) -> float:
        if isinstance(self._strength, PowerRatio):
            return self._strength.power_ratio * float(squared_distances(means).max())
        return power_for_worst_pair(means, weights, allowed_sum_kl(self._strength))


def _charged(left: Tensor, fitted_means: Tensor, means: Tensor) -> Tensor:
    """Charge each pair for its gap in the batch where that is longer than what was fitted to."""
    gaps, fitted = squared_distances(means), squared_distances(fitted_means)
    of_new_gaps = torch.where(gaps > 0, math.inf, 0.0)
    return torch.where(fitted > 0, left * (gaps / fitted).clamp(min=1.0), of_new_gaps)


def _charge_rows(
    noise: RowNoise, classes: Tensor, batch: ClassMeans, estimate: ClassMeans | None
) -> LeakCharge:
    """Charge each pair's gap against the mean noise variance that either class has on it.

    Of a class that the batch lacks a row at its running mean stands in, stretched as others are.
    """
    target = float(torch.hypot(batch.norms, noise.norms).max())
    if target == 0:
        return LeakCharge(0.0)
    if estimate is None:
        return LeakCharge(math.inf)
    means = estimate.means / target
    _, lengths, axes = torch.linalg.svd(means - means.mean(dim=0), full_matrices=False)
    axes = axes[lengths > 1e-12 * lengths[0]]
    if not lengths[0] > 0:
        return LeakCharge(math.inf)
    places = means @ axes.T
    moments = _second_moments(noise, target, classes, axes, len(means))
    for lacking in (batch.counts == 0).nonzero().squeeze(1).tolist():
        length = float(torch.linalg.vector_norm(means[lacking]))
        share = max(1 / (length * length) - 1, 0.0) if length else 0.0
        moments[lacking] = torch.outer(places[lacking], places[lacking]) * share
    gaps = places[:, None] - places[None]
    squares = gaps.square().sum(dim=2)
    pairs = ~torch.eye(len(means), dtype=torch.bool, device=means.device)
    if not bool((squares[pairs] > 0).all()):  # no gap to measure the noise by
        return LeakCharge(math.inf)
    along = gaps / squares.clamp(min=1e-300).sqrt()[:, :, None]
    # Row i: the variance that class i has along its gap to every other class.
    variances = torch.stack([((a @ m) * a).sum(dim=1) for a, m in zip(along, moments, strict=True)])
    own, others = variances[pairs], variances.T[pairs]
    if not bool((own > 0).all()):
        return LeakCharge(math.inf)
    left = (own / others + others / own - 2 + squares[pairs] * (1 / own + 1 / others)) / 2
    return LeakCharge(float(left.max()))


def _second_moments(
    noise: RowNoise, target: float, classes: Tensor, axes: Tensor, num_classes: int
) -> Tensor:
    """Return each class's mean noise covariance along the axes, (classes, axes, axes)."""
    coordinates = (noise.directions @ axes.T.to(noise.directions.dtype)).double()
    coordinates *= (noise.norms / target)[:, None]
    coordinates[noise.bare] = 0.0
    moments = []
    for place in range(num_classes):
        members = classes == place
        of_class = coordinates[members]
        bare = noise.norms[noise.bare][members[noise.bare]] / target
        # A row without a direction of its own got a random one: the same along every axis.
        of_bare = bare.square().sum() / noise.directions.shape[1]
        moment = of_class.T @ of_class
        moment.diagonal().add_(of_bare)
        moments.append(moment / max(len(of_class), 1))
    return torch.stack(moments)

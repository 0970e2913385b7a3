"""``marvell`` for more than two classes: one noise distribution for all of them.

An answer is charged the divergence of the pair of classes that it leaves furthest apart, computed
as if the classes had zero spread, see ``gaps``. Until every class has been seen, the answer is
noise without signal.

The noise is placed by square-root water-filling (below). All classes get the same weight: with the
batch's shares, the pair of a rare class would be the worst one, and the shares would show in the
noise. Their spread does not get credit, because a peer may predict it from its activations.

A power ratio s is noise power s c, with c the squared distance of the two classes furthest apart.
It has to cover up to K - 1 directions: of K classes the worst pair is left between 1/s and
(K - 1)(1 + sqrt(K - 1))/(2 s), and (K - 1)/s where all are equally far apart; for K = 2 all three
are 1/s. The other strengths bound what is left of the worst pair, and meet it exactly.

Square-root water-filling finds the shared noise covariance S that separates C classes the least.

All classes get the same noise, so that its covariance reveals nothing. With m_k the classes' means,
q_k their weights and m the mean of the m_k,

    B = sum_k q_k (m_k - m)(m_k - m)^T      rank at most C - 1, eigenvalues b_k > 0

minimise tr(S^-1 B), the sum over pairs of classes of the pair's symmetrised divergence weighted by
the product of their weights, subject to tr S = P. The best S has B's eigenvectors, and
S_k = h sqrt(b_k) along them, where h uses up the power. For two classes of the same weight this is
Marvell's solution without spread, u = v = 0.

What the noise leaves between one pair of classes is (m_i - m_j)^T S^-1 (m_i - m_j), which falls as
the reciprocal of the power, for every pair.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.class_statistics import (
    RunningMeans,
    longest_gap,
    measure_class_means,
    squared_distances,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.strength import PowerRatio, Strength, allowed_sum_kl


class MultiClassMarvell(interface.RememberingDefense):
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

    def defend(self, batch: interface.RawBatch) -> interface.Defended:
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
            return interface.noise_alone(rows, batch.gradients, unit, self._noise)
        # In a unit in which squares stay in range, whatever the size of the gradients.
        unit = max(unit, float(estimate.means.abs().max()))
        means, weights = estimate.means / unit, self._weights.to(rows.device)
        power = self._power(means, weights)
        solution = solve_shared_noise(means, weights, power)
        noise = draw_shared_noise(solution, rows, self._noise).mul_(unit)
        left = pair_divergences(means, solution)
        charged = left if current is estimate else _charged(left, means, current.means / unit)
        charge = interface.LeakCharge(float(charged.max()))
        report = interface.DefenseReport(noise_power=power * unit * unit, charge=charge)
        return interface.Defended(interface.release(noise.add_(rows), batch.gradients), report)

    def _power(self, means: Tensor, weights: Tensor) -> float:
        if isinstance(self._strength, PowerRatio):
            return self._strength.power_ratio * float(squared_distances(means).max())
        return power_for_worst_pair(means, weights, allowed_sum_kl(self._strength))


def _charged(left: Tensor, fitted_means: Tensor, means: Tensor) -> Tensor:
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


class SharedNoise(NamedTuple):
    """Noise that is the same for all classes."""

    directions: Tensor  # (rank, cut_dim) float64, orthonormal, by falling variance
    variances: Tensor  # (rank,) float64, noise along each direction; none in all others


def solve_shared_noise(class_means: Tensor, weights: Tensor, noise_power: float) -> SharedNoise:
    """Find the noise of a power (P) that separates the classes, (classes, cut_dim), the least.

    Weights are (classes,).
    """
    weights = weights.double() / weights.double().sum()
    largest = float(class_means.abs().max())
    unit = max(largest, math.sqrt(noise_power)) or 1.0
    scaled = class_means.double() / unit
    offsets = scaled - weights @ scaled
    _, roots, directions = torch.linalg.svd(weights.sqrt()[:, None] * offsets, full_matrices=False)
    # Rounding alone gives a length to directions that B does not have.
    rank = int((roots > 1e-12 * roots[0]).sum()) if roots[0] > 1e-14 * largest / unit else 0
    along = roots[: min(rank, len(weights) - 1)].tolist()
    level = noise_power / unit / unit / math.fsum(along) if along else 0.0
    variances = [level * root * unit * unit for root in along]
    on_device = torch.tensor(variances, dtype=torch.float64, device=class_means.device)
    return SharedNoise(directions[: len(along)], on_device)


def power_for_worst_pair(class_means: Tensor, weights: Tensor, sum_kl: float) -> float:
    """Find the least noise power that leaves every pair at most this divergence, above 0.

    The divergence falls as the reciprocal of the power.
    """
    if not sum_kl > 0:
        raise ValueError(f"sum_kl must be above 0, got {sum_kl}")
    largest = float(class_means.abs().max())
    power = largest * largest
    if power == 0:
        return 0.0
    solution = solve_shared_noise(class_means, weights, power)
    return power * float(pair_divergences(class_means, solution).max()) / sum_kl


def pair_divergences(class_means: Tensor, solution: SharedNoise) -> Tensor:
    """Return each pair's symmetrised divergence, (classes, classes); infinite without noise."""
    means = class_means.double()
    coordinates = means @ solution.directions.T
    gaps = (coordinates[:, None] - coordinates[None]).square()
    divergences = torch.where(gaps > 0, gaps / solution.variances, 0.0).sum(dim=2)
    # The part that the directions do not span; rounding alone leaves some of it.
    rest = means - coordinates @ solution.directions
    uncovered = (rest[:, None] - rest[None]).square().sum(dim=2)
    longest = (means[:, None] - means[None]).square().sum(dim=2).max()
    return divergences + torch.where(uncovered > 1e-20 * longest, math.inf, 0.0)


def draw_shared_noise(solution: SharedNoise, like: Tensor, noise: NoiseSource) -> Tensor:
    """Draw noise of the shape of ``like``, (batch, cut_dim), from one number per direction."""
    scalars = noise.standard_normal((like.shape[0], len(solution.variances)), like)
    axes = solution.variances.sqrt()[:, None] * solution.directions
    return scalars @ axes.to(like.dtype)

"""The shared noise covariance that separates C classes the least (square-root water-filling).

The classes' gradients are modelled as N(m_k, w I) with priors q_k. All get the same noise, so that
its covariance reveals nothing; the total covariance is S = w I + noise. With m the mean of the m_k,

    B = sum_k q_k (m_k - m)(m_k - m)^T      rank at most C - 1, eigenvalues b_k > 0

minimise tr(S^-1 B), the sum over pairs of classes of the pair's symmetrised divergence weighted by
the product of their priors, subject to tr(S - w I) = P and S >= w I. The best S has B's
eigenvectors, and S_k = max(w, h sqrt(b_k)) along them: the level h uses up the power, and a
direction whose sqrt(b_k) is under water does not get noise. For two equally frequent classes this
is Marvell's solution with u = v. For unequal ones, Marvell's two covariances leave a little less.

What the noise leaves between one pair of classes is (m_i - m_j)^T S^-1 (m_i - m_j). Without spread,
w = 0, it falls as the reciprocal of the power, for every pair.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.noise import NoiseSource


class SharedNoise(NamedTuple):
    """Noise that is the same for all classes."""

    directions: Tensor  # (rank, cut_dim) float64, orthonormal, by falling variance
    variances: Tensor  # (rank,) float64, noise along each direction; none in all others
    separation: float  # tr(S^-1 B), left by the noise; infinite if the classes stay bare


def solve_shared_noise(
    class_means: Tensor, priors: Tensor, residual_variance: float, noise_power: float
) -> SharedNoise:
    """Find the noise of the given power that separates the classes the least.

    Args:
        class_means: (classes, cut_dim).
        priors: share of each class, (classes,), not negative, summing to one.
        residual_variance: variance within the classes per coordinate (w).
        noise_power: expected squared noise norm per example (P).
    """
    priors = priors.double() / priors.double().sum()
    largest = float(class_means.abs().max())
    unit = max(largest, math.sqrt(residual_variance), math.sqrt(noise_power)) or 1.0
    scaled = class_means.double() / unit
    offsets = scaled - priors @ scaled
    _, roots, directions = torch.linalg.svd(priors.sqrt()[:, None] * offsets, full_matrices=False)
    # Rounding alone gives a length to directions that B does not have.
    rank = int((roots > 1e-12 * roots[0]).sum()) if roots[0] > 1e-14 * largest / unit else 0
    rank = min(rank, len(priors) - 1)
    residual = residual_variance / unit / unit
    totals = _water_levels(roots[:rank].tolist(), residual, noise_power / unit / unit)
    return SharedNoise(
        directions=directions[:rank],
        variances=torch.tensor(
            [(total - residual) * unit * unit for total in totals],
            dtype=torch.float64,
            device=class_means.device,
        ),
        separation=math.fsum(
            root * root / total if total else math.inf
            for root, total in zip(roots[:rank].tolist(), totals, strict=True)
        ),
    )


def power_for_worst_pair(class_means: Tensor, priors: Tensor, sum_kl: float) -> float:
    """Find the least noise power that leaves every pair of classes at most this divergence.

    Spread within the classes is not given credit: the noise is the solution of
    ``solve_shared_noise`` with a residual variance of 0, and the divergence, above 0, is that of
    `pair_divergences`. It falls as the reciprocal of the power, which is exact up to rounding.
    """
    if not sum_kl > 0:
        raise ValueError(f"sum_kl must be above 0, got {sum_kl}")
    largest = float(class_means.abs().max())
    power = largest * largest
    if power == 0:
        return 0.0
    solution = solve_shared_noise(class_means, priors, 0.0, power)
    return power * float(pair_divergences(class_means, solution).max()) / sum_kl


def pair_divergences(
    class_means: Tensor, solution: SharedNoise, residual_variance: float = 0.0
) -> Tensor:
    """Return the symmetrised divergence of every two classes, (classes, classes) float64.

    It is infinite for a pair whose means differ where there is neither noise nor spread.
    """
    means = class_means.double()
    coordinates = means @ solution.directions.T
    gaps = (coordinates[:, None] - coordinates[None]).square()
    totals = solution.variances + residual_variance
    divergences = torch.where(gaps > 0, gaps / totals, 0.0).sum(dim=2)
    # The part that the directions do not span; rounding alone leaves some of it.
    rest = means - coordinates @ solution.directions
    uncovered = (rest[:, None] - rest[None]).square().sum(dim=2)
    longest = (means[:, None] - means[None]).square().sum(dim=2).max()
    uncovered = torch.where(uncovered > 1e-20 * longest, uncovered, 0.0)
    return divergences + torch.where(uncovered > 0, uncovered / residual_variance, 0.0)


def draw_shared_noise(solution: SharedNoise, like: Tensor, noise: NoiseSource) -> Tensor:
    """Draw noise of the shape of ``like``, (batch, cut_dim), from one number per direction."""
    scalars = noise.standard_normal((like.shape[0], len(solution.variances)), like)
    axes = solution.variances.sqrt()[:, None] * solution.directions
    return scalars @ axes.to(like.dtype)


def _water_levels(roots: list[float], residual: float, power: float) -> list[float]:
    """Return S_k for falling ``roots`` = sqrt(b_k)."""
    level = 0.0
    for active in range(len(roots), 0, -1):
        level = (power + active * residual) / math.fsum(roots[:active])
        if level * roots[active - 1] >= residual:
            break
    return [max(residual, level * root) for root in roots]

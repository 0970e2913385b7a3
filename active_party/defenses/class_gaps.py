"""The gaps between the classes of a batch, and charges for the gap that noise covers the least.

With more than two classes, the pair that an answer leaves furthest apart counts. Its divergence
bounds every other pair, and any class against the rest, a mixture of classes. While a class has not
occurred in any batch, the worst gap is unknown and the charge is infinite.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses import class_statistics
from splitveil.active_party.defenses.rows import as_classes, as_positive
from splitveil.active_party.defenses.sum_kl import sum_kl_along_gap
from splitveil.common.privacy.charge import UNBOUNDED, Charge


class RowNoise(NamedTuple):
    """Noise along each row."""

    directions: Tensor  # (batch, cut_dim), unit vectors; random where a row has none
    scalars: Tensor  # (batch, 1), how far along them
    norms: Tensor  # (batch,) float64, root-mean-square
    bare: Tensor  # (bare rows,) indices of the rows without a direction


class _TwoClassGap(NamedTuple):
    norms: Tensor  # of the batch's rows, (batch,) float64
    largest: float  # of the norms
    positive: Tensor  # (batch,) bool
    batch: class_statistics.BatchClasses
    estimate: class_statistics.ClassEstimate | None

    def longest(self) -> float:
        """Return the distance of the class means, infinite if a class has never been seen."""
        if self.largest == 0:
            return 0.0
        return math.inf if self.estimate is None else self.estimate.gap_length

    def charge(self, noise: RowNoise) -> Charge:
        """Charge the gap against the mean noise variance that each class has on it.

        In a batch of one class, a row at the other class's running mean represents that class,
        stretched to the largest norm of the answer. The charge is infinite if that mean is longer,
        since such a row would have received no noise, or if the other class has never been seen.
        """
        target = float(torch.hypot(self.norms, noise.norms).max())
        if target == 0:
            return Charge(0.0)
        batch, estimate = self.batch, self.estimate
        if estimate is None or estimate.gap_squared == 0:
            return UNBOUNDED
        direction = estimate.gap / math.sqrt(estimate.gap_squared)
        cosines = (noise.directions @ direction.to(noise.directions.dtype)).double()
        cosines[noise.bare] = noise.directions.shape[1] ** -0.5  # mean over random directions
        squares = (cosines * (noise.norms / target)).square_()
        members = torch.stack((~self.positive, self.positive)).double()
        neg_sum, pos_sum = (members @ squares).tolist()
        other = estimate.gap * (estimate.unit / target)
        neg, pos = batch.moments
        if neg or not pos:
            neg_variance = neg_sum / batch.rows[0]
        else:
            neg_variance = _stand_in_variance(pos.mean / target - other, direction)
        if pos or not neg:
            pos_variance = pos_sum / batch.rows[1]
        else:
            pos_variance = _stand_in_variance(neg.mean / target + other, direction)
        gap = estimate.gap_length / target
        return Charge(sum_kl_along_gap(math.sqrt(neg_variance), math.sqrt(pos_variance), gap))


class _MultiClassGaps(NamedTuple):
    norms: Tensor
    largest: float
    classes: Tensor  # (batch,) int64, class indices
    batch: class_statistics.ClassMeans
    estimate: class_statistics.ClassMeans | None

    def longest(self) -> float:
        """Return the distance of the two class means furthest apart."""
        if self.estimate is None:
            return math.inf
        return class_statistics.longest_gap(self.estimate.means) if self.largest else 0.0

    def charge(self, noise: RowNoise) -> Charge:
        """Charge each pair's gap against the mean noise variance that either class has on it.

        A class that the batch lacks is represented by a row at its running mean, stretched as the
        other rows are.
        """
        target = float(torch.hypot(self.norms, noise.norms).max())
        if target == 0:
            return Charge(0.0)
        if self.estimate is None:
            return UNBOUNDED
        means = self.estimate.means / target
        _, lengths, axes = torch.linalg.svd(means - means.mean(dim=0), full_matrices=False)
        axes = axes[lengths > 1e-12 * lengths[0]]
        if not lengths[0] > 0:
            return UNBOUNDED
        coordinates = means @ axes.T
        moments = _second_moments(noise, target, self.classes, axes, len(means))
        for lacking in (self.batch.counts == 0).nonzero().squeeze(1).tolist():
            length = float(torch.linalg.vector_norm(means[lacking]))
            share = max(1 / (length * length) - 1, 0.0) if length else 0.0
            moments[lacking] = torch.outer(coordinates[lacking], coordinates[lacking]) * share
        return Charge(_worst_pair(coordinates, moments))


class _TwoClassMemory(class_statistics.RunningClasses):
    def measure(self, rows: Tensor, labels: Tensor) -> _TwoClassGap:
        """Measure a batch of rows (batch, cut_dim), and remember it."""
        positive = as_positive(labels, rows)
        batch, norms = class_statistics.measure_means(rows, positive)
        return _TwoClassGap(norms, float(norms.max()), positive, batch, self.take_in(batch))


class _MultiClassMemory(class_statistics.RunningMeans):
    def measure(self, rows: Tensor, labels: Tensor) -> _MultiClassGaps:
        """Measure a batch of rows (batch, cut_dim), and remember it."""
        classes = as_classes(labels, rows, self.num_classes)
        batch = class_statistics.measure_class_means(rows, classes, self.num_classes)
        largest = float(batch.norms.max())
        return _MultiClassGaps(batch.norms, largest, classes, batch, self.take_in(batch))


def gap_memory(num_classes: int) -> _TwoClassMemory | _MultiClassMemory:
    """Return an empty memory, which measures batches and knows the classes that one lacks."""
    return _TwoClassMemory() if num_classes == 2 else _MultiClassMemory(num_classes)


def _stand_in_variance(mean: Tensor, direction: Tensor) -> float:
    """Return the variance along the gap of a row at ``mean``, stretched to norm 1."""
    along = float(mean.dot(direction))
    length = float(torch.linalg.vector_norm(mean))
    return max(along * along / (length * length) - along * along, 0.0) if length else 0.0


def _worst_pair(coordinates: Tensor, moments: Tensor) -> float:
    """Return the largest divergence of a pair, given means and noise covariances along the axes."""
    gaps = coordinates[:, None] - coordinates[None]
    squares = gaps.square().sum(dim=2)
    pairs = ~torch.eye(len(coordinates), dtype=torch.bool, device=coordinates.device)
    if not bool((squares[pairs] > 0).all()):  # noise cannot be measured against a gap of 0
        return math.inf
    along = gaps / squares.clamp(min=1e-300).sqrt()[:, :, None]
    # Row i: the variance that class i has along its gap to every other class.
    variances = torch.stack([((a @ m) * a).sum(dim=1) for a, m in zip(along, moments, strict=True)])
    own, others = variances[pairs], variances.T[pairs]
    if not bool((own > 0).all()):
        return math.inf
    left = (own / others + others / own - 2 + squares[pairs] * (1 / own + 1 / others)) / 2
    return float(left.max())


def _second_moments(
    noise: RowNoise, target: float, classes: Tensor, axes: Tensor, num_classes: int
) -> Tensor:
    """Return each class's mean noise covariance along the axes, (classes, axes, axes)."""
    coordinates = (noise.directions @ axes.T.to(noise.directions.dtype)).double()
    coordinates *= (noise.norms / target)[:, None]
    coordinates[noise.bare] = 0.0
    moments = []
    for class_index in range(num_classes):
        members = classes == class_index
        of_class = coordinates[members]
        bare = noise.norms[noise.bare][members[noise.bare]] / target
        # A row without a direction got a random one: the same variance along every axis.
        of_bare = bare.square().sum() / noise.directions.shape[1]
        moment = of_class.T @ of_class
        moment.diagonal().add_(of_bare)
        moments.append(moment / max(len(of_class), 1))
    return torch.stack(moments)

"""The gaps between the classes of a batch, and charges for the gap that noise covers the least.

With more than two classes, the pair that an answer leaves furthest apart counts. Its divergence
bounds every other pair, and any class against the rest, a mixture of classes. While a class has not
occurred in any batch, the worst gap is unknown and the charge is infinite.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_statistics import (
    ClassMoments,
    RunningClasses,
    longest_gap,
    measure_classes,
)
from splitveil.active_party.defenses.rows import as_classes
from splitveil.common.privacy.charge import UNBOUNDED, Charge


class RowNoise(NamedTuple):
    """Noise along each row."""

    directions: Tensor  # (batch, cut_dim), unit vectors; random where a row has none
    scalars: Tensor  # (batch, 1), how far along them
    norms: Tensor  # (batch,) float64, root-mean-square
    bare: Tensor  # (bare rows,) indices of the rows without a direction


class ClassGaps(NamedTuple):
    classes: Tensor  # (batch,) int64, class indices
    batch: ClassMoments
    estimate: ClassMoments | None

    def longest(self) -> float:
        """Return the distance of the two class means furthest apart.

        Infinite if a class has never been seen, but 0 in a batch of zeros.
        """
        if self.batch.largest == 0:
            return 0.0
        return math.inf if self.estimate is None else longest_gap(self.estimate.means)

    def charge(self, noise: RowNoise) -> Charge:
        """Charge each pair's gap against the mean noise variance that either class has on it.

        A class that the batch lacks is represented by a row at its running mean, stretched to the
        largest norm of the answer. The charge is infinite if that mean is longer, since such a row
        would have received no noise, or if a class has never been seen.
        """
        target = float(torch.hypot(self.batch.norms, noise.norms).max())
        if target == 0:
            return Charge(0.0)
        if self.estimate is None:
            return UNBOUNDED
        means = self.estimate.means / target
        offsets = means - means.mean(dim=0)
        _, lengths, axes = torch.linalg.svd(offsets, full_matrices=False)
        if not lengths[0] > 0:
            return UNBOUNDED
        axes = axes[lengths > 1e-12 * lengths[0]]
        moments = _second_moments(noise, target, self.classes, axes, self.batch.counts)
        for lacking in (self.batch.counts == 0).nonzero().squeeze(1).tolist():
            length = float(torch.linalg.vector_norm(means[lacking]))
            share = max(1 / (length * length) - 1, 0.0) if length else 0.0
            along = axes @ means[lacking]
            moments[lacking] = torch.outer(along, along) * share
        return Charge(_worst_pair(offsets @ axes.T, moments))


class GapMemory(RunningClasses):
    """Measures batches, and knows the classes that one lacks."""

    def measure(self, rows: Tensor, labels: Tensor) -> ClassGaps:
        """Measure a batch of rows (batch, cut_dim), and remember it."""
        classes = as_classes(labels, rows, self.num_classes)
        batch = measure_classes(rows, classes, self.num_classes)
        return ClassGaps(classes, batch, self.take_in(batch))


def _worst_pair(coordinates: Tensor, moments: Tensor) -> float:
    """Return the largest divergence of a pair, given means and noise covariances along the axes."""
    gaps = coordinates[:, None] - coordinates[None]
    squares = gaps.square().sum(dim=2)
    pairs = ~torch.eye(len(coordinates), dtype=torch.bool, device=coordinates.device)
    if not bool((squares[pairs] > 0).all()):  # noise cannot be measured against a gap of 0
        return math.inf
    along = gaps / squares.clamp(min=1e-300).sqrt()[:, :, None]
    # Row i: the variance that class i has along its gap to every other class.
    variances = ((along @ moments) * along).sum(dim=2)
    own, others = variances[pairs], variances.T[pairs]
    if not bool((own > 0).all()):
        return math.inf
    left = (own / others + others / own - 2 + squares[pairs] * (1 / own + 1 / others)) / 2
    return float(left.max())


def _second_moments(
    noise: RowNoise, target: float, classes: Tensor, axes: Tensor, counts: Tensor
) -> Tensor:
    """Return each class's mean noise covariance along the axes, (classes, axes, axes)."""
    sizes = noise.norms / target
    coordinates = (noise.directions @ axes.T.to(noise.directions.dtype)).double()
    coordinates *= sizes[:, None]
    coordinates[noise.bare] = 0.0
    # All rows for each class, so that the time does not depend on how many are in it.
    of_classes = (coordinates * (classes == index)[:, None] for index in range(len(counts)))
    moments = torch.stack([own.T @ coordinates for own in of_classes])
    # A row without a direction got a random one: the same variance along every axis.
    bare = counts.new_zeros(len(counts)).to(sizes.device)
    bare.index_add_(0, classes[noise.bare], sizes[noise.bare].square())
    moments.diagonal(dim1=1, dim2=2).add_(bare[:, None] / noise.directions.shape[1])
    return moments / counts.clamp(min=1).to(sizes.device)[:, None, None]

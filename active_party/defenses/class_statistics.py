"""Means and spreads of the gradients of each class, in a batch and over earlier batches.

The gaps between the classes are charged for, against the noise that covers them the least.
With more than two classes, the pair that an answer leaves furthest apart counts. Its divergence
bounds every other pair, and any class against the rest, a mixture of classes. While a class has not
occurred in any batch, the worst gap is unknown and the charge is infinite.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.rows import RowsInDouble, as_classes
from splitveil.common.privacy.charge import UNBOUNDED, Charge

KEPT_SHARE = 0.9  # weight of the past in all running statistics: about the last ten batches count


class ClassMoments(NamedTuple):
    """The classes of a batch, or the best available estimate of them."""

    means: Tensor  # (classes, cut_dim) float64; zeros for a class without examples
    deviations: Tensor
    """Root-mean-square per coordinate, which unlike its square never overflows, (classes,) float64,
    on the CPU; zeros where spreads are not measured."""
    counts: Tensor  # examples of each class, (classes,) float64, on the CPU
    norms: Tensor  # of the batch's rows, (batch,) float64
    largest: float  # of the norms


def measure_classes(
    rows: Tensor, classes: Tensor, num_classes: int, *, with_spreads: bool = False
) -> ClassMoments:
    """Estimate the classes of one batch, (batch, cut_dim), in float64.

    Classes are indices, (batch,) int64; spreads take a second pass.
    """
    chunks = RowsInDouble(rows)
    members = (classes == torch.arange(num_classes, device=rows.device)[:, None]).double()
    sums, norms = [], []
    for part, chunk in chunks:
        sums.append(members[:, part] @ chunk)
        norms.append(torch.linalg.vector_norm(chunk, dim=1))
    counts = members.sum(dim=1)
    means = functools.reduce(Tensor.add_, sums).div_(counts.clamp(min=1)[:, None])
    squares = torch.zeros_like(counts)
    for part, chunk in chunks if with_spreads else ():
        own = members[:, part]
        chunk.addmm_(own.T, means, alpha=-1)  # all products but one are exactly zero
        squares += own.mv(torch.linalg.vector_norm(chunk, dim=1).square_())
    of_rows = torch.cat(norms)
    # A single transfer, because each one makes the processor wait for the device.
    figures = torch.cat((counts, squares, of_rows.max()[None])).cpu()
    counts, squares, largest = torch.split(figures, [num_classes, num_classes, 1])
    return ClassMoments(
        chunks.to_size(means),
        squares.div_(counts.clamp(min=1) * chunks.cut_dim).sqrt_() * chunks.unit,
        counts,
        chunks.to_size(of_rows),
        chunks.unit * float(largest),
    )


def squared_distances(points: Tensor) -> Tensor:
    """Return the squared distance of every two points, (points, points), without cancellation."""
    distances: Tensor = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square()


def longest_gap(means: Tensor) -> float:
    """Return the distance of the two class means furthest apart, exact for means of any size."""
    unit = float(means.abs().max())
    return math.sqrt(float(squared_distances(means / unit).max())) * unit if unit else 0.0


class RunningClasses:
    """Running statistics of the classes over earlier batches. Private to the active party."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._means: Tensor | None = None
        self._deviations, self._counts = torch.zeros(2, num_classes, dtype=torch.float64)

    def earlier(self, batch: ClassMoments) -> ClassMoments | None:
        """Return the classes before a batch; None if one of them had not been seen before."""
        if self._means is None or not bool((self._counts > 0).all()):
            return None
        means = self._means.to(batch.means.device)
        return batch._replace(means=means, deviations=self._deviations, counts=self._counts)

    def take_in(self, batch: ClassMoments) -> ClassMoments | None:
        """Remember a batch and return its classes, one that it lacks from earlier batches.

        None before all were seen.
        """
        if self._means is None:
            self._means = torch.zeros_like(batch.means)
        means, deviations = self._means.to(batch.means.device), self._deviations
        if means.shape != batch.means.shape:
            raise ValueError(f"cut_dim was {means.shape[1]} and is now {batch.means.shape[1]}")
        present = batch.counts > 0
        weights = (
            torch.full_like(batch.counts, 1 - KEPT_SHARE).where(self._counts > 0, 1.0) * present
        )
        self._means = means.lerp(batch.means, weights.to(means.device)[:, None])
        self._deviations = deviations.lerp(batch.deviations, weights)
        self._counts = self._counts + batch.counts
        if bool(present.all()):
            return batch
        if not bool((self._counts > 0).all()):
            return None
        return batch._replace(
            means=torch.where(present.to(means.device)[:, None], batch.means, means),
            deviations=torch.where(present, batch.deviations, deviations),
            counts=self._counts,
        )

    def state_dict(self) -> dict[str, Tensor]:
        if self._means is None:
            return {}
        return {
            "means": self._means.cpu().clone(),
            "deviations": self._deviations.clone(),
            "counts": self._counts.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if set(state) not in ({"means", "deviations", "counts"}, set[str]()):
            raise ValueError(f"expected statistics of classes, got {sorted(state)}")
        if state and len(state["counts"]) != self.num_classes:
            raise ValueError(
                f"expected means of {self.num_classes} classes, got {len(state['counts'])}"
            )
        none = torch.zeros(self.num_classes, dtype=torch.float64)
        self._means = state["means"].clone() if state else None
        self._deviations = state["deviations"].clone() if state else none
        self._counts = state["counts"].clone() if state else none


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

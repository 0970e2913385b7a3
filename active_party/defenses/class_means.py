"""Class means of the gradients of several classes, in a batch and over earlier batches.

For two classes ``class_statistics`` also keeps the spread of each class. Here the spread within the
classes is one number, because the noise is the same for all of them.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_statistics import KEPT_SHARE
from splitveil.active_party.defenses.rows import RowsInDouble


class ClassMeans(NamedTuple):
    """The classes of a batch, or the best available estimate of them."""

    means: Tensor
    """(classes, cut_dim) float64; zeros for a class without examples."""

    counts: Tensor
    """Examples of each class, (classes,) float64, on the CPU."""

    deviation: float
    """Root-mean-square distance of an example to its class's mean, per coordinate."""

    norms: Tensor
    """Norms of the batch's rows, (batch,) float64."""


def squared_distances(points: Tensor) -> Tensor:
    """Return the squared distance of every two points, (points, points), without cancellation."""
    distances: Tensor = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square()


def longest_gap(means: Tensor) -> float:
    """Return the distance of the two class means furthest apart, exact for means of any size."""
    unit = float(means.abs().max())
    return math.sqrt(float(squared_distances(means / unit).max())) * unit if unit else 0.0


def measure_class_means(rows: Tensor, classes: Tensor, num_classes: int) -> ClassMeans:
    """Estimate the classes of one batch, (batch, cut_dim), in two passes and float64."""
    chunks = RowsInDouble(rows)
    counts = torch.bincount(classes, minlength=num_classes).double()
    means = torch.zeros(num_classes, rows.shape[1], dtype=torch.float64, device=rows.device)
    for part, chunk in chunks:
        means.index_add_(0, classes[part], chunk)
    means /= counts.clamp(min=1)[:, None]
    norms, squares = [], torch.zeros((), dtype=torch.float64, device=rows.device)
    for part, chunk in chunks:
        norms.append(torch.linalg.vector_norm(chunk, dim=1))
        squares += chunk.sub_(means[classes[part]]).square_().sum()
    size = chunks.unit
    deviation = math.sqrt(float(squares) / rows.numel()) * size
    return ClassMeans(means * size, counts.cpu(), deviation, torch.cat(norms) * size)


class RunningMeans:
    """Running class means over earlier batches. Private to the active party."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._means: Tensor | None = None
        self._counts = torch.zeros(num_classes, dtype=torch.float64)

    def earlier(self, batch: ClassMeans) -> ClassMeans | None:
        """Return a batch with the means before it; None if a class had not been seen before."""
        if self._means is None or not bool((self._counts > 0).all()):
            return None
        return batch._replace(means=self._means.to(batch.means.device), counts=self._counts.clone())

    def take_in(self, batch: ClassMeans) -> ClassMeans | None:
        """Remember a batch, and return its classes, with running means for classes that it lacks.

        None if one has never been seen.
        """
        present = (batch.counts > 0)[:, None].to(batch.means.device)
        if self._means is None:
            self._means = torch.zeros_like(batch.means)
        old = self._means.to(batch.means.device)
        if old.shape != batch.means.shape:
            raise ValueError(f"cut_dim was {old.shape[1]} and is now {batch.means.shape[1]}")
        known = (self._counts > 0)[:, None].to(old.device)
        blended = torch.where(known, old.lerp(batch.means, 1 - KEPT_SHARE), batch.means)
        self._means = torch.where(present, blended, old)
        self._counts = self._counts + batch.counts
        if not bool((self._counts > 0).all()):
            return None
        return batch._replace(means=torch.where(present, batch.means, old))

    def state_dict(self) -> dict[str, Tensor]:
        if self._means is None:
            return {}
        return {"means": self._means.cpu().clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if set(state) not in ({"means", "counts"}, set[str]()):
            raise ValueError(f"expected means and counts of classes, got {sorted(state)}")
        if state and len(state["counts"]) != self.num_classes:
            raise ValueError(
                f"expected means of {self.num_classes} classes, got {len(state['counts'])}"
            )
        self._means = state["means"].clone() if state else None
        counts = torch.zeros(self.num_classes, dtype=torch.float64)
        self._counts = state["counts"].clone() if state else counts

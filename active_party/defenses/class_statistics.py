"""Means and spreads of the gradients of each class, in a batch and over earlier batches.

Of two classes each has a spread; of several, spread is not given credit and not measured.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from splitveil.active_party.defenses.rows import RowsInDouble

KEPT_SHARE = 0.9  # weight of the past in all running statistics: about the last ten batches count

_NAMES = ("neg", "pos")


class ClassMoments(NamedTuple):
    """Maximum-likelihood estimates of one class."""

    mean: Tensor  # (cut_dim,) float64
    deviation: float  # root-mean-square, per coordinate; unlike its square, never overflows

    def to(self, device: torch.device) -> Self:
        return self._replace(mean=self.mean.to(device))


class BatchClasses(NamedTuple):
    """The negatives and the positives of one batch."""

    moments: tuple[ClassMoments | None, ClassMoments | None]  # None for one without examples
    rows: tuple[int, int]

    @classmethod
    def of(cls, means: Tensor, deviations: Sequence[float], rows: Sequence[float]) -> Self:
        neg, pos = (
            ClassMoments(mean, deviation) if count else None
            for mean, deviation, count in zip(means, deviations, rows, strict=True)
        )
        return cls((neg, pos), (int(rows[0]), int(rows[1])))


class ClassEstimate(NamedTuple):
    """The best estimate of both classes, in units of ``unit``."""

    gap: Tensor  # mean of the positives minus mean of the negatives, (cut_dim,) float64
    gap_squared: float
    neg_variance: float
    pos_variance: float
    pos_fraction: float
    unit: float

    @property
    def gap_length(self) -> float:
        """Distance of the class means, in the units of the gradient."""
        return math.sqrt(self.gap_squared) * self.unit

    @classmethod
    def between(cls, neg: ClassMoments, pos: ClassMoments, pos_fraction: float) -> Self:
        gap = pos.mean - neg.mean
        unit = (
            max(float(torch.linalg.vector_norm(gap, math.inf)), neg.deviation, pos.deviation) or 1.0
        )
        gap = gap / unit
        return cls(
            gap=gap,
            gap_squared=float(gap.dot(gap)),
            neg_variance=(neg.deviation / unit) ** 2,
            pos_variance=(pos.deviation / unit) ** 2,
            pos_fraction=pos_fraction,
            unit=unit,
        )


def measure_classes(rows: Tensor, positive: Tensor) -> BatchClasses:
    """Estimate the classes of one batch, (batch, cut_dim), in two passes and float64."""
    chunks = RowsInDouble(rows)
    members = torch.stack((~positive, positive)).double()
    counts = members.sum(dim=1)
    sums = _total(members[:, part] @ chunk for part, chunk in chunks)
    means = sums.div_(counts.clamp(min=1)[:, None])
    squares = _total(_squares(members[:, part], means, chunk) for part, chunk in chunks)
    # A single transfer, because each one makes the processor wait for the device.
    neg_rows, pos_rows, *of_squares = torch.cat((counts, squares)).tolist()
    deviations = [
        math.sqrt(square / (max(count, 1) * chunks.cut_dim)) * chunks.unit
        for square, count in zip(of_squares, (neg_rows, pos_rows), strict=True)
    ]
    return BatchClasses.of(chunks.to_size(means), deviations, (neg_rows, pos_rows))


def measure_means(rows: Tensor, positive: Tensor) -> tuple[BatchClasses, Tensor]:
    """Estimate only the means, in one pass and float64, and return the rows' norms, too."""
    chunks = RowsInDouble(rows)
    members = torch.stack((~positive, positive)).double()
    sums, norms = [], []
    for part, chunk in chunks:
        sums.append(members[:, part] @ chunk)
        norms.append(torch.linalg.vector_norm(chunk, dim=1))
    counts = members.sum(dim=1)
    means = chunks.to_size(_total(sums).div_(counts.clamp(min=1)[:, None]))
    return BatchClasses.of(means, (0.0, 0.0), counts.tolist()), chunks.to_size(torch.cat(norms))


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, parts)


def _squares(members: Tensor, means: Tensor, rows: Tensor) -> Tensor:
    """Return each class's sum of squared distances from its mean, (2,); overwrites the rows."""
    rows.addmm_(members.T, means, alpha=-1)  # one of the two products is exactly zero
    return members.mv(torch.linalg.vector_norm(rows, dim=1).square_())


class RunningClasses:
    """Running statistics of both classes over earlier batches. Private to the active party."""

    def __init__(self) -> None:
        self._moments: list[ClassMoments | None] = [None, None]
        self._rows = [0, 0]

    def earlier(self, device: torch.device) -> ClassEstimate | None:
        """Estimate both classes from earlier batches; None until both have been seen."""
        return _estimate(self._moments, self._rows, device)

    def take_in(self, batch: BatchClasses) -> ClassEstimate | None:
        """Remember a batch, and estimate both classes, a missing one from earlier batches.

        None if it was never seen.
        """
        pairs = list(zip(self._moments, batch.moments, strict=True))
        self._moments = [_blend(old, new) for old, new in pairs]
        self._rows = [sum(rows) for rows in zip(self._rows, batch.rows, strict=True)]
        device = next(new.mean.device for new in batch.moments if new)
        rows = batch.rows if all(batch.rows) else self._rows
        return _estimate([new or old for old, new in pairs], rows, device)

    def state_dict(self) -> dict[str, Tensor]:
        state = {}
        for name, moments, rows in zip(_NAMES, self._moments, self._rows, strict=True):
            if moments is not None:
                state[f"{name}_mean"] = moments.mean.clone()
                state[f"{name}_deviation"] = torch.tensor(moments.deviation, dtype=torch.float64)
                state[f"{name}_rows"] = torch.tensor(rows)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        classes = [name for name in _NAMES if f"{name}_mean" in state]
        expected = {f"{name}_{part}" for name in classes for part in ("mean", "deviation", "rows")}
        if set(state) != expected:
            raise ValueError(f"expected class statistics {sorted(expected)}, got {sorted(state)}")
        for index, name in enumerate(_NAMES):
            self._moments[index], self._rows[index] = None, 0
            if name in classes:
                mean, deviation = state[f"{name}_mean"].clone(), float(state[f"{name}_deviation"])
                self._moments[index] = ClassMoments(mean, deviation)
                self._rows[index] = int(state[f"{name}_rows"])


def _estimate(
    moments: Sequence[ClassMoments | None], rows: Sequence[int], device: torch.device
) -> ClassEstimate | None:
    neg, pos = moments
    if neg is None or pos is None:
        return None
    return ClassEstimate.between(neg.to(device), pos.to(device), rows[1] / sum(rows))


def _blend(old: ClassMoments | None, new: ClassMoments | None) -> ClassMoments | None:
    if old is None or new is None:
        return new or old
    if old.mean.shape != new.mean.shape:
        raise ValueError(f"cut_dim was {len(old.mean)} and is now {len(new.mean)}")
    mean = old.to(new.mean.device).mean.lerp(new.mean, 1 - KEPT_SHARE)
    deviation = KEPT_SHARE * old.deviation + (1 - KEPT_SHARE) * new.deviation
    return ClassMoments(mean, deviation)


class ClassMeans(NamedTuple):
    """The classes of a batch, or the best available estimate of them."""

    means: Tensor  # (classes, cut_dim) float64; zeros for a class without examples
    counts: Tensor  # examples of each class, (classes,) float64, on the CPU
    norms: Tensor  # of the batch's rows, (batch,) float64


def squared_distances(points: Tensor) -> Tensor:
    """Return the squared distance of every two points, (points, points), without cancellation."""
    distances: Tensor = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square()


def longest_gap(means: Tensor) -> float:
    """Return the distance of the two class means furthest apart, exact for means of any size."""
    unit = float(means.abs().max())
    return math.sqrt(float(squared_distances(means / unit).max())) * unit if unit else 0.0


def measure_class_means(rows: Tensor, classes: Tensor, num_classes: int) -> ClassMeans:
    """Estimate the classes of one batch, (batch, cut_dim), in one pass and float64."""
    chunks = RowsInDouble(rows)
    counts = torch.bincount(classes, minlength=num_classes).double()
    means = torch.zeros(num_classes, rows.shape[1], dtype=torch.float64, device=rows.device)
    norms = []
    for part, chunk in chunks:
        means.index_add_(0, classes[part], chunk)
        norms.append(torch.linalg.vector_norm(chunk, dim=1))
    means /= counts.clamp(min=1)[:, None]
    return ClassMeans(means * chunks.unit, counts.cpu(), torch.cat(norms) * chunks.unit)


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
        """Remember a batch; return its classes, or the running ones. None before all were seen."""
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

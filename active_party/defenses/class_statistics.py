"""What the two classes' gradients look like: means and spreads of a batch, and of earlier ones."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from active_party.defenses.rows import in_chunks, largest_size

_KEPT_SHARE = 0.9
"""Weight of the past in the running statistics: about the last ten batches count."""


class ClassMoments(NamedTuple):
    """Maximum-likelihood estimates of one class."""

    mean: Tensor  # (cut_dim,) float64
    deviation: (
        float  # root-mean-square deviation per coordinate; unlike its square, never overflows
    )


class BatchClasses(NamedTuple):
    """The classes of one batch; None for a class without examples."""

    neg: ClassMoments | None
    pos: ClassMoments | None
    neg_rows: int
    pos_rows: int


class ClassEstimate(NamedTuple):
    """Both classes, as well as they are known, in units of ``unit``."""

    gap: Tensor  # mean of the positives minus mean of the negatives, (cut_dim,) float64
    gap_squared: float
    neg_variance: float
    pos_variance: float
    pos_fraction: float
    unit: float

    @classmethod
    def between(cls, neg: ClassMoments, pos: ClassMoments, pos_fraction: float) -> Self:
        """Compare two classes."""
        gap = pos.mean - neg.mean
        unit = max(float(largest_size(gap)), neg.deviation, pos.deviation) or 1.0
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
    """Estimate the classes of one batch, in two passes and float64."""
    largest = largest_size(rows)
    unit = torch.where(largest > 0, largest, 1.0)
    shares = torch.stack((~positive, positive)).double()
    counts = shares.sum(dim=1)
    shares = shares / counts.clamp(min=1)[:, None]
    classes = positive.long()
    means = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    for part, chunk in in_chunks(rows, unit):
        means.addmm_(shares[:, part], chunk)
    squares = torch.zeros(2, dtype=torch.float64, device=rows.device)
    for part, chunk in in_chunks(rows, unit):
        distances = torch.linalg.vector_norm(chunk.sub_(means[classes[part]]), dim=1)
        squares.addmv_(shares[:, part], distances.square_())
    # One transfer, because each makes the processor wait for the device.
    neg_rows, pos_rows, neg_square, pos_square, size = torch.cat(
        (counts, squares, unit[None])
    ).tolist()
    means = means * unit
    return BatchClasses(
        neg=ClassMoments(means[0], _deviation(neg_square, rows) * size) if neg_rows else None,
        pos=ClassMoments(means[1], _deviation(pos_square, rows) * size) if pos_rows else None,
        neg_rows=int(neg_rows),
        pos_rows=int(pos_rows),
    )


def _deviation(mean_squared_distance: float, rows: Tensor) -> float:
    return math.sqrt(mean_squared_distance / rows.shape[1])


class RunningClasses:
    """The classes of earlier batches, for a batch that lacks one. Private to the active party."""

    def __init__(self) -> None:
        self._moments: dict[str, ClassMoments] = {}
        self._rows = {"neg": 0, "pos": 0}

    def take_in(self, batch: BatchClasses) -> ClassEstimate | None:
        """Remember a batch, and estimate both classes.

        Returns:
            The batch's own estimate if it has both classes. If one is missing, the running
            statistics stand in for it; None if it has never been seen.
        """
        self._rows["neg"] += batch.neg_rows
        self._rows["pos"] += batch.pos_rows
        neg = self._remember("neg", batch.neg)
        pos = self._remember("pos", batch.pos)
        if neg is None or pos is None:
            return None
        rows = (
            (batch.neg_rows, batch.pos_rows)
            if batch.neg_rows and batch.pos_rows
            else (self._rows["neg"], self._rows["pos"])
        )
        return ClassEstimate.between(neg, pos, rows[1] / sum(rows))

    def _remember(self, name: str, new: ClassMoments | None) -> ClassMoments | None:
        old = self._moments.get(name)
        if new is None:
            return old
        if old is not None and old.mean.shape != new.mean.shape:
            raise ValueError(f"cut_dim was {len(old.mean)} and is now {len(new.mean)}")
        self._moments[name] = new if old is None else _blend(old, new)
        return new

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics of each class seen so far."""
        state = {}
        for name, moments in self._moments.items():
            state[f"{name}_mean"] = moments.mean.clone()
            state[f"{name}_deviation"] = torch.tensor(moments.deviation, dtype=torch.float64)
            state[f"{name}_rows"] = torch.tensor(self._rows[name])
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the statistics.

        Raises:
            ValueError: the state has not the names that ``state_dict`` gives.
        """
        classes = [name for name in self._rows if f"{name}_mean" in state]
        parts = ("mean", "deviation", "rows")
        expected = {f"{name}_{part}" for name in classes for part in parts}
        if set(state) != expected:
            raise ValueError(f"expected class statistics {sorted(expected)}, got {sorted(state)}")
        self._moments = {
            name: ClassMoments(state[f"{name}_mean"].clone(), float(state[f"{name}_deviation"]))
            for name in classes
        }
        self._rows = {
            name: int(state[f"{name}_rows"]) if name in classes else 0 for name in self._rows
        }


def _blend(old: ClassMoments, new: ClassMoments) -> ClassMoments:
    mean = old.mean.to(new.mean.device).lerp(new.mean, 1 - _KEPT_SHARE)
    deviation = _KEPT_SHARE * old.deviation + (1 - _KEPT_SHARE) * new.deviation
    return ClassMoments(mean, deviation)

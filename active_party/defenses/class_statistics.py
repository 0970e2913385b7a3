"""Means and spreads of the gradients of two classes, in a batch and over earlier batches."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from splitveil.active_party.defenses.rows import RowsInDouble

KEPT_SHARE = 0.9
"""Weight of the past in all running statistics: about the last ten batches count."""


class ClassMoments(NamedTuple):
    """Maximum-likelihood estimates of one class."""

    mean: Tensor  # (cut_dim,) float64
    deviation: (
        float  # root-mean-square deviation per coordinate; unlike its square, never overflows
    )

    def to(self, device: torch.device) -> Self:
        return self._replace(mean=self.mean.to(device))


class BatchClasses(NamedTuple):
    """The classes of one batch; None for a class without examples."""

    neg: ClassMoments | None
    pos: ClassMoments | None
    neg_rows: int
    pos_rows: int


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
    neg_rows, pos_rows, neg_square, pos_square = torch.cat((counts, squares)).tolist()
    neg, pos = chunks.to_size(means)
    return BatchClasses(
        neg=ClassMoments(neg, _deviation(neg_square, neg_rows, chunks)) if neg_rows else None,
        pos=ClassMoments(pos, _deviation(pos_square, pos_rows, chunks)) if pos_rows else None,
        neg_rows=int(neg_rows),
        pos_rows=int(pos_rows),
    )


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
    neg_rows, pos_rows = (int(count) for count in counts.tolist())
    classes = BatchClasses(
        neg=ClassMoments(means[0], 0.0) if neg_rows else None,
        pos=ClassMoments(means[1], 0.0) if pos_rows else None,
        neg_rows=neg_rows,
        pos_rows=pos_rows,
    )
    return classes, chunks.to_size(torch.cat(norms))


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, parts)


def _squares(members: Tensor, means: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of each class's squared distances from its mean, (2,); overwrites the rows.

    ``members`` is 1 where a row belongs to a class, else 0, (2, rows); means are (2, cut_dim).
    """
    rows.addmm_(members.T, means, alpha=-1)  # one of the two products is exactly zero
    return members.mv(torch.linalg.vector_norm(rows, dim=1).square_())


def _deviation(squares: float, rows: float, chunks: RowsInDouble) -> float:
    return math.sqrt(squares / (rows * chunks.cut_dim)) * chunks.unit


class RunningClasses:
    """Running statistics of both classes over earlier batches. Private to the active party."""

    def __init__(self) -> None:
        self._moments: dict[str, ClassMoments] = {}
        self._rows = {"neg": 0, "pos": 0}

    def earlier(self, device: torch.device) -> ClassEstimate | None:
        """Estimate both classes from earlier batches; None until both have been seen."""
        return self._estimate(
            self._moments.get("neg"), self._moments.get("pos"), self._rows, device
        )

    def take_in(self, batch: BatchClasses) -> ClassEstimate | None:
        """Remember a batch, and estimate both classes from it.

        If one is missing, its running statistics are used instead; None if it was never seen.
        """
        own_rows = {"neg": batch.neg_rows, "pos": batch.pos_rows}
        for name, count in own_rows.items():
            self._rows[name] += count
        present = batch.neg or batch.pos
        if present is None:
            raise ValueError("a batch without rows has no classes")
        neg = self._remember("neg", batch.neg)
        pos = self._remember("pos", batch.pos)
        rows = own_rows if batch.neg and batch.pos else self._rows
        return self._estimate(neg, pos, rows, present.mean.device)

    @staticmethod
    def _estimate(
        neg: ClassMoments | None,
        pos: ClassMoments | None,
        rows: Mapping[str, int],
        device: torch.device,
    ) -> ClassEstimate | None:
        if neg is None or pos is None:
            return None
        pos_fraction = rows["pos"] / (rows["neg"] + rows["pos"])
        return ClassEstimate.between(neg.to(device), pos.to(device), pos_fraction)

    def _remember(self, name: str, new: ClassMoments | None) -> ClassMoments | None:
        old = self._moments.get(name)
        if new is None:
            return old
        if old is not None and old.mean.shape != new.mean.shape:
            raise ValueError(f"cut_dim was {len(old.mean)} and is now {len(new.mean)}")
        self._moments[name] = new if old is None else _blend(old, new)
        return new

    def state_dict(self) -> dict[str, Tensor]:
        state = {}
        for name, moments in self._moments.items():
            state[f"{name}_mean"] = moments.mean.clone()
            state[f"{name}_deviation"] = torch.tensor(moments.deviation, dtype=torch.float64)
            state[f"{name}_rows"] = torch.tensor(self._rows[name])
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
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
    mean = old.to(new.mean.device).mean.lerp(new.mean, 1 - KEPT_SHARE)
    deviation = KEPT_SHARE * old.deviation + (1 - KEPT_SHARE) * new.deviation
    return ClassMoments(mean, deviation)

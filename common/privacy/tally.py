"""Figures of one attack on one layer over a run, in memory that does not grow with the run.

Sums are exact. Quantiles come from counts in 10,000 equal cells between 1 and the figure of scores
that reveal nothing, 1/2 of an AUC and 0 of an R2, and are off by at most half a cell; AUCs below
1/2 count as 1/2 there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from splitveil.common.privacy.figures import ClassFigures
from splitveil.common.privacy.leakage import PairAucs
from splitveil.common.text.values import as_number

T = TypeVar("T")

REMEMBERED_EPOCHS = 64  # whose figures are stored, to be written once an epoch is over

_CELLS = 10_000


def by_layer(figures: Iterable[tuple[str, str, T]]) -> dict[str, dict[str, T]]:
    nested: dict[str, dict[str, T]] = {}
    for layer, attack, figure in figures:
        nested.setdefault(layer, {})[attack] = figure
    return nested


class AttackTally:
    def __init__(self, floor: float = 0.5) -> None:
        self._floor = floor
        self.batches = 0
        self.last_epoch = -1
        self._sum = self._random_sum = 0.0
        self._measured, self._random = (np.zeros(_CELLS, dtype=np.int32) for _ in range(2))
        """Numbers of figures in each cell: 40 KiB each."""
        self._epochs: dict[int, tuple[float, int]] = {}
        self._worst_before = floor

    def add(self, epoch: int, leak: float, random: float) -> None:
        """Add one batch; its epoch is not before the previous batch's."""
        if epoch != self.last_epoch:
            if self.last_epoch in self._epochs:
                self._worst_before = self.worst_epoch
            self._epochs[epoch] = (0.0, 0)
            for earlier in sorted(self._epochs)[:-REMEMBERED_EPOCHS]:
                del self._epochs[earlier]
            self.last_epoch = epoch
        total, count = self._epochs[epoch]
        self._epochs[epoch] = (total + leak, count + 1)
        self.batches += 1
        self._sum += leak
        self._random_sum += random
        for counts, value in ((self._measured, leak), (self._random, random)):
            cell = int((value - self._floor) / (1 - self._floor) * _CELLS)
            counts[min(max(cell, 0), _CELLS - 1)] += 1

    @property
    def mean(self) -> float:
        return self._sum / self.batches

    @property
    def random_mean(self) -> float:
        return self._random_sum / self.batches

    @property
    def worst_epoch(self) -> float:
        """Largest mean over an epoch's batches."""
        return max(self._worst_before, self.epoch_mean(self.last_epoch) or self._floor)

    def epoch_mean(self, epoch: int) -> float | None:
        """Return the mean over one of the last epochs; None for an older or an empty epoch."""
        if epoch not in self._epochs:
            return None
        total, count = self._epochs[epoch]
        return total / count

    def quantile(self, share: float) -> float:
        return self._quantile(self._measured, share)

    def random_quantile(self, share: float) -> float:
        """Return the same quantile of random scores on the same batches."""
        return self._quantile(self._random, share)

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "last_epoch": self.last_epoch,
            "sum": self._sum,
            "random_sum": self._random_sum,
            "measured": torch.from_numpy(self._measured.copy()),
            "random": torch.from_numpy(self._random.copy()),
            "epochs": {str(epoch): [*total] for epoch, total in self._epochs.items()},
            "worst_before": self._worst_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self.last_epoch = state["batches"], state["last_epoch"]
        self._sum, self._random_sum = state["sum"], state["random_sum"]
        self._worst_before = state["worst_before"]
        self._measured, self._random = (
            state[name].numpy().copy() for name in ("measured", "random")
        )
        # Sorted, because the state may come back in a different order.
        epochs = sorted((int(epoch), *total) for epoch, total in state["epochs"].items())
        self._epochs = {epoch: (total, count) for epoch, total, count in epochs}

    def _quantile(self, counts: npt.NDArray[np.int32], share: float) -> float:
        """Return the quantile of the cells' midpoints, interpolated as numpy does by default."""
        cumulated = np.cumsum(counts)
        place = share * (int(cumulated[-1]) - 1)
        below, above = (
            (int(np.searchsorted(cumulated, rank, side="right")) + 0.5) * (1 - self._floor) / _CELLS
            + self._floor
            for rank in (math.floor(place), math.ceil(place))
        )
        return below + (above - below) * (place - math.floor(place))


class MultiClassTally:
    """Means over the batches of one attack's leak AUCs on one layer, for each class and pair."""

    def __init__(self, num_classes: int) -> None:
        shapes = [(num_classes, num_classes), (num_classes,)] * 2
        self._sums = [np.zeros(shape) for shape in shapes]
        """Of pairs and classes, of the attack and of random scores."""
        self._counts = [np.zeros(shape) for shape in shapes]  # some batches lack a class

    def add(self, leak: PairAucs, random: PairAucs) -> None:
        """Add one batch."""
        for sums, counts, values in zip(self._sums, self._counts, (*leak, *random), strict=True):
            present = ~np.isnan(values)
            sums[present] += values[present]
            counts[present] += 1

    def result(self, names: Sequence[str]) -> ClassFigures:
        """Return the means under the names of the classes; OneClass if nothing was added."""
        with np.errstate(invalid="ignore"):
            pairs, classes, random_pairs, random = map(np.divide, self._sums, self._counts)
        worst = PairAucs(pairs, classes).worst_pair()
        return ClassFigures(
            tuple(names[index] for index in worst),
            float(pairs[worst]),  # at most the mean of the batches' worst pairs, which differ
            as_number(float(random_pairs[worst])),
            dict(zip(names, map(as_number, classes.tolist()), strict=True)),
            dict(zip(names, map(as_number, random.tolist()), strict=True)),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": [torch.from_numpy(sums.copy()) for sums in self._sums],
            "counts": [torch.from_numpy(counts.copy()) for counts in self._counts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = [sums.numpy().copy() for sums in state["sums"]]
        self._counts = [counts.numpy().copy() for counts in state["counts"]]

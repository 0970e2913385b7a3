"""Leak AUCs of one attack on one layer over a run, in memory that does not grow with the run.

Sums are exact. Quantiles come from counts in 10,000 equal cells between 0.5 and 1, and are off by
at most half a cell, 0.000025.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.pair_aucs import Floats, PairAucs

REMEMBERED_EPOCHS = 64
"""Number of epochs whose figures are kept: they are written as soon as an epoch is over."""

_CELLS = 10_000


class AucCounts:
    """Counts AUCs between 0.5 and 1: 40 KiB."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int32] = np.zeros(_CELLS, dtype=np.int32)

    def add(self, auc: float) -> None:
        self._counts[min(int((auc - 0.5) * 2 * _CELLS), _CELLS - 1)] += 1

    def quantile(self, share: float) -> float:
        """Return the quantile of the cells' midpoints, interpolated as numpy does by default."""
        cumulated = np.cumsum(self._counts)
        total = int(cumulated[-1])
        if not total:
            raise ValueError("no quantile of nothing")
        place = share * (total - 1)
        below, above = (
            (int(np.searchsorted(cumulated, rank, side="right")) + 0.5) / (2 * _CELLS) + 0.5
            for rank in (math.floor(place), math.ceil(place))
        )
        return below + (above - below) * (place - math.floor(place))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": torch.from_numpy(self._counts.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = state["counts"].numpy().copy()


class AttackTally:
    """The measurements of one attack on one layer so far."""

    def __init__(self) -> None:
        self.batches = 0
        self.last_epoch = -1
        self._sum = 0.0
        self._measured = AucCounts()
        self._random = AucCounts()
        self._epochs: dict[int, tuple[float, int]] = {}
        self._worst_before = 0.5

    def add(self, epoch: int, auc: float, random: float) -> None:
        """Take one batch.

        Args:
            epoch: epoch of the batch, not before that of the previous batch.
        """
        if epoch != self.last_epoch:
            self._begin(epoch)
        total, count = self._epochs[epoch]
        self._epochs[epoch] = (total + auc, count + 1)
        self.batches += 1
        self._sum += auc
        self._measured.add(auc)
        self._random.add(random)

    @property
    def mean(self) -> float:
        return self._sum / self.batches

    @property
    def worst_epoch(self) -> float:
        """Mean over the batches of the epoch in which it is largest, and at least 1/2."""
        return max(self._worst_before, self.epoch_mean(self.last_epoch) or 0.5)

    def epoch_mean(self, epoch: int) -> float | None:
        """Return the mean over one of the last epochs; None for an older or an empty epoch."""
        if epoch not in self._epochs:
            return None
        total, count = self._epochs[epoch]
        return total / count

    def quantile(self, share: float) -> float:
        return self._measured.quantile(share)

    def random_quantile(self, share: float) -> float:
        """Return the same quantile of random scores on the same batches."""
        return self._random.quantile(share)

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "last_epoch": self.last_epoch,
            "sum": self._sum,
            "measured": self._measured.state_dict(),
            "random": self._random.state_dict(),
            "epochs": {str(epoch): [*found] for epoch, found in self._epochs.items()},
            "worst_before": self._worst_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self.last_epoch = state["batches"], state["last_epoch"]
        self._sum, self._worst_before = state["sum"], state["worst_before"]
        self._measured.load_state_dict(state["measured"])
        self._random.load_state_dict(state["random"])
        # Sorted, because the state may come back in a different order.
        epochs = sorted((int(epoch), *found) for epoch, found in state["epochs"].items())
        self._epochs = {epoch: (total, count) for epoch, total, count in epochs}

    def _begin(self, epoch: int) -> None:
        if self.last_epoch in self._epochs:
            self._worst_before = self.worst_epoch
        self._epochs[epoch] = (0.0, 0)
        for earlier in sorted(self._epochs)[:-REMEMBERED_EPOCHS]:
            del self._epochs[earlier]
        self.last_epoch = epoch


class ClassLeak(TypedDict):
    """One attack on one layer, class by class: means over the batches of a run."""

    worst_pair: list[str]
    """The two classes told apart best on average."""

    worst_pair_auc: float
    """Their leak AUC. At most the mean of the batches' worst pairs, which differ."""

    worst_pair_random: float
    """Leak AUC of random scores on the same pair."""

    classes: dict[str, float]
    """Leak AUC of each class against the rest."""

    random: dict[str, float]


class MultiClassTally:
    """Means over the batches of one attack's leak AUCs on one layer, for each class and pair."""

    def __init__(self, num_classes: int) -> None:
        pairs, classes = (num_classes, num_classes), (num_classes,)
        self._means = {
            "pairs": _Means(*pairs),
            "classes": _Means(*classes),
            "random_pairs": _Means(*pairs),
            "random_classes": _Means(*classes),
        }

    def add(self, leak: PairAucs, random: PairAucs) -> None:
        """Add one batch."""
        values = (leak.pairs, leak.one_vs_rest, random.pairs, random.one_vs_rest)
        for means, value in zip(self._means.values(), values, strict=True):
            means.add(value)

    def result(self, names: Sequence[str]) -> ClassLeak:
        """Return the means under the names of the classes.

        Raises:
            OneClass: nothing was added.
        """
        pairs, classes, random_pairs, random = (one.means() for one in self._means.values())
        worst = PairAucs(pairs, classes).worst_pair()
        return ClassLeak(
            worst_pair=[names[class_index] for class_index in worst],
            worst_pair_auc=float(pairs[worst]),
            worst_pair_random=float(random_pairs[worst]),
            classes=dict(zip(names, classes.tolist(), strict=True)),
            random=dict(zip(names, random.tolist(), strict=True)),
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._means.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, one in self._means.items():
            one.load_state_dict(state[name])


class _Means:
    """Sums of figures that some batches lack."""

    def __init__(self, *shape: int) -> None:
        self._sums, self._counts = np.zeros(shape), np.zeros(shape)

    def add(self, values: Floats) -> None:
        present = ~np.isnan(values)
        self._sums[present] += values[present]
        self._counts[present] += 1

    def means(self) -> Floats:
        with np.errstate(invalid="ignore"):
            means: Floats = self._sums / self._counts
        return means

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "sums": torch.from_numpy(self._sums.copy()),
            "counts": torch.from_numpy(self._counts.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums, self._counts = state["sums"].numpy().copy(), state["counts"].numpy().copy()

"""Tallies of leak AUCs class by class, for runs with more than two classes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.pair_aucs import Floats, PairAucs


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

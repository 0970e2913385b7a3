"""The leak of a whole run with several classes: what attacks that gather over it know in the end.

As ``splitveil.common.privacy.run_level`` for two classes. ``accumulated_spectral`` has one sum per
example for all classes, ``accumulated_cosine`` one for each class, whose references the attack is
told. The combining attacks fit one class after the other against the rest, on the same hints.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import (
    NUM_HINTS,
    AccumulatedScores,
    ContinuousSign,
    RunScores,
    ScoreHistory,
    combine_with_hints,
    standardised,
)
from splitveil.common.privacy.attacks import (
    BatchAttackName,
    RunAttackName,
    TopDirection,
    unit_vector,
)
from splitveil.common.privacy.class_aucs import ClassAucs, Places, class_aucs
from splitveil.common.privacy.leakage import OneClass, leak_auc_interval
from splitveil.common.privacy.run_level import SEED, UNSEEN, GatheredRun, RunLevelLeak


class ClassScores(NamedTuple):
    """What one attack found in one batch."""

    by_class: Sequence[Tensor | None]
    """One score for all classes, or one for each, (batch,) each; None for a class that the attack
    had nothing to know of."""

    left_out: Sequence[tuple[int, ...]]
    """Rows that the attack was told the class of, for each of the scores."""


class LayerClassScores(NamedTuple):
    """What the attacks found in one layer's gradients of one batch."""

    scores: Mapping[BatchAttackName, ClassScores]
    top: TopDirection | None
    """Where a spectral score is among the scores."""

    noisy_references: Sequence[Tensor | None] = ()
    """The gradients behind each class's cosines, where noise may have turned them around."""


class ClassRunLeak(TypedDict):
    """One attack on one layer over a whole run, class by class."""

    worst_pair: list[str]
    """The two classes told apart best."""

    classes: dict[str, float]
    """Leak AUC of each class against the rest."""


class ClassRunAudit(GatheredRun["_Layer", LayerClassScores]):
    """Gathers scores over a run, and measures them. Safe to use from several threads.

    Args:
        attacks: which attacks to run.
        num_examples: aligned examples of the run.
        class_names: in the order of their places, which are their labels.
    """

    def __init__(
        self, attacks: Sequence[RunAttackName], num_examples: int, class_names: Sequence[str]
    ) -> None:
        super().__init__(attacks, num_examples)
        self._names = tuple(class_names)

    def result(
        self,
    ) -> tuple[dict[str, dict[str, RunLevelLeak]], dict[str, dict[str, ClassRunLeak]]]:
        """Measure every attack over the run so far.

        Returns:
            The worst pair of each, its interval that of this pair's AUC; and what there is to say
            class by class. What has one class only is absent.
        """
        worst: dict[str, dict[str, RunLevelLeak]] = {}
        by_class: dict[str, dict[str, ClassRunLeak]] = {}
        with self._lock:
            for layer, attack, scores in self._found(hinted=True):
                aucs = self._aucs(scores)
                try:
                    first, second = aucs.worst_pair()
                except OneClass:
                    continue
                chosen = scores[first if len(scores) > 1 else 0]
                worst.setdefault(layer, {})[attack] = self._interval(chosen, first, second)
                leaks = np.maximum(aucs.one_vs_rest, 1 - aucs.one_vs_rest)
                by_class.setdefault(layer, {})[attack] = ClassRunLeak(
                    worst_pair=[self._names[first], self._names[second]],
                    classes=dict(zip(self._names, leaks.tolist(), strict=True)),
                )
        return worst, by_class

    def _new_layer(self) -> "_Layer":
        return _Layer(self.attacks, self._num_examples, len(self._names))

    def _places_at(self, positions: npt.NDArray[np.int64]) -> Places:
        return self._labels.numpy()[positions].astype(np.int64)

    def _aucs(self, scores: Sequence[RunScores]) -> ClassAucs:
        found = [
            class_aucs(
                one.scores,
                self._places_at(one.positions),
                len(self._names),
                place if len(scores) > 1 else None,
            )
            for place, one in enumerate(scores)
        ]
        return joined(found, len(self._names))

    def _interval(self, scores: RunScores, first: int, second: int) -> RunLevelLeak:
        places = self._places_at(scores.positions)
        of_pair = (places == first) | (places == second)
        measured = leak_auc_interval(
            scores.scores[of_pair], places[of_pair] == first, np.random.default_rng(SEED)
        )
        return RunLevelLeak(
            auc=measured.auc,
            low=measured.low,
            high=measured.high,
            examples=int(of_pair.sum()),
        )

    def _measure_sums(self) -> dict[str, dict[str, float]]:
        measured: dict[str, dict[str, float]] = {}
        for layer, attack, scores in self._found(hinted=False):
            with suppress(OneClass):
                measured.setdefault(layer, {})[attack] = self._aucs(scores).worst()
        return measured

    def _found(self, *, hinted: bool) -> Iterator[tuple[str, RunAttackName, list[RunScores]]]:
        """Yield each attack's scores, one for all classes or one for each, of examples not told."""
        for layer, state in self._layers.items():
            for attack, sums in state.sums.items():
                yield layer, attack, [one.result() for one in sums]
            if hinted:
                yield from self._combined(layer, state)

    def _combined(
        self, layer: str, state: "_Layer"
    ) -> Iterator[tuple[str, RunAttackName, list[RunScores]]]:
        seen = np.flatnonzero(self._labels.numpy() != UNSEEN)
        places = self._places_at(seen)
        for attack in state.combining:
            features = state.history.features(seen)
            combined = [
                combine_with_hints(
                    features,
                    (places == place).astype(np.int64),
                    NUM_HINTS[attack],
                    np.random.default_rng(SEED),
                )
                for place in range(len(self._names))
            ]
            nobody = RunScores(np.empty(0, dtype=np.int64), np.empty(0))
            yield (
                layer,
                attack,
                [
                    nobody if one is None else RunScores(seen[one[1]], one[0][one[1]])
                    for one in combined
                ],
            )


def joined(found: Sequence[ClassAucs], num_classes: int) -> ClassAucs:
    """Return the AUCs of one score for all classes, or put together those of one for each."""
    if len(found) == 1:
        return found[0]
    result = ClassAucs.none(num_classes)
    for place, of_class in enumerate(found):
        result.pairs[place] = of_class.pairs[place]
        result.one_vs_rest[place] = of_class.one_vs_rest[place]
    return result


class _Layer:
    """What is gathered of one layer."""

    def __init__(
        self, attacks: Sequence[RunAttackName], num_examples: int, num_classes: int
    ) -> None:
        self.combining = [attack for attack in attacks if attack in NUM_HINTS]
        # One history serves however many hints there are, and all classes.
        self.history = ScoreHistory(num_examples if self.combining else 0)
        self.sums: dict[RunAttackName, list[AccumulatedScores]] = {}
        if "accumulated_spectral" in attacks:
            self.sums["accumulated_spectral"] = [AccumulatedScores(num_examples)]
        if "accumulated_cosine" in attacks:
            sums = [AccumulatedScores(num_examples) for _ in range(num_classes)]
            self.sums["accumulated_cosine"] = sums
        self._sign = ContinuousSign()
        self._reference_signs = [ContinuousSign() for _ in range(num_classes)]

    def add(self, epoch: int, positions: Tensor, found: LayerClassScores) -> None:
        spectral = None if found.top is None else standardised(self._sign.turn(found.top))
        if "accumulated_spectral" in self.sums and spectral is not None:
            self.sums["accumulated_spectral"][0].add(positions, spectral)
        if "accumulated_cosine" in self.sums and "cosine" in found.scores:
            self._add_cosines(positions, found)
        norms = found.scores["norm"].by_class[0] if "norm" in found.scores else None
        if self.combining and spectral is not None and norms is not None:
            self.history.add(epoch, positions, (spectral, standardised(norms)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {name: _states(sums) for name, sums in self.sums.items()},
            "history": self.history.state_dict(),
            "sign": self._sign.state_dict(),
            "reference_signs": _states(self._reference_signs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["sums"].keys() != self.sums.keys():
            raise ValueError("expected what the same attacks have gathered")
        for name, sums in self.sums.items():
            _load_states(sums, state["sums"][name])
        self.history.load_state_dict(state["history"])
        self._sign.load_state_dict(state["sign"])
        _load_states(self._reference_signs, state["reference_signs"])

    def _add_cosines(self, positions: Tensor, found: LayerClassScores) -> None:
        cosines = found.scores["cosine"]
        for place, sums in enumerate(self.sums["accumulated_cosine"]):
            scores = cosines.by_class[place]
            if scores is None:
                continue
            reference = found.noisy_references[place] if found.noisy_references else None
            if reference is not None:
                direction = unit_vector(reference)
                scores = self._reference_signs[place].turn(TopDirection(scores, direction))
            kept = torch.ones(len(positions), dtype=torch.bool)
            kept[list(cosines.left_out[place])] = False
            sums.add(positions[kept], standardised(scores.cpu()[kept]))


def _states(of_classes: Sequence[AccumulatedScores | ContinuousSign]) -> dict[str, Any]:
    return {str(place): one.state_dict() for place, one in enumerate(of_classes)}


def _load_states(
    of_classes: Sequence[AccumulatedScores | ContinuousSign], state: Mapping[str, Any]
) -> None:
    for place, one in enumerate(of_classes):
        one.load_state_dict(state[str(place)])

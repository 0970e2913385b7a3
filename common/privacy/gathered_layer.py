"""Accumulates the scores of one layer over a run, for the attacks that need many epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import (
    NUM_HINTS,
    SOURCES,
    AccumulatedScores,
    ContinuousSign,
    ScoreHistory,
    standardised,
)
from splitveil.common.privacy.attacks import RunAttackName
from splitveil.common.privacy.gradient_rows import unit_vector
from splitveil.common.privacy.label_classes import LabelClasses
from splitveil.common.privacy.scoring import LayerScores
from splitveil.common.privacy.top_direction import TopDirection

_OF_TARGETS: tuple[RunAttackName, ...] = ("accumulated_cosine", "accumulated_nearest_hint")
"""Attacks with one sum for each target class, because they are told something about each."""

_WITH_SIGN: tuple[RunAttackName, ...] = ("accumulated_spectral", "accumulated_kmeans")
"""Attacks that sum one score for all classes, which has a direction and an open sign."""


class GatheredLayer:
    """The scores of one layer that the attacks of a run accumulate.

    Args:
        attacks: the attacks of the run for which scores are accumulated.
        num_examples: number of aligned examples of the run.
        classes: classes of the run's labels.
    """

    def __init__(
        self, attacks: Sequence[RunAttackName], num_examples: int, classes: LabelClasses
    ) -> None:
        self.combining = tuple(attack for attack in attacks if attack in NUM_HINTS)
        self.sums: dict[RunAttackName, list[AccumulatedScores]] = {}
        """Attack -> one sum for all classes, or one for each target."""
        # One history serves all numbers of hints, and all classes.
        self._history = ScoreHistory(num_examples if self.combining else 0)
        self._is_multi_class = classes.is_multi_class
        num_targets = len(classes.targets)
        for attack in attacks:
            if attack in _OF_TARGETS or attack in _WITH_SIGN:
                num_sums = num_targets if attack in _OF_TARGETS else 1
                self.sums[attack] = [AccumulatedScores(num_examples) for _ in range(num_sums)]
        self._signs = {"spectral": ContinuousSign(), "kmeans": ContinuousSign()}
        self._reference_signs = [ContinuousSign() for _ in range(num_targets)]

    @property
    def num_bytes(self) -> int:
        """Memory of the accumulated scores."""
        of_sums = sum(one.num_bytes for sums in self.sums.values() for one in sums)
        return of_sums + self._history.num_bytes

    def features(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the features of some examples for combining attacks, (examples, features)."""
        return self._history.features(positions)

    def add(self, epoch: int, positions: Tensor, found: LayerScores) -> None:
        """Add the scores of one batch.

        Args:
            epoch: epoch of the batch, counted from 0.
            positions: positions of its rows in the common order, (batch,), each once.
            found: the scores.
        """
        turned = {
            source: standardised(self._signs[source].turn(top))
            for source, top in found.directions.items()
        }
        for attack in _WITH_SIGN:
            (source,) = SOURCES[attack]
            if attack in self.sums and source in turned:
                self.sums[attack][0].add(positions, turned[source])
        norms = found.scores["norm"].by_target[0] if self.combining else None
        if norms is not None and "spectral" in turned:
            self._history.add(epoch, positions, (turned["spectral"], standardised(norms)))
        for attack in _OF_TARGETS:
            (source,) = SOURCES[attack]
            if attack in self.sums and source in found.scores:
                self._add_of_targets(attack, source, positions, found)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the sums; with two classes, without numbers of targets."""
        signs = [sign.state_dict() for sign in self._reference_signs]
        states = {attack: [one.state_dict() for one in sums] for attack, sums in self.sums.items()}
        if not self._is_multi_class:
            return {
                "sums": {attack: of_targets[0] for attack, of_targets in states.items()},
                "history": self._history.state_dict() if self.combining else None,
                "signs": self._state_of_signs(),
                "reference_sign": signs[0],
            }
        return {
            "sums": {attack: _numbered(of_targets) for attack, of_targets in states.items()},
            "history": self._history.state_dict(),
            "signs": self._state_of_signs(),
            "reference_signs": _numbered(signs),
        }

    def _state_of_signs(self) -> dict[str, Any]:
        return {source: sign.state_dict() for source, sign in self._signs.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that ``state_dict`` returned.

        Raises:
            ValueError: the state belongs to other attacks or to another number of examples.
        """
        history = state["history"]
        has_history = self._is_multi_class or bool(self.combining)
        if state["sums"].keys() != self.sums.keys() or (history is not None) != has_history:
            raise ValueError("expected what the same attacks have gathered")
        for attack, sums in self.sums.items():
            for number, one in enumerate(sums):
                stored = state["sums"][attack]
                one.load_state_dict(stored[str(number)] if self._is_multi_class else stored)
        if history is not None:
            self._history.load_state_dict(history)
        for source, sign in self._signs.items():
            sign.load_state_dict(state["signs"][source])
        for number, sign in enumerate(self._reference_signs):
            sign.load_state_dict(
                state["reference_signs"][str(number)]
                if self._is_multi_class
                else state["reference_sign"]
            )

    def _add_of_targets(
        self, attack: RunAttackName, source: str, positions: Tensor, found: LayerScores
    ) -> None:
        measured = found.scores[source]
        for number, sums in enumerate(self.sums[attack]):
            scores, told = measured.by_target[number], measured.left_out[number]
            if scores is None:
                continue
            reference = found.noisy_references[number] if found.noisy_references else None
            if reference is not None and source == "cosine":
                direction = unit_vector(reference)
                scores = self._reference_signs[number].turn(TopDirection(scores, direction))
            kept = np.ones(len(positions), dtype=np.bool_)
            kept[list(told)] = False
            others, rows = scores.cpu().numpy()[kept], positions.numpy()[kept]
            sums.add(torch.from_numpy(rows), standardised(torch.from_numpy(others)))


def _numbered(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {str(number): state for number, state in enumerate(states)}

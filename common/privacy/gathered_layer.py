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
from splitveil.common.privacy.attacks import BatchAttackName, RunAttackName
from splitveil.common.privacy.final_attacks import FINAL_ATTACKS
from splitveil.common.privacy.gradient_rows import unit_vector
from splitveil.common.privacy.label_classes import LabelClasses
from splitveil.common.privacy.scoring import LayerScores
from splitveil.common.privacy.top_direction import TopDirection

_OF_TARGETS: tuple[RunAttackName, ...] = ("accumulated_cosine", "accumulated_nearest_hint")
_OF_EACH_TARGET = frozenset({*_OF_TARGETS, "accumulated_informed"})
"""Attacks with one sum for each target class, because they are told something about each."""


class GatheredLayer:
    """The scores of one layer that the attacks of a run accumulate."""

    def __init__(
        self, attacks: Sequence[RunAttackName], num_examples: int, classes: LabelClasses
    ) -> None:
        self.combining = tuple(attack for attack in attacks if attack in NUM_HINTS)
        self.sums: dict[RunAttackName, list[AccumulatedScores]] = {}
        """Attack -> one sum for all classes, or one for each target."""
        # One history serves all numbers of hints, and all classes.
        self._history = ScoreHistory(num_examples if self.combining else 0)
        num_targets = len(classes.targets)
        for attack in attacks:
            if attack not in NUM_HINTS and attack not in FINAL_ATTACKS:
                num_sums = num_targets if attack in _OF_EACH_TARGET else 1
                self.sums[attack] = [AccumulatedScores(num_examples) for _ in range(num_sums)]
        self._sign = ContinuousSign()
        self._cluster_sign = ContinuousSign()
        self._reference_signs = [ContinuousSign() for _ in range(num_targets)]

    @property
    def num_bytes(self) -> int:
        of_sums = sum(one.num_bytes for sums in self.sums.values() for one in sums)
        return of_sums + self._history.num_bytes

    def features(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the features of some examples for combining attacks, (examples, features)."""
        return self._history.features(positions)

    def add(self, epoch: int, positions: Tensor, found: LayerScores) -> None:
        """Add the scores of one batch."""
        spectral = None if found.top is None else self._sign.turn(found.top)
        if spectral is not None and (self.combining or "accumulated_spectral" in self.sums):
            self._add_spectral(epoch, positions, standardised(spectral), found)
        if "accumulated_kmeans" in self.sums and found.clusters is not None:
            turned = self._cluster_sign.turn(found.clusters)
            self.sums["accumulated_kmeans"][0].add(positions, standardised(turned))
        if "accumulated_residual_energy" in self.sums:
            self._add_residual_energies(positions, found)
        if "accumulated_informed" in self.sums and "informed" in found.scores:
            scores = found.scores["informed"].by_target
            for of_target, sums in zip(scores, self.sums["accumulated_informed"], strict=True):
                if of_target is not None:
                    sums.add(positions, of_target)
        for attack in _OF_TARGETS:
            (source,) = SOURCES[attack]
            if attack in self.sums and source in found.scores:
                self._add_of_targets(attack, source, positions, found)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {
                attack: [one.state_dict() for one in sums] for attack, sums in self.sums.items()
            },
            "history": self._history.state_dict(),
            "sign": self._sign.state_dict(),
            "cluster_sign": self._cluster_sign.state_dict(),
            "reference_signs": [sign.state_dict() for sign in self._reference_signs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["sums"].keys() != self.sums.keys():
            raise ValueError("expected what the same attacks have gathered")
        for attack, sums in self.sums.items():
            for one, stored in zip(sums, state["sums"][attack], strict=True):
                one.load_state_dict(stored)
        self._history.load_state_dict(state["history"])
        self._sign.load_state_dict(state["sign"])
        self._cluster_sign.load_state_dict(state["cluster_sign"])
        for sign, stored in zip(self._reference_signs, state["reference_signs"], strict=True):
            sign.load_state_dict(stored)

    def _add_spectral(
        self, epoch: int, positions: Tensor, spectral: Tensor, found: LayerScores
    ) -> None:
        if "accumulated_spectral" in self.sums:
            self.sums["accumulated_spectral"][0].add(positions, spectral)
        norms = found.scores["norm"].by_target[0] if self.combining else None
        if norms is not None:
            self._history.add(epoch, positions, (spectral, standardised(norms)))

    def _add_residual_energies(self, positions: Tensor, found: LayerScores) -> None:
        (energies,) = found.scores["residual_energy"].by_target
        (sums,) = self.sums["accumulated_residual_energy"]
        if energies is not None:
            sums.add(positions, sums.agreeing(positions, standardised(energies)))

    def _add_of_targets(
        self, attack: RunAttackName, source: BatchAttackName, positions: Tensor, found: LayerScores
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

"""Scores that are gathered over a run: sums for attacks over it, and each example's latest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import (
    AccumulatedScores,
    ContinuousSign,
    RunScores,
    ScoreHistory,
    standardised,
)
from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.observation import LabelClasses
from splitveil.common.privacy.scoring import AttackScores, LayerScores


class GatheredLayer:
    def __init__(self, attacks: Sequence[str], num_examples: int, classes: LabelClasses) -> None:
        def num_scores(source: str) -> int:
            return 1 if ATTACKS[source].is_free else len(classes.targets)

        self.combining = tuple(attack for attack in attacks if RUN_ATTACKS[attack].combines)
        self.sums: dict[str, list[AccumulatedScores]] = {}
        """Attack -> one sum for all classes, or one for each target."""
        for name in attacks:
            attack = RUN_ATTACKS[name]
            if not attack.combines and not attack.is_final:
                num_sums = num_scores(attack.sources[0])
                self.sums[name] = [AccumulatedScores(num_examples) for _ in range(num_sums)]
        self._is_multi_class = classes.is_multi_class
        # One history serves all numbers of hints, and all classes.
        self.history = ScoreHistory(num_examples if self.combining else 0)
        # Only of these: once a batch had a positive, the sign of cosines enlarges a checkpoint.
        self._signs = {
            source: [ContinuousSign() for _ in range(num_scores(source))]
            for name in attacks
            for source in RUN_ATTACKS[name].sources
            if ATTACKS[source].direction is not None
        }

    def add(self, epoch: int, positions: Tensor, layer: LayerScores) -> None:
        """Add the scores of one batch."""
        signed = dict(layer.scores) | {
            source: layer.scores[source]._replace(
                by_target=[
                    None
                    if direction is None
                    else sign.follow(layer.rows, direction)
                    if self._is_multi_class and ATTACKS[source].follows_batches
                    else sign.turn(direction)
                    for sign, direction in zip(signs, directions, strict=True)
                ]
            )
            for source, signs in self._signs.items()
            if (directions := layer.directions.get(source)) is not None
        }
        for name, by_target in self.sums.items():
            (source,) = RUN_ATTACKS[name].sources
            if source in signed:
                for sums, scores, known in zip(by_target, *signed[source], strict=True):
                    if scores is not None:
                        _add(name, sums, positions, scores, known)
        for name in self.combining[:1]:
            sources = RUN_ATTACKS[name].sources
            first, second = (signed[source].by_target[0] for source in sources)
            if first is not None and second is not None:
                self.history.add(epoch, positions, (standardised(first), standardised(second)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {name: [one.state_dict() for one in sums] for name, sums in self.sums.items()},
            "history": self.history.state_dict(),
            "signs": {
                name: [one.state_dict() for one in signs] for name, signs in self._signs.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["sums"].keys() != self.sums.keys():
            raise ValueError("expected what the same attacks have gathered")
        self.history.load_state_dict(state["history"])
        for name, by_target in self.sums.items():
            for sums, stored in zip(by_target, state["sums"][name], strict=True):
                sums.load_state_dict(stored)
        for source, signs in self._signs.items():
            for sign, stored in zip(signs, state["signs"][source], strict=True):
                sign.load_state_dict(stored)


def _add(
    name: str,
    sums: AccumulatedScores,
    positions: Tensor,
    scores: Tensor,
    known: tuple[int, ...],
) -> None:
    attack = RUN_ATTACKS[name]
    if known:
        others = np.ones(len(positions), dtype=np.bool_)
        others[list(known)] = False
        scores = torch.from_numpy(scores.cpu().numpy()[others])
        positions = torch.from_numpy(positions.numpy()[others])
    if attack.standardises:
        scores = standardised(scores)
    sums.add(positions, sums.agreeing(positions, scores) if attack.agrees_with_sums else scores)


class LatestScores:
    """Keeps each example's latest scores of one layer: standardised ones take 2 bytes each."""

    def __init__(
        self, attacks: Sequence[str], num_examples: int, *, standardises: bool = True
    ) -> None:
        self._attacks = tuple(attacks)
        self._num_examples = num_examples
        self._standardises = standardises
        self._scores: dict[str, Tensor] = {}
        """Attack -> (scores, examples); NaN for an example without a score."""

    def add(self, positions: Tensor, attacks: Mapping[str, AttackScores]) -> None:
        """Replace the scores of one batch's examples."""
        rows = positions.numpy()
        dtype = torch.float16 if self._standardises else torch.float32
        for name in self._attacks:
            if name not in attacks:
                continue
            if name not in self._scores:
                shape = (len(attacks[name].by_target), self._num_examples)
                self._scores[name] = torch.full(shape, torch.nan, dtype=dtype)
            for latest, scores, known in zip(self._scores[name], *attacks[name], strict=True):
                if scores is not None:
                    values = standardised(scores) if self._standardises else scores.cpu()
                    as_kept = values.to(dtype).numpy()
                    as_kept[list(known)] = np.nan
                    latest.numpy()[rows] = as_kept

    def result(self) -> dict[str, list[RunScores]]:
        """Return attack -> its scores, one for all classes or one for each target."""
        return {
            name: [_seen(scores.double().numpy()) for scores in by_target]
            for name, by_target in self._scores.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: scores.clone() for name, scores in self._scores.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, scores in state.items():
            if name not in self._attacks or scores.shape[1] != self._num_examples:
                raise ValueError(f"expected scores of {self._num_examples} examples by {name}")
        self._scores = {name: scores.clone() for name, scores in state.items()}


def _seen(scores: npt.NDArray[np.float64]) -> RunScores:
    positions = np.flatnonzero(~np.isnan(scores))
    return RunScores(positions, scores[positions])

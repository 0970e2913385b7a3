"""Each example's score by the attacks on single batches, from the last batch that held it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import RunScores, standardised
from splitveil.common.privacy.scoring import AttackScores


class LatestScores:
    """Keeps the standardised scores of one layer: 2 bytes per example, attack and target."""

    def __init__(self, attacks: Sequence[str], num_examples: int) -> None:
        self._attacks = tuple(attacks)
        self._num_examples = num_examples
        self._scores: dict[str, Tensor] = {}
        """Attack -> (scores, examples); NaN for an example without a score."""

    @property
    def num_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._scores.values())

    def add(self, positions: Tensor, found: Mapping[str, AttackScores]) -> None:
        """Replace the scores of one batch's examples."""
        rows = positions.numpy()
        for attack in self._attacks:
            if attack not in found:
                continue
            by_target, left_out = found[attack]
            if attack not in self._scores:
                shape = (len(by_target), self._num_examples)
                self._scores[attack] = torch.full(shape, torch.nan, dtype=torch.float16)
            for kept, scores, told in zip(self._scores[attack], by_target, left_out, strict=True):
                if scores is not None:
                    values = standardised(scores).half().numpy()
                    values[list(told)] = np.nan  # the attack knew their labels
                    kept.numpy()[rows] = values

    def result(self) -> dict[str, list[RunScores]]:
        """Return attack -> its scores, one for all classes or one for each target."""
        return {
            attack: [_seen(scores.double().numpy()) for scores in kept]
            for attack, kept in self._scores.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {attack: kept.clone() for attack, kept in self._scores.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for attack, kept in state.items():
            if attack not in self._attacks or kept.shape[1] != self._num_examples:
                raise ValueError(f"expected scores of {self._num_examples} examples by {attack}")
        self._scores = {attack: kept.clone() for attack, kept in state.items()}


def _seen(scores: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> RunScores:
    positions = np.flatnonzero(~np.isnan(scores))
    return RunScores(positions, scores[positions])

"""Attacks on the activations that the bottom model has come to in the end.

    final_kmeans           distance to the larger less distance to the smaller of two clusters
    final_nearest_hint     distance to an example of another class less that to one of the class,
                           one example of each class being known
    completion_40          a head on the activations, trained with 40 known labels

A bottom model that has learned from gradients separates the classes better than the features alone
do. What these attacks find is therefore partly what features tell: compare it with the same attack
on features (`splitveil.common.privacy.completion`).

Each example counts with the activation of its last visit. Of a long run, evenly spaced examples
are kept, so that all of them take 64 MiB at most.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.attacks import RunAttackName
from splitveil.common.privacy.completion import complete_model, one_against_rest, pick_labelled
from splitveil.common.privacy.label_classes import LabelClasses
from splitveil.common.privacy.scores import activation_kmeans, activation_nearest_hint

FINAL_ATTACKS: Mapping[RunAttackName, str | None] = {
    "final_kmeans": None,
    "final_nearest_hint": "one label of each class",
    "completion_40": "40 labels of the run",
}
"""Attack -> the labels that it knows, in words; None for one that knows none."""

_NUM_HINTS = 40
_MAX_VALUES = 2**25
_LARGEST_HALF = 6e4


class LabelledActivations(NamedTuple):
    """What the attacks look at, and the labels from which they are told some."""

    positions: npt.NDArray[np.int64]
    """Positions of the examples in the common order, (examples,)."""

    activations: Tensor
    """(examples, row_dim)."""

    labels: npt.NDArray[np.int64]
    """Class indices, (examples,)."""


class LastActivations:
    """Keeps the latest activation of each example, in half precision."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._rows: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.nbytes

    def add(self, positions: Tensor, activations: Tensor) -> None:
        """Add one batch.

        Args:
            positions: positions of the examples in the common order, (batch,).
            activations: (batch, ...).
        """
        rows = activations.detach().flatten(start_dim=1).cpu()
        if self._rows is None:
            kept = -(-self._num_examples // self._every(rows.shape[1]))
            self._rows = torch.full((kept, rows.shape[1]), torch.nan, dtype=torch.float16)
        every = self._every(rows.shape[1])
        of_kept = positions % every == 0
        values = rows[of_kept].clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
        self._rows[positions[of_kept] // every] = values

    def seen(self) -> tuple[npt.NDArray[np.int64], Tensor]:
        """Return the positions of the examples that were kept, ascending, and their activations."""
        if self._rows is None:
            return np.empty(0, dtype=np.int64), torch.empty(0, 0)
        kept = torch.nonzero(~self._rows[:, 0].isnan())[:, 0]
        return kept.numpy() * self._every(self._rows.shape[1]), self._rows[kept]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": None if self._rows is None else self._rows.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows = None if state["rows"] is None else state["rows"].clone()

    def _every(self, row_dim: int) -> int:
        return max(1, -(-self._num_examples * row_dim // _MAX_VALUES))


def final_scores(
    attack: RunAttackName, known: LabelledActivations, classes: LabelClasses, seed: int
) -> list[RunScores]:
    """Run one attack on the last activations.

    Returns:
        The scores of the examples whose labels the attack did not know: one score for all classes,
        or one for each target class; of no examples where the attack cannot be run.
    """
    if attack == "final_kmeans":
        if not len(known.positions):
            return [_NONE]
        scores = activation_kmeans(known.activations.float())
        return [RunScores(known.positions, scores.numpy())]
    generator = np.random.default_rng(seed)
    num_hints = _NUM_HINTS if attack == "completion_40" else len(np.unique(known.labels))
    hints = pick_labelled(known.labels, num_hints, generator)
    if hints is None:
        return [_NONE for _ in classes.targets]
    others = np.ones(len(known.labels), dtype=np.bool_)
    others[hints.rows] = False
    if attack == "completion_40":
        logits = complete_model(known.activations, hints, classes.num_classes, seed)
        found = one_against_rest(logits)
        of_targets = [found[:, target] for target in classes.targets]
    else:
        of_targets = [
            _nearest_hint(known.activations.float(), hints.rows, hints.labels == target)
            for target in classes.targets
        ]
    return [RunScores(known.positions[others], one.numpy()[others]) for one in of_targets]


_NONE = RunScores(np.empty(0, dtype=np.int64), np.empty(0))


def _nearest_hint(
    activations: Tensor, hints: npt.NDArray[np.int64], of_target: npt.NDArray[np.bool_]
) -> Tensor:
    if not of_target.any():  # no example of this class has been seen
        return torch.zeros(len(activations), dtype=torch.float64)
    own, other = (activations[torch.from_numpy(hints[mask])] for mask in (of_target, ~of_target))
    return activation_nearest_hint(activations, own, other)

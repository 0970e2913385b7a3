"""Runs the attacks on one batch: for each layer and attack, one score per example and target.

An attack that does not need labels scores a batch once for all classes, and one that knows
something about the positives once for each target class. Everything that does not depend on labels
(rows in float64, their norms, their top direction) is computed once for all attacks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import standardised
from splitveil.common.privacy.attacks import Attack, Knowledge, SideInformation
from splitveil.common.privacy.gradient_rows import GradientRows, TopDirection
from splitveil.common.privacy.observation import Clues, Observation
from splitveil.common.privacy.scores import KnownClasses

_NO_CLUES = Clues()


class AttackScores(NamedTuple):
    by_target: Sequence[Tensor | None]
    """One score for all classes, or one for each target, (batch,) each; None for a target about
    which the attack knew too little."""
    left_out: Sequence[tuple[int, ...]]  # rows whose class the attack knew, for each of the scores


class LayerScores(NamedTuple):
    scores: Mapping[str, AttackScores]
    directions: Mapping[str, Sequence[TopDirection | None]]
    """Attack -> for each of its scores the direction behind it, if its sign says nothing: the
    batch's own direction, or a noisy reference."""
    rows: Tensor  # the gradients, (batch, row_dim)


class BatchScorer:
    """Scores batches with a fixed set of attacks; targets are the classes taken for positives."""

    def __init__(self, attacks: Mapping[str, Attack], targets: Sequence[int]) -> None:
        self._attacks = attacks
        self._targets = tuple(targets)

    def score(self, observation: Observation, labels: Tensor) -> dict[str, LayerScores]:
        """Score every layer of a batch."""
        return {
            layer: self._score_layer(observation.rows(layer), observation, labels, layer)
            for layer in observation.gradients
        }

    def _score_layer(
        self, gradients: GradientRows, observation: Observation, labels: Tensor, layer: str
    ) -> LayerScores:
        scores: dict[str, AttackScores] = {}
        shared = Knowledge(activations=observation.activations, predictions=observation.predictions)
        for name, attack in self._attacks.items():
            knows_predictions = SideInformation.PREDICTIONS in attack.needs
            if not attack.runs_at(layer) or (knows_predictions and shared.predictions is None):
                continue
            by_target: list[tuple[Tensor | None, tuple[int, ...]]] = []
            for target in self._targets[:1] if attack.is_free else self._targets:
                if attack.needs_classes:
                    by_target.append(
                        (cross_scores(attack, gradients.gradients, labels == target), ())
                    )
                    continue
                clues = observation.clues.get(target, _NO_CLUES)
                knowledge = shared._replace(
                    positive_gradient=clues.references.get(layer), target=target
                )
                by_target.append(_score_with_clues(attack, gradients, knowledge, clues))
            scores[name] = AttackScores(*zip(*by_target, strict=True))
        directions = self._directions(scores, gradients, observation, layer)
        return LayerScores(scores, directions, gradients.rows)

    def _directions(
        self,
        scores: Mapping[str, AttackScores],
        gradients: GradientRows,
        observation: Observation,
        layer: str,
    ) -> dict[str, Sequence[TopDirection | None]]:
        directions: dict[str, Sequence[TopDirection | None]] = {}
        for name, found in scores.items():
            attack, along = self._attacks[name], self._attacks[name].direction
            if along is None or (observation.references_are_clean and not attack.is_free):
                continue
            clues = [observation.clues.get(target, _NO_CLUES) for target in self._targets]
            directions[name] = [
                None
                if values is None
                else along(gradients, values, one.references.get(layer, values))
                for values, one in zip(found.by_target, clues, strict=False)
            ]
        return directions


def cross_scores(attack: Attack, gradients: Tensor, positive: Tensor) -> Tensor | None:
    """Score each half of a batch, as many of each class, with the labels of the other half.

    The AUC of uninformative scores then strays further from 1/2, by the root of 2, because chance
    moves both halves together. None if the target or the rest has fewer than two examples.
    """
    positive = positive.to(gradients.device)
    if int(positive.sum()) < 2 or int((~positive).sum()) < 2:
        return None
    number_in_class = torch.where(positive, positive.cumsum(0), (~positive).cumsum(0))
    scores = gradients.new_empty(len(positive), dtype=torch.float64)
    for half in (number_in_class % 2 == 0, number_in_class % 2 == 1):
        classes = KnownClasses(gradients[~half & ~positive], gradients[~half & positive])
        values = attack.score(gradients[half], Knowledge(classes=classes))
        scores[half] = standardised(values).to(scores.device)
    return scores


def _score_with_clues(
    attack: Attack, gradients: GradientRows, knowledge: Knowledge, clues: Clues
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the scores for one target, and the rows that the attack knew."""
    known = clues.hint_rows[: attack.num_hints]
    if known:
        knowledge = knowledge._replace(hints=gradients.gradients[list(known)])
    if SideInformation.OTHER_HINTS in attack.needs:
        others = gradients.gradients[list(clues.other_hint_rows)]
        knowledge = knowledge._replace(other_hints=others)
        known = (*known, *clues.other_hint_rows)
    if attack.missing(knowledge) is not None:
        return None, known
    scores = attack.score(gradients, knowledge)
    if SideInformation.POSITIVE_GRADIENT not in attack.needs:
        return scores, known
    row = clues.reference_row
    return (None, known) if row is None else (scores, (*known, row))

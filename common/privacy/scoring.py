"""Runs the attacks on one batch: for each layer and attack, one score per example and target.

An attack that does not need labels scores a batch once for all classes. An attack that is told
something about the positives scores it once for each target class: ``cosine`` with a gradient of
the class, the hint attacks with some of its rows, the class oracles with the class against the
rest. Everything that does not depend on labels (rows in float64, their norms, their top direction)
is computed once for all attacks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import standardised
from splitveil.common.privacy.attacks import CUT, Attack, Knowledge, SideInformation
from splitveil.common.privacy.gradient_rows import GradientRows
from splitveil.common.privacy.observation import Clues, Observation
from splitveil.common.privacy.scores import KnownClasses
from splitveil.common.privacy.top_direction import TopDirection

_NO_CLUES = Clues()
_TOLD_NOTHING = ((),)


class AttackScores(NamedTuple):
    """The scores of one attack on one batch."""

    by_target: Sequence[Tensor | None]
    """One score for all classes, or one for each target, (batch,) each; None for a target about
    which the attack knew too little."""

    left_out: Sequence[tuple[int, ...]]
    """Rows whose class the attack knew, for each of the scores."""


class LayerScores(NamedTuple):
    """The attacks' scores of one layer's gradients in one batch."""

    scores: Mapping[str, AttackScores]
    top: TopDirection | None
    """Present if a spectral score is among the scores."""

    noisy_references: Sequence[Tensor | None] = ()
    """The reference behind each target's cosines, if noise may have flipped its sign."""

    clusters: TopDirection | None = None
    """Present if ``kmeans`` is among the scores."""


class BatchScorer:
    """Scores batches with a fixed set of attacks.

    Args:
        targets: the classes to treat as the positives.
    """

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
        clues = [observation.clues.get(target, _NO_CLUES) for target in self._targets]
        references = [known.references.get(layer) for known in clues]
        scores: dict[str, AttackScores] = {}
        shared = Knowledge(activations=observation.activations, predictions=observation.predictions)
        for name, attack in self._attacks.items():
            knows_predictions = SideInformation.PREDICTIONS in attack.needs
            if layer != CUT and (knows_predictions or not attack.reads_gradients):
                continue
            if attack.is_free:
                scores[name] = AttackScores([_score(attack, gradients, shared)], _TOLD_NOTHING)
            elif SideInformation.CLASSES in attack.needs:
                crossed = [
                    cross_scores(attack, gradients.gradients, labels == target)
                    for target in self._targets
                ]
                scores[name] = AttackScores(crossed, [()] * len(crossed))
            elif not knows_predictions:
                told = [
                    _score_told(attack, gradients, shared, known, reference)
                    for known, reference in zip(clues, references, strict=True)
                ]
                scores[name] = AttackScores([one for one, _ in told], [rows for _, rows in told])
            elif observation.predictions is not None:
                knowing = [
                    attack.score(gradients, shared._replace(target=target))
                    for target in self._targets
                ]
                scores[name] = AttackScores(knowing, [()] * len(knowing))
        top = gradients.top if "spectral" in self._attacks else None
        noisy = [
            None if observation.references_are_clean or known.reference_row is None else reference
            for known, reference in zip(clues, references, strict=True)
        ]
        return LayerScores(scores, top, noisy, gradients.clusters if "kmeans" in scores else None)


def cross_scores(attack: Attack, gradients: Tensor, positive: Tensor) -> Tensor | None:
    """Score each half of a batch with the labels of the other half.

    The AUC of uninformative scores then strays further from 1/2 than the AUC of random scores, by a
    factor of the square root of 2, because chance moves both halves in the same direction.

    Args:
        attack: an attack that needs known classes, and nothing else.
        gradients: (batch, ...).
        positive: which examples are of the target class, (batch,) of booleans.

    Returns:
        Scores, standardised within the halves, which hold equally many examples of each class;
        None if the target or the rest has fewer than two examples.
    """
    positive = positive.to(gradients.device)
    if int(positive.sum()) < 2 or int((~positive).sum()) < 2:
        return None
    number_in_class = torch.where(positive, positive.cumsum(0), (~positive).cumsum(0))
    scores = gradients.new_empty(len(positive), dtype=torch.float64)
    for half in (number_in_class % 2 == 0, number_in_class % 2 == 1):
        classes = KnownClasses(gradients[~half & ~positive], gradients[~half & positive])
        found = attack.score(gradients[half], Knowledge(classes=classes))
        scores[half] = standardised(found).to(scores.device)
    return scores


def _score(attack: Attack, gradients: GradientRows, knowledge: Knowledge) -> Tensor | None:
    return attack.score(gradients, knowledge) if attack.missing(knowledge) is None else None


def _score_told(
    attack: Attack,
    gradients: GradientRows,
    shared: Knowledge,
    clues: Clues,
    reference: Tensor | None,
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the scores for one target, and the rows that the attack knew."""
    told = clues.hint_rows[: attack.num_hints]
    hints = gradients.gradients[list(told)] if told else None
    others = None
    if SideInformation.OTHER_HINTS in attack.needs:
        others = gradients.gradients[list(clues.other_hint_rows)]
        told = (*told, *clues.other_hint_rows)
    knowledge = shared._replace(positive_gradient=reference, hints=hints, other_hints=others)
    found = _score(attack, gradients, knowledge)
    if SideInformation.POSITIVE_GRADIENT in attack.needs:
        row = clues.reference_row
        return (None, told) if row is None else (found, (*told, row))
    return found, told

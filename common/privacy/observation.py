"""The part of one training step that an audit sees, and the attacks' scores of its rows.

A class that attacks treat as the positives is a target. An attack that does not need labels scores
a batch once for all classes, and one that knows something about the positives once for each target.
Everything that does not depend on labels (rows in float64, their norms, their top direction) is
computed once for all attacks.

Both parties pick the same rows of a batch as clues for the attacks, so that their figures can be
compared: the choice depends only on the joint seed, the epoch and the step.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.attacks import Attack, Knowledge, SideInformation
from splitveil.common.privacy.gradient_rows import GradientRows, TopDirection, standardised
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.leakage import PairAucs, Score, batch_aucs
from splitveil.common.privacy.scores import KnownClasses


@dataclass(frozen=True)
class LabelClasses:
    """Two classes, with the one target 1, or more classes with names, each a target in turn."""

    names: tuple[str, ...] = ()  # of more than two classes, by index; empty for two

    @property
    def num_classes(self) -> int:
        return len(self.names) or 2

    @property
    def is_multi_class(self) -> bool:
        return self.num_classes > 2

    needs_predictions: ClassVar[bool] = False  # whatever attacks are named
    floor: ClassVar[float] = 0.5  # the figure of a score that reveals nothing

    @property
    def targets(self) -> tuple[int, ...]:
        """Indices of the classes that attacks treat as the positives in turn."""
        return tuple(range(self.num_classes)) if self.is_multi_class else (1,)

    def of_scores(self, num_scores: int) -> tuple[int | None, ...]:
        """Return the class of each score: of one for all of several classes, None."""
        if num_scores == 1 and self.is_multi_class:
            return (None,)
        return self.targets

    def indices(self, labels: Tensor) -> Tensor:
        """Return labels as class indices, (batch,) int64; ValueError if one is none."""
        values = labels.detach().reshape(-1)
        indices = values.long()
        is_index = (values == indices) & (indices >= 0) & (indices < self.num_classes)
        if not bool(is_index.all()):
            expected = "{0, 1}" if not self.is_multi_class else f"0 .. {self.num_classes - 1}"
            raise ValueError(f"expected labels in {expected}")
        return indices

    @staticmethod
    def is_mixed(indices: Tensor) -> bool:
        """Return whether a batch holds examples of more than one class."""
        return bool((indices != indices[:1]).any())

    def measure(
        self, attacks: Sequence[Sequence[Score]], indices: Tensor, *, is_plain: bool = False
    ) -> tuple[list[float], PairAucs | None]:
        """Return `batch_aucs` of several attacks on one batch; the first has random scores."""
        return batch_aucs(attacks, indices, self.num_classes, is_plain=is_plain)


TWO_CLASSES = LabelClasses()  # negatives, class 0, and positives, class 1


class Clues(NamedTuple):
    references: Mapping[str, Tensor] = MappingProxyType({})
    """Layer name -> gradient of one example of the class; of any other if there is none, so that
    attacks take as long."""
    reference_row: int | None = None  # left out of the cosine's AUC; None for no score
    hint_rows: tuple[int, ...] = ()  # of the class; left out of hint attacks' AUC
    other_hint_rows: tuple[int, ...] = ()  # one of each other class, to compare with


@dataclass(frozen=True, slots=True)
class Observation:
    """The part of one step that an audit sees. Its tensors must not be changed afterwards."""

    epoch: int
    step: int
    gradients: Mapping[str, Tensor]  # layer name -> gradients, (batch, ...)
    labels: Tensor  # class indices or shares of a range, (batch,) or (batch, 1)
    clues: Mapping[int, Clues] = field(default_factory=dict)
    """Class index -> clues about the class; with two classes, only about the positives."""
    positions: Tensor | None = None  # in the common order, (batch,); None: nothing is summed
    activations: Tensor | None = None  # at the cut, (batch, ...); None: their attacks are off
    references_are_clean: bool = True  # whether noise cannot flip their sign
    predictions: KnownPredictions | None = None  # at the cut; None: attacks with them are off

    def rows(self, layer: str) -> GradientRows:
        return GradientRows(self.gradients[layer])


def pick_clues(
    observation: Observation,
    sources: Mapping[str, Tensor],
    seed: bytes,
    num_hints: int,
    class_index: int = 1,
) -> Clues:
    """Pick the clues about one class of a batch, the same on both sides of the wire.

    References are taken from ``sources``, layer name -> gradients, (batch, ...).
    """
    labels, epoch, step = observation.labels.reshape(-1), observation.epoch, observation.step
    row = pick_reference_row(labels, seed, epoch, step, class_index)
    classes = set(labels.tolist()) if num_hints else set()
    others = sorted(int(other) for other in classes - {class_index})
    return Clues(
        references={layer: rows[row or 0] for layer, rows in sources.items()},
        reference_row=row,
        hint_rows=pick_hint_rows(labels, seed, epoch, step, num_hints, class_index),
        other_hint_rows=tuple(
            row for other in others for row in pick_hint_rows(labels, seed, epoch, step, 1, other)
        ),
    )


def pick_reference_row(
    labels: Tensor, seed: bytes, epoch: int, step: int, class_index: int = 1
) -> int | None:
    """Pick one row of a class; None if the batch has no example of the class."""
    members = _rows_of_class(labels, class_index)
    if not len(members):
        return None
    return int(members[_draw(b"reference row", seed, epoch, step) % len(members)])


def pick_hint_rows(
    labels: Tensor, seed: bytes, epoch: int, step: int, num_hints: int, class_index: int = 1
) -> tuple[int, ...]:
    """Pick up to ``num_hints`` rows of a class; fewer are the first ones of more."""
    if not num_hints:
        return ()
    members = _rows_of_class(labels, class_index).cpu().numpy()
    seed_of_order = _draw(b"hint rows", seed, epoch, step) % 2**64
    order = np.random.default_rng(seed_of_order).permutation(len(members))
    return tuple(int(row) for row in members[order[:num_hints]])


def random_scores(observation: Observation) -> Tensor:
    """Draw random scores only from epoch and step, so that audits are repeatable."""
    seed = _draw(b"random scores", b"", observation.epoch, observation.step)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(observation.labels.numel(), generator=generator, dtype=torch.float64)


def _rows_of_class(labels: Tensor, class_index: int) -> Tensor:
    return torch.nonzero(labels.detach().reshape(-1) == class_index).reshape(-1)


def _draw(purpose: bytes, seed: bytes, epoch: int, step: int) -> int:
    message = b"splitveil audit " + purpose + struct.pack("<qq", epoch, step) + seed
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little", signed=True)


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


def score_batch(
    attacks: Mapping[str, Attack], targets: Sequence[int], observation: Observation, labels: Tensor
) -> dict[str, LayerScores]:
    """Score every layer of a batch; targets are the classes taken for positives."""
    layers = {}
    clues = [observation.clues.get(target, Clues()) for target in targets]
    shared = Knowledge(activations=observation.activations, predictions=observation.predictions)
    for layer in observation.gradients:
        gradients = observation.rows(layer)
        scores: dict[str, AttackScores] = {}
        directions: dict[str, Sequence[TopDirection | None]] = {}
        for name, attack in attacks.items():
            knows_predictions = SideInformation.PREDICTIONS in attack.needs
            if not attack.runs_at(layer) or (knows_predictions and shared.predictions is None):
                continue
            by_target: list[tuple[Tensor | None, tuple[int, ...]]] = []
            for target, known in list(zip(targets, clues, strict=True))[
                : 1 if attack.is_free else None
            ]:
                if attack.needs_classes:
                    crossed = cross_scores(attack, gradients.gradients, labels == target)
                    by_target.append((crossed, ()))
                    continue
                reference = known.references.get(layer)
                knowledge = shared._replace(positive_gradient=reference, target=target)
                by_target.append(_score_with_clues(attack, gradients, knowledge, known))
            scores[name] = AttackScores(*zip(*by_target, strict=True))
            if attack.direction is None or (
                observation.references_are_clean and not attack.is_free
            ):
                continue
            directions[name] = [
                None
                if values is None
                else attack.direction(gradients, values, known.references.get(layer, values))
                for values, known in zip(scores[name].by_target, clues, strict=False)
            ]
        layers[layer] = LayerScores(scores, directions, gradients.rows)
    return layers


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

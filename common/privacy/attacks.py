"""Attacks: they map the gradients of a batch to one score per example; higher means "positive".

    norm                   |g|
    cosine                 cos(g, g+) with the clean gradient g+ of a random positive     (oracle)
    cosine_majority        minus the fraction of the batch with a positive cosine to g
    hint_inner_product_k   largest <g, h> to any of k known positives' gradients h
    hint_distance_k        minus the smallest |g - h| to any of them
    mean                   |g - m0| - |g - m1|, m0 and m1 the classes' means              (oracle)
    median                 the same with coordinate-wise medians                         (oracle)
    lda                    <g, S^-1 (m1 - m0)>, S the classes' pooled covariance          (oracle)
    spectral               <g, v>, v the batch's top right-singular vector, with the sign that
                           makes the scores' long tail point up: positives are the minority
    residual_energy        log energy of g outside the batch's strongest directions, with the sign
                           that puts the smaller of two clusters up: positives are the minority
    informed               log-likelihood ratio of the label, given the model's predictions, their
                           slopes in the activations, and noise as the batch has it       (oracle)
    regress_out            spectral, on the residual of g after regression on the party's own
                           activations
    activation_spectral    spectral, on the activations instead of the gradients
    kmeans                 distance to the larger less distance to the smaller of two clusters of
                           the gradients' directions
    kmeans_hint            the same with a cluster for each class, which begins at one known example
    nearest_hint           cos(g, h) with a known positive less that with one of another class
    activation_kmeans      kmeans, on the activations instead of the gradients

No attack reads labels: everything that it needs to know besides the gradients is an explicit
argument, and `ATTACKS` names it. With more than two classes, an attack that is told something about
the positives runs once for each class, with that class as the positives. The scores themselves are
defined in `splitveil.common.privacy.scores`, `residual_energy` and `informed` in modules of their
own, attacks that accumulate over a run in `splitveil.common.privacy.accumulation`, and user-defined
attacks are loaded by `splitveil.common.privacy.custom_attacks`. `optimal`, on the released sums of
projected labels, needs no gradient: it is a function by itself.

The oracles learn the classes from examples other than the ones that they score: a class mean that
includes the scored example itself finds a leak in pure noise.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from splitveil.common.privacy import scores
from splitveil.common.privacy.gradient_rows import Gradients
from splitveil.common.privacy.informed import KnownPredictions, informed
from splitveil.common.privacy.optimal import optimal
from splitveil.common.privacy.residual_energy import residual_energy

__all__ = [
    "ATTACKS",
    "CUT",
    "Attack",
    "AttackName",
    "BatchAttackName",
    "Knowledge",
    "RunAttackName",
    "SideInformation",
    "informed",
    "optimal",
    "residual_energy",
]

BatchAttackName: TypeAlias = Literal[
    "norm",
    "cosine",
    "cosine_majority",
    "hint_inner_product_1",
    "hint_inner_product_3",
    "hint_inner_product_5",
    "hint_distance_1",
    "hint_distance_3",
    "hint_distance_5",
    "mean",
    "median",
    "lda",
    "spectral",
    "residual_energy",
    "informed",
    "regress_out",
    "activation_spectral",
    "kmeans",
    "kmeans_hint",
    "nearest_hint",
    "activation_kmeans",
]

RunAttackName: TypeAlias = Literal[
    "accumulated_spectral",
    "accumulated_residual_energy",
    "accumulated_cosine",
    "accumulated_kmeans",
    "accumulated_nearest_hint",
    "accumulated_informed",
    "hint_combiner_50",
    "hint_combiner_200",
    "final_kmeans",
    "final_nearest_hint",
    "completion_40",
]

AttackName: TypeAlias = Literal[BatchAttackName, RunAttackName]

CUT = "cut"
"""Name of the layer at which the gradients arrive."""

KnowledgeT = TypeVar("KnowledgeT")


_EVALUATION_ONLY = " (evaluation only)"


class SideInformation(StrEnum):
    """Kinds of knowledge that an attacker needs besides the gradients."""

    POSITIVE_GRADIENT = f"one clean gradient of a positive per batch{_EVALUATION_ONLY}"
    POSITIVES_ARE_FEWER = "positives are the minority"
    HINTS = "some positives of each batch"
    CLASSES = f"other gradients with their labels{_EVALUATION_ONLY}"
    ACTIVATIONS = "the party's own activations"
    PREDICTIONS = f"the model's predictions and their slopes{_EVALUATION_ONLY}"
    OTHER_HINTS = "one example of each other class of each batch"

    @property
    def words(self) -> str:
        """The side information itself, without the note that only an evaluation has it."""
        return self.value.removesuffix(_EVALUATION_ONLY)

    @property
    def is_oracle(self) -> bool:
        """Whether only an evaluation has it, and a passive party does not."""
        return self in (
            SideInformation.POSITIVE_GRADIENT,
            SideInformation.CLASSES,
            SideInformation.PREDICTIONS,
        )

    @property
    def is_free(self) -> bool:
        """Whether every passive party knows it or can guess it."""
        return self in (SideInformation.POSITIVES_ARE_FEWER, SideInformation.ACTIVATIONS)


class Knowledge(NamedTuple):
    """The side information available for one batch; None for each kind that is missing."""

    positive_gradient: Tensor | None = None
    hints: Tensor | None = None
    """Gradients of known positives, (hints, ...)."""

    classes: scores.KnownClasses | None = None
    activations: Tensor | None = None
    """(batch, ...)."""

    predictions: KnownPredictions | None = None
    target: int = 1
    """The class taken for the positives."""

    other_hints: Tensor | None = None
    """Gradient of one example of each other class, (classes, ...)."""

    def suffices_for(self, attack: "Attack") -> bool:
        """Return whether it holds everything that the attack needs."""
        return not attack.needs or attack.needs.isdisjoint(self._missing(attack.num_hints))

    def _missing(self, num_hints: int) -> Iterator[SideInformation]:
        if self.positive_gradient is None:
            yield SideInformation.POSITIVE_GRADIENT
        if self.hints is None or len(self.hints) < num_hints:
            yield SideInformation.HINTS
        if self.classes is None:
            yield SideInformation.CLASSES
        if self.activations is None:
            yield SideInformation.ACTIVATIONS
        if self.predictions is None:
            yield SideInformation.PREDICTIONS
        if self.other_hints is None or not len(self.other_hints):
            yield SideInformation.OTHER_HINTS


class Attack(NamedTuple):
    """One row of the table of attacks."""

    score: Callable[[Gradients, Knowledge], Tensor]
    needs: frozenset[SideInformation]
    num_hints: int = 0
    reads_gradients: bool = True
    """False for an attack whose scores are the same at every layer."""

    @property
    def is_oracle(self) -> bool:
        """Whether it uses side information that only an evaluation has."""
        return any(need.is_oracle for need in self.needs)

    @property
    def is_free(self) -> bool:
        """Whether every passive party can run it without knowing a label."""
        return all(need.is_free for need in self.needs)


def _needed(value: KnowledgeT | None, what: SideInformation, attack: str) -> KnowledgeT:
    if value is None:
        raise ValueError(f"{attack} needs {what}")
    return value


def _score_cosine(gradients: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.positive_gradient, SideInformation.POSITIVE_GRADIENT, "cosine")
    return scores.cosine(gradients, known)


def _score_with_hints(
    score: Callable[[Gradients, Tensor], Tensor],
    num_hints: int,
    gradients: Gradients,
    known: Knowledge,
) -> Tensor:
    hints = _needed(known.hints, SideInformation.HINTS, score.__name__)
    if len(hints) < num_hints:
        raise ValueError(f"{score.__name__} needs {num_hints} hints, got {len(hints)}")
    return score(gradients, hints[:num_hints])


def _score_with_classes(
    score: Callable[[Gradients, scores.KnownClasses], Tensor],
    gradients: Gradients,
    known: Knowledge,
) -> Tensor:
    return score(gradients, _needed(known.classes, SideInformation.CLASSES, score.__name__))


def _score_regress_out(gradients: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.activations, SideInformation.ACTIVATIONS, "regress_out")
    return scores.regress_out(gradients, known)


def _score_activations(_: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.activations, SideInformation.ACTIVATIONS, "activation_spectral")
    return scores.spectral(known)


def _score_activation_kmeans(_: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.activations, SideInformation.ACTIVATIONS, "activation_kmeans")
    return scores.activation_kmeans(known)


def _score_with_each_class(
    score: Callable[[Gradients, Tensor, Tensor], Tensor], gradients: Gradients, known: Knowledge
) -> Tensor:
    hints = _needed(known.hints, SideInformation.HINTS, score.__name__)
    others = _needed(known.other_hints, SideInformation.OTHER_HINTS, score.__name__)
    return score(gradients, hints[:1], others)


def _score_informed(gradients: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.predictions, SideInformation.PREDICTIONS, "informed")
    return informed(gradients, known, knowledge.target)


def _hinted(score: Callable[[Gradients, Tensor], Tensor], num_hints: int) -> Attack:
    scored = partial(_score_with_hints, score, num_hints)
    return Attack(scored, frozenset({SideInformation.HINTS}), num_hints)


def _classed(score: Callable[[Gradients, scores.KnownClasses], Tensor]) -> Attack:
    return Attack(partial(_score_with_classes, score), frozenset({SideInformation.CLASSES}))


_ONE_OF_EACH_CLASS = frozenset({SideInformation.HINTS, SideInformation.OTHER_HINTS})

_MINORITY = frozenset({SideInformation.POSITIVES_ARE_FEWER})

ATTACKS: Mapping[BatchAttackName, Attack] = MappingProxyType(
    {
        "norm": Attack(lambda gradients, _: scores.norm(gradients), frozenset()),
        "cosine": Attack(_score_cosine, frozenset({SideInformation.POSITIVE_GRADIENT})),
        "cosine_majority": Attack(
            lambda gradients, _: scores.cosine_majority(gradients), _MINORITY
        ),
        "hint_inner_product_1": _hinted(scores.hint_inner_product, 1),
        "hint_inner_product_3": _hinted(scores.hint_inner_product, 3),
        "hint_inner_product_5": _hinted(scores.hint_inner_product, 5),
        "hint_distance_1": _hinted(scores.hint_distance, 1),
        "hint_distance_3": _hinted(scores.hint_distance, 3),
        "hint_distance_5": _hinted(scores.hint_distance, 5),
        "mean": _classed(scores.mean),
        "median": _classed(scores.median),
        "lda": _classed(scores.lda),
        "spectral": Attack(lambda gradients, _: scores.spectral(gradients), _MINORITY),
        "residual_energy": Attack(lambda gradients, _: residual_energy(gradients), _MINORITY),
        "informed": Attack(_score_informed, frozenset({SideInformation.PREDICTIONS})),
        "regress_out": Attack(_score_regress_out, _MINORITY | {SideInformation.ACTIVATIONS}),
        "activation_spectral": Attack(
            _score_activations,
            _MINORITY | {SideInformation.ACTIVATIONS},
            reads_gradients=False,
        ),
        "kmeans": Attack(lambda gradients, _: scores.kmeans(gradients), _MINORITY),
        "kmeans_hint": Attack(
            partial(_score_with_each_class, scores.kmeans_hint), _ONE_OF_EACH_CLASS, num_hints=1
        ),
        "nearest_hint": Attack(
            partial(_score_with_each_class, scores.nearest_hint), _ONE_OF_EACH_CLASS, num_hints=1
        ),
        "activation_kmeans": Attack(
            _score_activation_kmeans,
            _MINORITY | {SideInformation.ACTIVATIONS},
            reads_gradients=False,
        ),
    }
)

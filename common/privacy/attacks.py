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
argument, and `ATTACKS` names it. With more than two classes, an attack that knows something about
the positives runs once for each class, with that class as the positives. The scores themselves are
defined in `splitveil.common.privacy.scores`, `informed` in a module of its own, attacks that
accumulate over a run in `splitveil.common.privacy.accumulation`, and user-defined attacks are
loaded by `splitveil.common.privacy.custom_attacks`.

The oracles learn the classes from examples other than the ones that they score: a class mean that
includes the scored example itself finds a leak in pure noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from splitveil.common.privacy import scores
    from splitveil.common.privacy.gradient_rows import GradientRows, Gradients, TopDirection
    from splitveil.common.privacy.informed import KnownPredictions

CUT = "cut"  # name of the layer where the gradients arrive

_EVALUATION_ONLY = " (evaluation only)"


class SideInformation(StrEnum):
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
        """True if only an evaluation has it, and a passive party does not."""
        return self.value.endswith(_EVALUATION_ONLY)

    @property
    def is_free(self) -> bool:
        """True if every passive party knows it or can guess it."""
        return self in (SideInformation.POSITIVES_ARE_FEWER, SideInformation.ACTIVATIONS)


class Knowledge(NamedTuple):
    """The side information available for one batch; None for each kind that is missing."""

    positive_gradient: Tensor | None = None
    hints: Tensor | None = None  # gradients of known positives, (hints, ...)
    classes: scores.KnownClasses | None = None
    activations: Tensor | None = None  # (batch, ...)
    predictions: KnownPredictions | None = None
    target: int = 1  # the class taken for the positives
    other_hints: Tensor | None = None  # gradient of one example of each other class, (classes, ...)


class Attack(NamedTuple):
    function: Callable[..., Tensor]  # returns the scores, from gradients and what it needs
    needs: frozenset[SideInformation] = frozenset()
    num_hints: int = 0
    reads_gradients: bool = True  # false for an attack whose scores are the same at every layer
    direction: Callable[[GradientRows, Tensor, Tensor], TopDirection] | None = None
    """From gradients, scores and a positive's gradient: the direction behind the scores, if its
    sign says nothing."""
    follows_batches: bool = False
    """True if sums over several classes are along one direction that follows the batches."""

    @property
    def is_oracle(self) -> bool:
        """True if it uses side information that only an evaluation has."""
        return any(need.is_oracle for need in self.needs)

    @property
    def is_free(self) -> bool:
        """True if every passive party can run it without knowing a label."""
        return all(need.is_free for need in self.needs)

    @property
    def needs_classes(self) -> bool:
        """True if it learns from other rows of the batch with their labels."""
        return SideInformation.CLASSES in self.needs

    @property
    def arguments(self) -> dict[SideInformation, str]:
        """Side information that is handed over -> field of `Knowledge`, in order."""
        handed_over = self.needs - {SideInformation.POSITIVES_ARE_FEWER}
        return {need: need.name.lower() for need in SideInformation if need in handed_over}

    def runs_at(self, layer: str) -> bool:
        """Return whether it has scores of its own at a layer."""
        reads_the_cut = not self.reads_gradients or SideInformation.PREDICTIONS in self.needs
        return layer == CUT or not reads_the_cut

    def missing(self, knowledge: Knowledge) -> SideInformation | None:
        """Return the first thing that it needs and is not there; None if it has everything."""
        fewest = {SideInformation.HINTS: self.num_hints, SideInformation.OTHER_HINTS: 1}
        for need, name in self.arguments.items():
            value = getattr(knowledge, name)
            if value is None or (need in fewest and len(value) < fewest[need]):
                return need
        return None

    def score(self, gradients: Gradients, knowledge: Knowledge) -> Tensor:
        """Return one score per example, (batch,); ValueError if something it needs is missing."""
        missing = self.missing(knowledge)
        if missing is not None:
            name = getattr(self.function, "__name__", "the attack")
            hints = f" ({self.num_hints} hints)" if missing is SideInformation.HINTS else ""
            raise ValueError(f"{name} needs {missing}{hints}")
        if self.num_hints and knowledge.hints is not None:
            knowledge = knowledge._replace(hints=knowledge.hints[: self.num_hints])
        known = [getattr(knowledge, name) for name in self.arguments.values()]
        if SideInformation.PREDICTIONS in self.needs:
            known.append(knowledge.target)
        return self.function(*([gradients] if self.reads_gradients else []), *known)


class RunAttack(NamedTuple):
    sources: tuple[str, ...] = ()  # attacks whose scores it sums up; none: last activations
    num_hints: int = 0  # labels of the run that it knows, if that does not depend on it
    one_of_each_class: bool = False  # whether it knows the label of one example of each
    standardises: bool = True  # false for sums in which batches that say more count more
    agrees_with_sums: bool = False  # each batch's sign, with its examples' sums

    @property
    def is_final(self) -> bool:
        """True if it looks only at the last activations, and at no gradient."""
        return not self.sources

    @property
    def combines(self) -> bool:
        return bool(self.sources) and self.num_hints > 0

    @property
    def needs(self) -> frozenset[SideInformation]:
        """The side information that it needs besides labels of the run."""
        if self.is_final:
            return frozenset({SideInformation.ACTIVATIONS})
        if self.combines:
            return frozenset()
        return frozenset[SideInformation]().union(*(ATTACKS[name].needs for name in self.sources))


def _score(name: str) -> Callable[..., Tensor]:
    """Return a score, whose module is imported when it is first called: names need no torch."""

    def score(*given: Any) -> Tensor:
        from splitveil.common.privacy import informed, scores  # noqa: PLC0415

        found: Tensor = getattr(informed if name == "informed" else scores, name)(*given)
        return found

    score.__name__ = name
    return score


def _along_reference(_rows: GradientRows, cosines: Tensor, reference: Tensor) -> TopDirection:
    from splitveil.common.privacy.gradient_rows import TopDirection, unit_vector  # noqa: PLC0415

    return TopDirection(cosines, unit_vector(reference))


def _hinted(score: Callable[..., Tensor], num_hints: int) -> Attack:
    return Attack(score, frozenset({SideInformation.HINTS}), num_hints)


_ONE_OF_EACH_CLASS = frozenset({SideInformation.HINTS, SideInformation.OTHER_HINTS})
_MINORITY = frozenset({SideInformation.POSITIVES_ARE_FEWER})
_OWN_MINORITY = _MINORITY | {SideInformation.ACTIVATIONS}
_CLASSES = frozenset({SideInformation.CLASSES})

ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {
        "norm": Attack(_score("norm")),
        "cosine": Attack(
            _score("cosine"),
            frozenset({SideInformation.POSITIVE_GRADIENT}),
            direction=_along_reference,
        ),
        "cosine_majority": Attack(_score("cosine_majority"), _MINORITY),
        "hint_inner_product_1": _hinted(_score("hint_inner_product"), 1),
        "hint_inner_product_3": _hinted(_score("hint_inner_product"), 3),
        "hint_inner_product_5": _hinted(_score("hint_inner_product"), 5),
        "hint_distance_1": _hinted(_score("hint_distance"), 1),
        "hint_distance_3": _hinted(_score("hint_distance"), 3),
        "hint_distance_5": _hinted(_score("hint_distance"), 5),
        "mean": Attack(_score("mean"), _CLASSES),
        "median": Attack(_score("median"), _CLASSES),
        "lda": Attack(_score("lda"), _CLASSES),
        "spectral": Attack(
            _score("spectral"), _MINORITY, direction=lambda rows, *_: rows.top, follows_batches=True
        ),
        "residual_energy": Attack(_score("residual_energy"), _MINORITY),
        "informed": Attack(_score("informed"), frozenset({SideInformation.PREDICTIONS})),
        "regress_out": Attack(_score("regress_out"), _OWN_MINORITY),
        "activation_spectral": Attack(_score("spectral"), _OWN_MINORITY, reads_gradients=False),
        "kmeans": Attack(_score("kmeans"), _MINORITY, direction=lambda rows, *_: rows.clusters),
        "kmeans_hint": Attack(_score("kmeans_hint"), _ONE_OF_EACH_CLASS, num_hints=1),
        "nearest_hint": Attack(_score("nearest_hint"), _ONE_OF_EACH_CLASS, num_hints=1),
        "activation_kmeans": Attack(
            _score("activation_kmeans"), _OWN_MINORITY, reads_gradients=False
        ),
    }
)

RUN_ATTACKS: Mapping[str, RunAttack] = MappingProxyType(
    {
        "accumulated_spectral": RunAttack(("spectral",)),
        "accumulated_residual_energy": RunAttack(("residual_energy",), agrees_with_sums=True),
        "accumulated_cosine": RunAttack(("cosine",)),
        "accumulated_kmeans": RunAttack(("kmeans",)),
        "accumulated_nearest_hint": RunAttack(("nearest_hint",)),
        "accumulated_informed": RunAttack(("informed",), standardises=False),
        "hint_combiner_50": RunAttack(("spectral", "norm"), 50),
        "hint_combiner_200": RunAttack(("spectral", "norm"), 200),
        "final_kmeans": RunAttack(),
        "final_nearest_hint": RunAttack(one_of_each_class=True),
        "completion_10": RunAttack(num_hints=10),
        "completion_40": RunAttack(num_hints=40),
        "completion_400": RunAttack(num_hints=400),
    }
)

NUMBER_ATTACKS: Mapping[str, str] = MappingProxyType(
    {
        "top_direction": "nothing",
        "informed": "the model's predictions and slopes (evaluation only)",
        "accumulated_top_direction": "nothing",
        "accumulated_ridge_40": "40 labels of the run, and its own activations",
    }
)
"""Attack on labels that are numbers -> its knowledge besides the gradients; all of them run."""

BUILT_IN_NAMES = (*ATTACKS, *RUN_ATTACKS)
if TYPE_CHECKING:
    AttackName: TypeAlias = str
else:
    AttackName = Literal[BUILT_IN_NAMES]

FINAL_ATTACKS = tuple(name for name, attack in RUN_ATTACKS.items() if attack.is_final)

WITHOUT_GRADIENTS = frozenset(
    name for name, attack in ATTACKS.items() if not attack.reads_gradients
) | frozenset(FINAL_ATTACKS)
"""Attacks that look only at a party's own activations: a baseline, and not a gradient leak."""


def needs_of(attack: str) -> str:
    """Describe the knowledge that an attack needs besides the gradients."""
    known = _BY_NAME.get(attack)
    if known is None:
        return "not known here"
    needs = [one.value for one in known.needs]
    if isinstance(known, RunAttack) and known.one_of_each_class:
        needs.append("one label of each class")
    elif isinstance(known, RunAttack) and known.num_hints:
        needs.append(f"{known.num_hints} labels of the run")
    return "; ".join(sorted(needs)) or "nothing"


def is_oracle(attack: str) -> bool:
    """Return whether an attack uses knowledge that only an evaluation has."""
    known = _BY_NAME.get(attack)
    return known is not None and any(one.is_oracle for one in known.needs)


_BY_NAME: Mapping[str, Attack | RunAttack] = {**ATTACKS, **RUN_ATTACKS}

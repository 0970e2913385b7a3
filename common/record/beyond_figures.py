"""The part of a run's summary about what attacks tell beyond features: types, and form in the file.

Entries ``adjusted_leak`` and ``leak_advantage`` hold figures by attack, all of the cut layer;
``epsilon_lower_bound`` is a number, and ``epsilon_lower_bound_details`` says where it comes from.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from splitveil.common.privacy.covers import Covers
from splitveil.common.record.values import ValueT, as_count, as_mapping, as_number, as_text

_EPSILON = "epsilon_lower_bound"
_DETAILS = "epsilon_lower_bound_details"
_CLEARLY = 3.0 / 1.96
_UNLIKELY_P = 0.05
"""A p-value below which guesses speak against a stated epsilon, beside a figure that does."""
_FEW_PAIRS = 1_000
"""Pairs of labels below which an adjusted figure rests on few rows that features do not decide."""
_CLEARLY_P = 0.001
"""A p-value below which guesses contradict a stated epsilon. Labels that are randomised with
epsilon, and read exactly, come as close to it as guesses can: at 0.05, one such run in twenty would
raise an alarm that nothing is behind."""
BEYOND_TABLES = ("adjusted_leak", "leak_advantage", _DETAILS)
"""Entries of a summary that hold more than one number."""


class AdjustedFigures(NamedTuple):
    """The leak AUC of one attack among rows of which features tell the same."""

    value: float
    low: float
    """Lower end of its 95 % interval; below 1/2 where the leak may be chance."""
    high: float


class AdvantageFigures(NamedTuple):
    """By how much one attack over the run does better than the attacker's own features."""

    value: float
    low: float
    """Lower end of its 95 % interval."""
    high: float
    prior: float
    """Leak AUC of the attacker's own model, fitted to as many labels."""


class EpsilonFigures(NamedTuple):
    """The largest epsilon of label differential privacy that a run's attacks exclude."""

    epsilon: float
    attack: str
    """The attack whose guesses were tested."""
    guesses: int
    correct: int
    pairs: int
    """Pairs of a true and another label among which the attack chose its guesses."""
    confidence: float
    delta: float
    p_value: float
    """Of so many correct guesses by chance alone: that of epsilon 0."""
    stated: float | None = None
    """The smallest epsilon that the ledger states at this delta; None where it states none."""
    stated_for: str | None = None
    """The peers for whom it states it."""
    p_value_of_stated: float | None = None
    """Of so many correct guesses in a run that is as private as stated."""

    @property
    def passes_stated(self) -> bool:
        """Whether the attacks exclude what the ledger states, at 99.9 % confidence."""
        return self.p_value_of_stated is not None and self.p_value_of_stated < _CLEARLY_P


class BeyondFigures(NamedTuple):
    """What attacks tell beyond features."""

    adjusted: Mapping[str, AdjustedFigures] = MappingProxyType({})
    advantage: Mapping[str, AdvantageFigures] = MappingProxyType({})
    epsilon: EpsilonFigures | None = None
    """None if too few rows were offered another label; the file then has a bound of 0."""

    def strongest(self) -> tuple[str, AdjustedFigures] | None:
        """Return the attack with the largest adjusted leak AUC, if any was measured."""
        return max(self.adjusted.items(), key=lambda item: item[1].value, default=None)


def is_clearly_above(found: AdjustedFigures, auc: float) -> bool:
    """Return whether a figure lies above an AUC by three standard errors.

    Several attacks are compared with it, and each may be inverted: for that, an interval of two
    standard errors is too narrow.
    """
    return found.value - _CLEARLY * (found.value - found.low) > auc


def passed_bounds(
    beyond: BeyondFigures, bounds: Mapping[Covers, float]
) -> Iterator[tuple[str, AdjustedFigures, Covers]]:
    """Yield each attack that tells more beyond features than a bound says, with the widest peers.

    None is yielded where guesses are no better than chance, and a bound that holds for anybody
    counts as passed only where guesses are better than it permits, or there are many pairs, but not
    where there are too few rows for guesses: see `set_aside`.

    Args:
        beyond: the figures of a run.
        bounds: AUC that no score of some peers exceeds, from the widest circle of them on.
    """
    if _guesses_by_chance(beyond):
        return
    for attack, found in beyond.adjusted.items():
        passed = [peers for peers, bound in bounds.items() if is_clearly_above(found, bound)]
        if passed and not (passed[0] is Covers.ANYBODY and _guesses_as_permitted(beyond)):
            yield attack, found, passed[0]


def set_aside(beyond: BeyondFigures, bound: float) -> dict[str, AdjustedFigures]:
    """Return the adjusted figures that say nothing of gradients, by attack.

    Where features all but tell the labels of a few hundred rows, an adjusted figure shows what the
    model of the features has not learned. The guesses of the epsilon's audit, from which the part
    of every score that features explain was taken out, are then no better than chance, or, of fewer
    than 1,000 pairs of labels, no better than the epsilon permits that the ledger states for
    anybody, or there were too few pairs to guess at all; and the figure may lie above a bound that
    is proved for anybody.

    Args:
        beyond: the figures of a run.
        bound: AUC that no score of anybody exceeds; 1 or NaN where there is none.
    """
    if not (_guesses_by_chance(beyond) or _guesses_as_permitted(beyond)):
        return {}
    return {name: found for name, found in beyond.adjusted.items() if found.value > bound}


def _guesses_by_chance(beyond: BeyondFigures) -> bool:
    return beyond.epsilon is not None and beyond.epsilon.p_value > _CLEARLY_P


def _guesses_as_permitted(beyond: BeyondFigures) -> bool:
    measured = beyond.epsilon
    if measured is None:  # the rows that features do not decide are too few for any guess
        return True
    if measured.p_value_of_stated is None:
        return False
    says_nothing_against = measured.p_value_of_stated > _UNLIKELY_P
    return (
        measured.pairs < _FEW_PAIRS
        and measured.stated_for == Covers.ANYBODY
        and says_nothing_against
    )


def beyond_to_json(beyond: BeyondFigures) -> dict[str, Any]:
    """Return the form of the figures in a summary's file."""
    written: dict[str, Any] = {
        "adjusted_leak": {name: one._asdict() for name, one in beyond.adjusted.items()},
        "leak_advantage": {name: one._asdict() for name, one in beyond.advantage.items()},
    }
    if beyond.epsilon is None:
        return written | {_EPSILON: 0.0}  # too few rows to exclude anything
    details = beyond.epsilon._asdict()
    return written | {_EPSILON: details.pop("epsilon"), _DETAILS: details}


def beyond_from_json(values: Mapping[str, Any]) -> BeyondFigures | None:
    """Return the figures that a summary's JSON object holds; None if it lacks such entries."""
    if not values.keys() & {*BEYOND_TABLES, _EPSILON}:
        return None
    return BeyondFigures(
        _read_each(values.get("adjusted_leak"), _read_adjusted),
        _read_each(values.get("leak_advantage"), _read_advantage),
        _read_epsilon(values),
    )


def _read_each(
    written: object, read: Callable[[Mapping[str, Any]], ValueT | None]
) -> dict[str, ValueT]:
    found = {str(name): read(as_mapping(one)) for name, one in as_mapping(written).items()}
    return {name: one for name, one in found.items() if one is not None}


def _read_adjusted(values: Mapping[str, Any]) -> AdjustedFigures | None:
    value, low, high = (as_number(values.get(name)) for name in AdjustedFigures._fields)
    if value is None or low is None or high is None:
        return None
    return AdjustedFigures(value, low, high)


def _read_advantage(values: Mapping[str, Any]) -> AdvantageFigures | None:
    of_attack, prior = _read_adjusted(values), as_number(values.get("prior"))
    if of_attack is None or prior is None:
        return None
    return AdvantageFigures(*of_attack, prior)


def _read_epsilon(values: Mapping[str, Any]) -> EpsilonFigures | None:
    details = as_mapping(values.get(_DETAILS))
    epsilon, attack = as_number(values.get(_EPSILON)), as_text(details.get("attack"))
    counts = [as_count(details.get(name)) for name in ("guesses", "correct", "pairs")]
    numbers = [as_number(details.get(name)) for name in ("confidence", "delta", "p_value")]
    if epsilon is None or attack is None or None in counts or None in numbers:
        return None
    guesses, correct, pairs = (count or 0 for count in counts)
    confidence, delta, chance = (number or 0.0 for number in numbers)
    return EpsilonFigures(
        *(epsilon, attack, guesses, correct, pairs, confidence, delta, chance),
        stated=as_number(details.get("stated")),
        stated_for=as_text(details.get("stated_for")),
        p_value_of_stated=as_number(details.get("p_value_of_stated")),
    )

"""The part of a run's summary about what attacks tell beyond features: types, and form in the file.

Entries ``adjusted_leak`` and ``leak_advantage`` hold figures by attack, all of the cut layer;
``epsilon_lower_bound`` is a number, and ``epsilon_lower_bound_details`` says where it comes from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.values import (
    IF_ANY,
    Form,
    Key,
    Known,
    KnownCount,
    Maybe,
    Number,
    Table,
    Text,
)

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


class AdjustedFigures(NamedTuple):
    """The leak AUC of one attack among rows of which features tell the same."""

    value: Known
    low: Known
    """Lower end of its 95 % interval; below 1/2 where the leak may be chance."""
    high: Known


class AdvantageFigures(NamedTuple):
    """By how much one attack over the run does better than the attacker's own features."""

    value: Known
    low: Known
    high: Known
    prior: Known
    """Leak AUC of the attacker's own model, fitted to as many labels."""


class EpsilonFigures(NamedTuple):
    """The largest epsilon of label differential privacy that a run's attacks exclude."""

    epsilon: Known
    attack: str
    guesses: KnownCount
    correct: KnownCount
    pairs: KnownCount
    """Pairs of a true and another label among which the attack chose its guesses."""
    confidence: Known
    delta: Known
    p_value: Known
    """Of so many correct guesses by chance alone: that of epsilon 0."""
    stated: Number = None
    """The smallest epsilon that the ledger states at this delta; None where it states none."""
    stated_for: Text = None
    p_value_of_stated: Number = None
    """Of so many correct guesses in a run that is as private as stated."""

    @property
    def passes_stated(self) -> bool:
        """Whether the attacks exclude what the ledger states, at 99.9 % confidence."""
        return self.p_value_of_stated is not None and self.p_value_of_stated < _CLEARLY_P


@dataclass(frozen=True)
class BeyondFigures(Form):
    """What attacks tell beyond features."""

    adjusted: Annotated[Table[AdjustedFigures], Key("adjusted_leak")] = field(default_factory=dict)
    advantage: Annotated[Table[AdvantageFigures], Key("leak_advantage")] = field(
        default_factory=dict
    )
    epsilon: Annotated[Maybe[EpsilonFigures], Key(_DETAILS), IF_ANY] = None
    """None if too few rows were offered another label; the file then has a bound of 0."""

    def form(self) -> dict[str, Any]:
        bound = 0.0 if self.epsilon is None else self.epsilon.epsilon
        return super().form() | {"epsilon_lower_bound": bound}

    def strongest(self) -> tuple[str, AdjustedFigures] | None:
        return max(self.adjusted.items(), key=lambda item: item[1].value, default=None)


def is_clearly_above(found: AdjustedFigures, auc: float) -> bool:
    """Return whether a figure lies above an AUC by three standard errors.

    Several attacks are compared with it, and each may be inverted: for that, an interval of two
    standard errors is too narrow.
    """
    return found.value - _CLEARLY * (found.value - found.low) > auc


def passed_bounds(
    beyond: BeyondFigures, bounds: Mapping[Adversary, float]
) -> Iterator[tuple[str, AdjustedFigures, Adversary]]:
    """Yield each attack that tells more beyond features than a bound says, with the widest peers.

    None is yielded where guesses are no better than chance, and a bound that holds for anybody
    counts as passed only where guesses are better than it permits, or there are many pairs, but not
    where there are too few rows for guesses: see `set_aside`.

    Args:
        bounds: AUC that no score of some peers exceeds, the strongest adversary class first.
    """
    if _guesses_by_chance(beyond):
        return
    for attack, found in beyond.adjusted.items():
        passed = [peers for peers, bound in bounds.items() if is_clearly_above(found, bound)]
        if passed and not (passed[0] is Adversary.ANYBODY and _guesses_as_permitted(beyond)):
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
        and measured.stated_for == Adversary.ANYBODY
        and says_nothing_against
    )

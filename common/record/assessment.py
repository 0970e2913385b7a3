"""Judges the leak of labels by a run's figures, and prints them: one judgement for pages and logs.

The leading figure is the feature-adjusted leak AUC with its interval, beside the bound, on a scale
from 1/2, which is guessing, to 1. A raw leak AUC contains what features reveal anyway.

A bound for anybody is a theorem about the answers, and no measurement puts it in doubt: a figure
above it shows that the models of the features say less than the attack knows of them. All other
bounds hold only for peers who do no more than is said, and a figure above one is a finding.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from rich.console import Console

from splitveil.common.privacy.attacks import CUT, WITHOUT_GRADIENTS
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import (
    AdjustedFigures,
    BeyondFigures,
    EpsilonBound,
    LeakBounds,
    NumberBeyond,
)
from splitveil.common.record.run_record import Summary, plain_figures
from splitveil.common.text.log_lines import log_fields, printing_console, writes_json
from splitveil.common.text.visible_text import PlainTable
from splitveil.common.text.wording import auc_at_most, in_words, label

RECOVERED = 0.9  # adjusted leak AUC, or share of variance, that counts as labels recovered
NO_BOUND = 0.999  # bound at and above which a ledger excludes nothing
WIDEST = 0.4  # width of an interval beyond which a figure that excludes nothing says nothing


class Finding(StrEnum):
    ABOVE_BOUND = "above the bound"
    LEAKS = "leaks"
    NOT_SEPARATED = "not separated from features"
    NO_LEAK_SHOWN = "no leak shown"
    TOO_FEW_ROWS = "too few rows"


class AssessedAttack(NamedTuple):
    attack: str
    leak: AdjustedFigures
    finding: Finding
    why: str = ""  # of a figure above a bound: what that means

    @property
    def figures(self) -> str:
        """The leak AUC and its interval, on the scale from 1/2 to 1."""
        low, high = (min(max(end, 0.5), 1.0) for end in (self.leak.low, self.leak.high))
        return f"{self.leak.value:.3f} ({low:.3f} to {high:.3f})"


@dataclass(frozen=True)
class LeakAssessment:
    adversary: Adversary | None  # the strongest with a bound; None without any bound
    bound: float | None  # leak AUC that no score of these peers exceeds, for the most exposed label
    attacks: tuple[AssessedAttack, ...]  # the strongest first; attacks on too few rows last
    rows: int | None
    feature_auc: float | None  # AUC of what features reveal without any gradient, on the same rows
    is_measured: bool  # whether anything was measured beyond features, be it on too few rows
    is_proved: bool = False  # whether the bound holds whatever was measured
    has_gradients: bool = True  # whether any were sent that could be attacked
    is_computational: bool = False  # whether the bound needs that nobody breaks a cipher
    explained: NumberBeyond | None = None
    """Of labels that are numbers, by the strongest attack, in place of ``attacks``: no leak AUC."""
    is_of_persons: bool = False  # whether the bound is for all labels of a person together

    @property
    def is_complete(self) -> bool:
        """True if something was measured, and no attack is without a figure."""
        unknown = (one for one in self.attacks if one.finding == Finding.TOO_FEW_ROWS)
        return bool(self.attacks) and next(unknown, None) is None

    @property
    def strongest(self) -> AssessedAttack | None:
        """The strongest attack that says anything; None if rows are too few for all."""
        return next((one for one in self.attacks if one.finding != Finding.TOO_FEW_ROWS), None)

    @property
    def above_bound(self) -> list[AssessedAttack]:
        return [one for one in self.attacks if one.finding == Finding.ABOVE_BOUND]

    @property
    def share(self) -> tuple[float, float, float] | None:
        """The strongest attack's interval and value, from 0, which is chance, to 1, every label."""
        if self.explained is not None:
            return self.explained.low, self.explained.high, self.explained.r2
        if self.strongest is None:
            return None
        value, low, high = (max(2 * one - 1, 0.0) for one in self.strongest.leak)
        return low, high, value

    @property
    def is_recovered(self) -> bool:
        """True if an attack reads nearly all labels; nobody does past a bound that is proved."""
        if self.explained is not None:
            return self.explained.r2 >= RECOVERED
        excluded = self.is_proved and (self.bound or 0.0) < RECOVERED
        strongest = self.strongest
        return strongest is not None and strongest.leak.value >= RECOVERED and not excluded

    @property
    def bound_in_words(self) -> str:
        """``at most .600 for anybody``, or ``no bound``."""
        if self.bound is None or self.adversary is None:
            return "no bound"
        how = ", computationally" * self.is_computational + ", for each person" * self.is_of_persons
        return f"at most {auc_at_most(self.bound)} for {self.adversary.in_words}{how}"

    @property
    def reveals_nothing(self) -> bool:
        """True if by a proved bound, which no attack passes, nothing is revealed to anybody."""
        is_nothing = self.adversary is Adversary.ANYBODY and self.bound == 0.5
        return is_nothing and self.is_proved and not self.above_bound

    @property
    def not_measured(self) -> str:
        if not self.has_gradients:
            return "no gradient to attack"
        if not self.is_measured:
            return "not measured"
        return "cannot be measured" + ("" if self.rows is None else f" on {self.rows:,} rows")

    def figure_in_words(self, attack: AssessedAttack | None) -> str:
        """Return ``norm .512 (.500 to .541)``, and what it means above a bound."""
        if self.explained is not None:
            return f"explains {self.explained.in_words} of the variance that features leave"
        if attack is None:
            return self.not_measured
        return f"{attack.attack} {attack.figures}{', ' * bool(attack.why)}{attack.why}"

    @property
    def raw_note(self) -> str:
        """Note to show wherever a raw leak AUC is beside a bound."""
        by_themselves = "" if self.feature_auc is None else f", AUC {self.feature_auc:.3f} here"
        return (
            f"A raw leak AUC contains what features reveal anyway{by_themselves}: it may lie above "
            "the bound, which limits what the gradients add."
        )

    @property
    def in_words(self) -> str:
        """The whole assessment, as a log line or the first lines of a page say it."""
        return f"{self.figure_in_words(self.strongest)}; bound: {self.bound_in_words}"


def assess(summary: Summary) -> LeakAssessment:
    active = summary.of_active
    assessment = assess_figures(summary.of_leak.beyond, active.ledger, active.defense)
    counts = summary.counts
    has_gradients = counts.aligned_rows is None or counts.steps is not None
    explained = summary.of_leak.strongest_of_numbers
    return replace(assessment, has_gradients=has_gradients, explained=explained)


def passes_stated(epsilon: EpsilonBound, assessment: LeakAssessment) -> bool:
    """Return whether guesses exclude an epsilon that is stated, and not proved for anybody."""
    is_proved = assessment.is_proved and epsilon.stated_for == Adversary.ANYBODY
    return epsilon.passes_stated and not is_proved


def assess_figures(
    beyond: BeyondFigures | None, ledger: LeakBounds | None, defense: Mapping[str, Any]
) -> LeakAssessment:
    """Judge what attacks reveal beyond features by what the ledger states under a defense."""
    measured = beyond or BeyondFigures()
    limits = bounds_by_peers(ledger)
    adversary = next((peers for peers, bound in limits.items() if bound < NO_BOUND), None)
    # The code of a user's own defense states its charges itself.
    is_proved = adversary is Adversary.ANYBODY and defense.get("name") != "custom"
    assessed = list(_assessed(measured, limits, is_proved=is_proved))
    order = list(Finding)
    assessed.sort(key=lambda one: (order.index(one.finding), -one.leak.value))
    return LeakAssessment(
        adversary,
        None if adversary is None else limits[adversary],
        tuple(assessed),
        measured.rows,
        measured.feature_auc,
        beyond is not None,
        is_proved,
        is_of_persons=defense.get("subject_column") is not None,
    )


def bounds_by_peers(ledger: LeakBounds | None) -> dict[Adversary, float]:
    """Return the bound for each adversary class, of the most exposed example; empty without any."""
    spreads = {} if ledger is None else ledger.by_peers()
    return {peers: one.max for peers, one in spreads.items() if math.isfinite(one.max)}


def _assessed(
    beyond: BeyondFigures, limits: dict[Adversary, float], *, is_proved: bool
) -> Iterator[AssessedAttack]:
    for attack, leak in beyond.adjusted.items():
        if attack in WITHOUT_GRADIENTS:
            continue
        passed = next((one for one in limits if leak.low > limits[one]), None)
        if passed is Adversary.ANYBODY and is_proved:
            functions, trees = beyond.feature_auc_of_functions, beyond.feature_auc_of_trees
            both = ""
            if functions is not None and trees is not None:
                both = f" (AUC {functions:.3f} by functions, {trees:.3f} by boosting)"
            why = (
                f"more than the {auc_at_most(limits[passed])} that is proved for anybody, so that "
                f"it contains what features reveal: the models of these{both} cannot separate them "
                f"from gradients"
            )
            yield AssessedAttack(attack, leak, Finding.NOT_SEPARATED, why)
        elif passed is not None:
            limit, peers = auc_at_most(limits[passed]), passed.in_words
            why = f"more than the {limit} that the ledger states for {peers}"
            yield AssessedAttack(attack, leak, Finding.ABOVE_BOUND, why)
        elif leak.low > 0.5:
            yield AssessedAttack(attack, leak, Finding.LEAKS, _above_by_chance(leak, limits))
        elif leak.high - leak.low > WIDEST:
            yield AssessedAttack(attack, leak, Finding.TOO_FEW_ROWS)
        else:
            why = _above_by_chance(leak, limits)
            yield AssessedAttack(attack, leak, Finding.NO_LEAK_SHOWN, why)


def _above_by_chance(leak: AdjustedFigures, limits: dict[Adversary, float]) -> str:
    bound = min((one for one in limits.values() if leak.value > one), default=None)
    if bound is None:
        return ""
    return f"above the bound of {auc_at_most(bound)} by no more than chance explains"


logger = logging.getLogger(__name__)

_OF_MODEL = (
    "test_auc",
    "test_average_precision",
    "test_calibration_error",
    "test_accuracy",
    "test_auc_refit",
    "test_auc_alone",
    "test_rmse",
    "test_rmse_refit",
    "test_rmse_alone",
)
OVER_FEATURES = "over features (no bound limits it)"


def print_summary(party: str, summary: Summary, *, console: Console | None = None) -> None:
    """Print a run's figures, or its numbers to a log of JSON objects; nothing to a quiet log."""
    if console is None and writes_json():
        logger.info("summary", extra=log_fields(**plain_figures(summary)))
        return
    if console is None and not logger.isEnabledFor(logging.INFO):
        return
    console = console or printing_console()
    table = PlainTable(party, ("figure", "value"), lead=1, show_header=False)
    for name, value in _main_figures(summary):
        table.add_row(name, value)
    console.print(table)
    if summary.active is None and (leak := summary.leak) is not None:
        layers: dict[str, dict[str, float | None]] = {}
        for layer, batches in leak.batches.items():
            layers[layer] = {attack: found.mean for attack, found in batches.items()}
        for layer, of_run in leak.run_level.items():
            layers.setdefault(layer, {}).update({a: found.auc for a, found in of_run.items()})
        pair = "" if not leak.by_class else ", worst pair of classes"
        title = f"adversary: raw leak AUC{pair}; given: labels for evaluation"
        table = PlainTable(title, ("attack",), tuple(layers))
        for attack in dict.fromkeys(attack for one in layers.values() for attack in one):
            aucs = [one.get(attack) for one in layers.values()]
            table.add_row(attack, *("-" if auc is None else f"{auc:.3f}" for auc in aucs))
        console.print(table)


def _main_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    active, model = summary.of_active, summary.of_active.model
    figures = summary.counts._asdict() | model.form()
    for name in (*summary.counts._fields, *_OF_MODEL):
        if (number := figures.get(name)) is not None:
            yield label(name), f"{number:,}" if isinstance(number, int) else in_words(number)
    if summary.active is not None:
        assessment = assess(summary)
        if assessment.has_gradients:
            is_auc = assessment.explained is None
            figure = assessment.figure_in_words(assessment.strongest)
            yield f"strongest attack{', feature-adjusted leak AUC' * is_auc}", figure
        yield "bound for the whole run", assessment.bound_in_words
    for attack, found in summary.of_leak.run_level.get(CUT, {}).items():
        if found.over_features is not None:
            yield f"{attack} {OVER_FEATURES}", found.over_features.in_words
    if active.leak_alarms:
        yield "leak alarms", str(active.leak_alarms)
    if active.refused_messages:
        refused = active.refused_messages.items()
        yield "refused messages", ", ".join(f"{label(name)} {count}" for name, count in refused)

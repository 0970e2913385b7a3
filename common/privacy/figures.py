"""The figures of a run's metrics and summary: their types, and their names in the files.

Of what attacks measure beyond features, ``adjusted_leak`` and ``leak_advantage`` hold figures by
attack, all of the cut layer; ``epsilon_lower_bound`` is a number, and
``epsilon_lower_bound_details`` says where it comes from.
"""

import math
from dataclasses import dataclass, field, fields
from operator import ge, itemgetter
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import BeforeValidator

from splitveil.common.privacy.charge import Adversary
from splitveil.common.text.values import (
    IF_ANY,
    ByAttack,
    Count,
    Flat,
    Form,
    Key,
    Known,
    KnownCount,
    Maybe,
    Number,
    Object,
    Table,
    Text,
    as_list,
    as_number,
    to_form,
)
from splitveil.common.text.wording import auc_at_most


class AttackFigure(NamedTuple):
    layer: str
    attack: str
    leak_auc: float | None


def _or_infinite(value: object) -> float:
    number = as_number(value)
    return math.inf if number is None else number


OrInfinite = Annotated[float, BeforeValidator(_or_infinite)]  # JSON has null for it


class Spread(NamedTuple):
    """One figure over the training examples; NaN where it was not written."""

    max: OrInfinite = math.nan
    q95: OrInfinite = math.nan  # the value that 95 % of the examples do not exceed
    mean: OrInfinite = math.nan


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: Known
    low: Known
    high: Known

    def in_words(self, digits: int = 4) -> str:
        form = f".{digits}f"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


class GroupFigures(NamedTuple):
    """Predictions of label 1 for the test rows of one group; None where they are too few."""

    group: str
    rows: Count
    predicted: Number = None  # mean probability of label 1
    actual: Maybe[Estimate] = None  # share of rows with label 1
    selected: Maybe[Estimate] = None  # share of rows whose score reaches the same threshold
    auc: Maybe[Estimate] = None


Groups: TypeAlias = tuple[GroupFigures, ...] | None


@dataclass(frozen=True)
class PredictionFigures(Form):
    """How good predictions are; None where labels of the kind have no such figure.

    NaN where it is not defined for these rows. Errors are in the label's unit.
    """

    loss: Number = None
    """Cross entropy, nats per example; for numbers, the mean squared error of the predictions in
    units of the squared range."""
    auc: Annotated[Number, IF_ANY] = None
    """With several classes, the mean of each class's against the rest; NaN of rows of one class."""
    calibration_error: Annotated[Number, IF_ANY] = None
    """With several classes, the mean of each class's error against the rest."""
    average_precision: Annotated[Number, IF_ANY] = None
    """With several classes, the mean of each class's against the rest; NaN without a positive."""
    accuracy: Annotated[Number, IF_ANY] = None
    """Share of rows whose class has the highest probability; only of several classes."""
    auc_by_class: Annotated[Object[Number], IF_ANY] = field(default_factory=dict)
    """Class -> AUC against the rest; only of several classes."""
    rmse: Annotated[Number, IF_ANY] = None
    mae: Annotated[Number, IF_ANY] = None
    r2: Annotated[Number, IF_ANY] = None
    """1 less the errors' share of the variance; NaN for equal labels."""
    constant_rmse: Annotated[Number, IF_ANY] = None  # of predicting the training labels' mean
    constant_mae: Annotated[Number, IF_ANY] = None  # the MAE of the same prediction

    @property
    def main(self) -> str:
        """The name of the main figure, in which higher or lower is better."""
        return "AUC" if self.rmse is None else "RMSE"

    @property
    def score(self) -> float | None:
        """How good the predictions are: the AUC, or minus the RMSE as a share of the range."""
        if self.rmse is None:
            return self.auc
        return None if self.loss is None else -math.sqrt(self.loss)

    @property
    def agreement(self) -> float:
        """How well predictions agree with labels: the AUC, or the R2 of numbers."""
        figure = self.auc if self.rmse is None else self.r2
        return math.nan if figure is None else figure

    @property
    def share(self) -> float | None:
        """The way from chance, 0, to predictions that are all right, 1: 2 AUC - 1 for classes.

        For numbers, the share of the constant prediction's squared error that is gone.
        """
        if self.rmse is None:
            agreement = self.agreement
            return None if math.isnan(agreement) else 2 * agreement - 1
        return 1 - (self.rmse / self.constant_rmse) ** 2 if self.constant_rmse else None

    @property
    def share_in_words(self) -> tuple[str, str]:
        """The share as a figure for laypeople, and its unit."""
        share = math.nan if self.share is None else self.share
        if self.rmse is None:
            return f"{50 + 50 * share:.0f}", "of 100 pairs in the right order (guessing: 50)"
        return f"{share:.0%}", "of the variance"

    @property
    def in_short(self) -> str:
        """The main figure with its name, for a log line."""
        # The same calls for any labels: what a process does must not depend on them.
        words, agreement = self.in_words(4), self.agreement
        if self.rmse is not None:
            return f"RMSE {words}, R2 {agreement:.4f}"
        return "AUC of rows of one class" if words == "–" else f"AUC {words}"

    def in_words(self, digits: int) -> str:
        """Return the main figure, an AUC with this number of digits behind the point."""
        if self.rmse is not None:
            return f"{self.rmse:.4g}"
        agreement = self.agreement
        return "–" if math.isnan(agreement) else f"{agreement:.{digits}f}"

    @property
    def better_in_words(self) -> str:
        """What the main figure of better predictions is, such as ``> 0.7123``."""
        return f"{'>' if self.rmse is None else '<'} {self.in_words(4)}"


_NONE = Spread()
_ROUNDING = 1e-9  # difference of two AUCs below which rounding may have made them differ


@dataclass(frozen=True)
class LeakBounds(Form):
    """The bounds of a leak ledger on what the answers so far may have revealed."""

    sum_kl: Annotated[Spread, Flat("sum_kl_")] = _NONE
    estimate: Annotated[Spread, Flat("estimate_")] = _NONE
    """AUC of the best score if the classes are Gaussian."""
    anybody: Annotated[Spread, Flat("anybody_")] = _NONE
    """AUC that no score of anybody exceeds, the guarantee; 1 for an example without a bound."""
    honest_but_curious: Annotated[Spread, Flat("honest_but_curious_")] = _NONE
    """The same for a peer that sends its model's activations."""
    knows_class_means_only: Annotated[Spread, Flat("knows_class_means_only_")] = _NONE
    """The same for a peer that compares gradients with the class means of a batch."""
    epsilon: Annotated[Number, IF_ANY] = None  # label-DP of all answers; None if some lack it
    mu_anybody: Annotated[Number, IF_ANY] = None
    """Parameter of the Gaussian mechanism that all answers are together, of the most exposed
    example; None if they are not one, or not for these peers."""
    mu_honest_but_curious: Annotated[Number, IF_ANY] = None
    mu_knows_class_means_only: Annotated[Number, IF_ANY] = None

    def against(self, peers: Adversary) -> Spread:
        """Return the AUC that no score of an adversary class exceeds."""
        return self.by_peers()[peers]

    def by_peers(self) -> dict[Adversary, Spread]:
        bounds = (self.anybody, self.honest_but_curious, self.knows_class_means_only)
        return dict(zip(Adversary, bounds, strict=True))

    def mu_by_peers(self) -> dict[Adversary, float | None]:
        mus = (self.mu_anybody, self.mu_honest_but_curious, self.mu_knows_class_means_only)
        return dict(zip(Adversary, mus, strict=True))

    @property
    def guarantee(self) -> Spread:
        """AUC that no score of anybody exceeds."""
        return self.anybody

    def in_words(self) -> str:
        """Return the bounds of the most exposed example, for the log."""
        aucs = {peers: spread.max for peers, spread in self.by_peers().items()}
        parts = (f"{who} {'none' if auc >= 1 else auc_at_most(auc)}" for who, auc in aucs.items())
        return "bounds on the leak AUC: " + ", ".join(parts)

    def or_more(self, other: "LeakBounds | None") -> "LeakBounds":
        """Return the larger bounds, where one set of answers contains the other."""
        # Bit for bit where possible: AUCs of nearly equal divergences may differ in either way.
        if other is None or self._is_at_least(other):
            return self
        larger: dict[str, Any] = {}
        for name in (one.name for one in fields(self)):
            one, another = getattr(self, name), getattr(other, name)
            if isinstance(one, Spread):
                larger[name] = Spread(*map(max, one, another))
            else:
                larger[name] = None if None in (one, another) else max(one, another)
        return LeakBounds(**larger)

    def _is_at_least(self, other: "LeakBounds") -> bool:
        return all(map(ge, self.sum_kl, other.sum_kl)) and all(
            mine >= theirs - _ROUNDING
            for peers in Adversary
            for mine, theirs in zip(self.against(peers), other.against(peers), strict=True)
        )


_DETAILS = "epsilon_lower_bound_details"
STANDARD_ERRORS = 4.0
"""Standard errors on either side of a figure beyond features in its interval (99.99 %). Pictures,
tables, verdicts and alarms share one rule: a figure is above something if its whole interval is. A
run compares many attacks, each of which may be inverted: with three standard errors, one run in
thirty without a leak showed one (`benchmarks/false_alarms.py`)."""
_CLEARLY_P = 0.001
"""Guesses contradict a stated epsilon if their p-value is below this: at 0.05, one run in twenty
whose labels are randomised with that epsilon does. Its part for delta keeps it from becoming much
smaller."""
BEYOND_TABLES = ("adjusted_leak", "leak_advantage", _DETAILS)


class AdjustedFigures(NamedTuple):
    value: Known
    low: Known  # lower end of its interval; below 1/2 where the leak may be chance
    high: Known


class AdvantageFigures(NamedTuple):
    value: Known
    low: Known
    high: Known
    prior: Known  # leak AUC of the attacker's own model, fitted to as many labels

    @property
    def in_words(self) -> str:
        return f"{self.value:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


class EpsilonBound(NamedTuple):
    epsilon: Known  # 0 if they exclude none
    attack: str  # whose guesses were tested
    guesses: KnownCount
    correct: KnownCount
    pairs: KnownCount  # pairs of a true and another label among which the attack chose its guesses
    confidence: Known
    delta: Known
    p_value: Known  # of so many correct guesses by chance alone, at epsilon 0
    stated: Number = None  # the least that the ledger states at this delta, if any
    stated_for: Text = None
    p_value_of_stated: Number = None  # in a run that is as private as stated

    @property
    def passes_stated(self) -> bool:
        """True if the attacks exclude the ledger's epsilon, and not by chance."""
        return self.p_value_of_stated is not None and self.p_value_of_stated < _CLEARLY_P


@dataclass(frozen=True)
class BeyondFigures(Form):
    adjusted: Annotated[Table[AdjustedFigures], Key("adjusted_leak")] = field(default_factory=dict)
    advantage: Annotated[Table[AdvantageFigures], Key("leak_advantage")] = field(
        default_factory=dict
    )
    epsilon: Annotated[Maybe[EpsilonBound], Key(_DETAILS), IF_ANY] = None
    """None if too few rows were offered another label; the file then has a bound of 0."""
    rows: Annotated[Count, Key("adjusted_rows"), IF_ANY] = None  # of the strongest attack
    feature_auc: Annotated[Number, IF_ANY] = None  # what features reveal without any attack
    feature_auc_of_functions: Annotated[Number, IF_ANY] = None  # by one kind of model alone
    feature_auc_of_trees: Annotated[Number, IF_ANY] = None

    def form(self) -> dict[str, Any]:
        bound = 0.0 if self.epsilon is None else self.epsilon.epsilon
        return super().form() | {"epsilon_lower_bound": bound}


_OF_NUMBERS = "leak_of_numbers"
LEAK_TABLES = (
    "leak",
    "leak_worst_epoch",
    "leak_run_level",
    "leak_classes",
    "leak_run_level_classes",
    *BEYOND_TABLES,
    _OF_NUMBERS,
)
"""Entries of a summary that hold figures by layer and attack, or by attack."""


class BatchFigures(NamedTuple):
    q95: Known
    mean: Known
    last_epoch: Known  # mean over the batches of the last epoch observed
    random_q95: Known  # the 95 % quantile of random scores on the same batches


class RunFigures(NamedTuple):
    auc: Known
    low: Known  # lower end of its 95 % interval; below 1/2 where the leak may be chance
    high: Known
    examples: Count = None  # scored, and of a label that the attack did not know
    tpr_at_per_mille: Number = None  # where 0.1 % of negatives are accused
    tpr_at_percent: Number = None  # the same for 1 %
    precision_at_100: Number = None  # share of positives among the 100 highest scores
    over_features: Maybe[AdvantageFigures] = None
    """Of model completion at the passive party: its AUC minus the AUC (``prior``) of a head on this
    party's features that knows the same labels."""


@dataclass(frozen=True)
class ClassFigures(Form):
    worst_pair: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()  # separated best
    worst_pair_auc: Annotated[Number, IF_ANY] = None  # only on single batches
    worst_pair_random: Annotated[Number, IF_ANY] = None
    """The leak AUC of random scores on the same pair; only on single batches."""
    classes: Object[Number] = field(default_factory=dict)  # class -> leak AUC against the rest
    random: Annotated[Object[Number], IF_ANY] = field(default_factory=dict)
    """The same for random scores; only on single batches."""

    def worst_class(self) -> tuple[str, float] | None:
        """Return the class separated best from the rest and its leak AUC, if any was measured."""
        measured = [
            (name, auc)
            for name, auc in self.classes.items()
            if auc is not None and not math.isnan(auc)
        ]
        return max(measured, key=itemgetter(1), default=None)


_SMALL_SHARE = 0.05


class BatchCounts(NamedTuple):
    observed: Count = None
    skipped_one_class: Count = None
    left_out: Count = None

    @property
    def much_left_out(self) -> str:
        """Note to show beside the figures if more than 5 % were left out; or empty."""
        counts = [0 if count is None else count for count in self]
        share = counts[-1] / max(sum(counts), 1)
        if share <= _SMALL_SHARE:
            return ""
        return (
            f"The monitor left {share:.0%} of the batches out (leak_monitor.max_cpu_share), "
            "so that attacks over the whole run are understated."
        )


class NumberBeyond(NamedTuple):
    """One attack on number labels beyond features: shares of the variance that features leave."""

    r2: Known
    low: Known  # lower end of its interval; 0 where it may be chance
    high: Known

    @property
    def interval(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"

    @property
    def in_words(self) -> str:
        return f"{self.r2:.0%} ({self.interval})"


class NumberLeak(NamedTuple):
    r2: Known  # R2 with the labels; of an attack on single batches, its mean over them
    q95: Number = None
    last_epoch: Number = None  # mean over the batches of the last epoch
    random: Number = None  # the R2 that random scores have on average
    examples: Count = None  # of an attack on the whole run: the examples that were looked at
    beyond: Maybe[NumberBeyond] = None  # beyond features; None if it was not measured


@dataclass(frozen=True, kw_only=True)
class LeakFigures(Form):
    """The measurements of the attacks; with more than two classes, of the pair separated best."""

    beyond: Annotated[BeyondFigures | None, Flat()] = None  # beyond features; None: not measured
    batches: Annotated[ByAttack[BatchFigures], Key("leak")] = field(default_factory=dict)
    worst_epoch: Annotated[ByAttack[Known], Key("leak_worst_epoch")] = field(default_factory=dict)
    """Largest mean over an epoch's batches."""
    run_level: Annotated[ByAttack[RunFigures], Key("leak_run_level")] = field(default_factory=dict)
    by_class: Annotated[ByAttack[ClassFigures], Key("leak_classes"), IF_ANY] = field(
        default_factory=dict
    )
    """Of single batches; empty for two classes."""
    run_level_by_class: Annotated[ByAttack[ClassFigures], Key("leak_run_level_classes"), IF_ANY] = (
        field(default_factory=dict)
    )
    counts: Annotated[BatchCounts, Key("leak_batches")] = field(default_factory=BatchCounts)
    of_numbers: Annotated[Table[NumberLeak], Key(_OF_NUMBERS), IF_ANY] = field(default_factory=dict)
    """Attack -> its figures, where labels are numbers; no other figure is about these."""

    @property
    def strongest_of_numbers(self) -> NumberBeyond | None:
        """Of the attack on number labels that explains most of the variance that features leave."""
        beyond = [one.beyond for one in self.of_numbers.values() if one.beyond is not None]
        return max(beyond, key=itemgetter(0), default=None)

    def form(self) -> dict[str, Any]:
        return {_OF_NUMBERS: to_form(self.of_numbers)} if self.of_numbers else super().form()

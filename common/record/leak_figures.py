"""The part of a run's summary about the leak: its types, and their form in the file."""

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from splitveil.common.record.beyond_figures import BEYOND_TABLES, BeyondFigures
from splitveil.common.record.values import (
    IF_ANY,
    ByAttack,
    Count,
    Flat,
    Form,
    Key,
    Known,
    Maybe,
    Number,
    Object,
    Table,
    as_list,
    to_form,
)

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
    """One attack on single batches of one layer, over the run."""

    q95: Number = None
    mean: Number = None
    last_epoch: Number = None
    """Mean over the batches of the last epoch observed."""
    random_q95: Number = None
    """The 95 % quantile of random scores on the same batches."""


class RunFigures(NamedTuple):
    """One attack that accumulates over the run, on one layer."""

    auc: Known
    low: Number = None
    high: Number = None
    examples: Count = None
    """Number of examples that were scored and whose label the attack did not know."""
    tpr_at_per_mille: Number = None
    """Share of the positives found while at most 0.1 % of the negatives are accused."""
    tpr_at_percent: Number = None
    """The same for 1 %."""
    precision_at_100: Number = None
    """Share of positives among the 100 highest scores."""


@dataclass(frozen=True)
class ClassFigures(Form):
    """One attack on one layer class by class, on single batches or over the run."""

    worst_pair: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    """The two classes told apart best."""
    worst_pair_auc: Annotated[Number, IF_ANY] = None
    """Only on single batches."""
    worst_pair_random: Annotated[Number, IF_ANY] = None
    """The leak AUC of random scores on the same pair; only on single batches."""
    classes: Object[Number] = field(default_factory=dict)
    """Class -> leak AUC against the rest."""
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


class BatchCounts(NamedTuple):
    observed: Count = None
    skipped_one_class: Count = None
    left_out: Count = None


class NumberBeyond(NamedTuple):
    """One attack on labels that are numbers beyond features: shares of what features leave."""

    r2: Known
    low: Known
    """Lower end of its 95 % interval; 0 where it may be chance."""
    high: Known

    @property
    def is_clear(self) -> bool:
        """Whether the correlation behind it is above 0 by three standard errors."""
        size = math.sqrt(self.r2)
        return size - 3.0 / 1.96 * (size - math.sqrt(self.low)) > 0


class NumberLeak(NamedTuple):
    """One attack on labels that are numbers, at the cut layer: shares of their variance."""

    r2: Known
    """R2 with the labels; of an attack on single batches, its mean over them."""
    q95: Number = None
    last_epoch: Number = None
    """Mean over the batches of the last epoch."""
    random: Number = None
    """The R2 that random scores have on average."""
    examples: Count = None
    """Of an attack on the whole run: the examples that were looked at."""
    beyond: Maybe[NumberBeyond] = None
    """What it explains beyond features; None if it was not measured."""


@dataclass(frozen=True)
class LeakByClass(Form):
    batches: Annotated[ByAttack[ClassFigures], Key("leak_classes")] = field(default_factory=dict)
    run_level: Annotated[ByAttack[ClassFigures], Key("leak_run_level_classes")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class LeakFigures(Form):
    """The measurements of the attacks; with more than two classes, of the pair told apart best."""

    beyond: Annotated[BeyondFigures | None, Flat()] = None
    """What the attacks tell beyond features; None if it was not measured."""
    batches: Annotated[ByAttack[BatchFigures], Key("leak")] = field(default_factory=dict)
    worst_epoch: Annotated[ByAttack[Known], Key("leak_worst_epoch")] = field(default_factory=dict)
    """Mean over the batches of the epoch in which it is largest."""
    run_level: Annotated[ByAttack[RunFigures], Key("leak_run_level")] = field(default_factory=dict)
    by_class: Annotated[LeakByClass | None, Flat()] = None
    """None with two classes."""
    counts: Annotated[BatchCounts, Key("leak_batches")] = field(default_factory=BatchCounts)
    of_numbers: Annotated[Table[NumberLeak], Key(_OF_NUMBERS), IF_ANY] = field(default_factory=dict)
    """Attack -> its figures, where labels are numbers; no other figure is about these."""

    def form(self) -> dict[str, Any]:
        return {_OF_NUMBERS: to_form(self.of_numbers)} if self.of_numbers else super().form()

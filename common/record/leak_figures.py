"""The part of a run's summary about the leak: its types, and their form in the file."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from splitveil.common.record.beyond_figures import (
    BEYOND_TABLES,
    BeyondFigures,
    beyond_from_json,
    beyond_to_json,
)
from splitveil.common.record.values import (
    ByAttack,
    ValueT,
    as_count,
    as_list,
    as_mapping,
    as_number,
    as_numbers,
    by_attack,
)

_BY_CLASS = ("leak_classes", "leak_run_level_classes")
_COUNTS = "leak_batches"
_OF_NUMBERS = "leak_of_numbers"
_BEYOND = "beyond"
LEAK_TABLES = (
    "leak",
    "leak_worst_epoch",
    "leak_run_level",
    *_BY_CLASS,
    *BEYOND_TABLES,
    _OF_NUMBERS,
)
"""Entries of a summary that hold figures by layer and attack, or by attack."""


class BatchFigures(NamedTuple):
    """One attack on single batches of one layer, over the run."""

    q95: float | None
    """The 95 % quantile over the batches."""
    mean: float | None
    last_epoch: float | None
    """Mean over the batches of the last epoch observed."""
    random_q95: float | None
    """The 95 % quantile of random scores on the same batches."""


class RunFigures(NamedTuple):
    """One attack that accumulates over the run, on one layer."""

    auc: float
    """The leak AUC."""
    low: float | None = None
    """Lower end of its 95 % interval."""
    high: float | None = None
    examples: int | None = None
    """Number of examples that were scored and whose label the attack did not know."""
    tpr_at_per_mille: float | None = None
    """Share of the positives found while at most 0.1 % of the negatives are accused."""
    tpr_at_percent: float | None = None
    """The same for 1 %."""
    precision_at_100: float | None = None
    """Share of positives among the 100 highest scores."""


class ClassFigures(NamedTuple):
    """One attack on one layer class by class, on single batches or over the run."""

    worst_pair: tuple[str, ...] = ()
    """The two classes told apart best."""
    worst_pair_auc: float | None = None
    """Only on single batches."""
    worst_pair_random: float | None = None
    """The leak AUC of random scores on the same pair; only on single batches."""
    classes: Mapping[str, float | None] = MappingProxyType({})
    """Class -> leak AUC against the rest."""
    random: Mapping[str, float | None] = MappingProxyType({})
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
    """The numbers of batches that the attacks measured and skipped."""

    observed: int | None = None
    skipped_one_class: int | None = None
    left_out: int | None = None


class NumberBeyond(NamedTuple):
    """One attack on labels that are numbers beyond features: shares of what features leave."""

    r2: float
    low: float
    """Lower end of its 95 % interval; 0 where it may be chance."""
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the correlation behind it is above 0 by three standard errors."""
        size = math.sqrt(self.r2)
        return size - 3.0 / 1.96 * (size - math.sqrt(self.low)) > 0


class NumberLeak(NamedTuple):
    """One attack on labels that are numbers, at the cut layer: shares of their variance."""

    r2: float
    """R2 with the labels; of an attack on single batches, its mean over them."""
    q95: float | None = None
    """The 95 % quantile over the batches."""
    last_epoch: float | None = None
    """Mean over the batches of the last epoch."""
    random: float | None = None
    """The R2 that random scores have on average."""
    examples: int | None = None
    """Of an attack on the whole run: the examples that were looked at."""
    beyond: NumberBeyond | None = None
    """What it explains beyond features; None if it was not measured."""


class LeakByClass(NamedTuple):
    """The leak of a run with more than two classes, class by class."""

    batches: ByAttack[ClassFigures]
    run_level: ByAttack[ClassFigures]


@dataclass(frozen=True, kw_only=True)
class LeakFigures:
    """The measurements of the attacks; with more than two classes, of the pair told apart best."""

    batches: ByAttack[BatchFigures] = field(default_factory=dict)
    worst_epoch: ByAttack[float] = field(default_factory=dict)
    """Mean over the batches of the epoch in which it is largest."""
    run_level: ByAttack[RunFigures] = field(default_factory=dict)
    by_class: LeakByClass | None = None
    """None with two classes."""
    beyond: BeyondFigures | None = None
    """What the attacks tell beyond features; None if it was not measured."""
    counts: BatchCounts = field(default_factory=BatchCounts)
    of_numbers: Mapping[str, NumberLeak] = field(default_factory=dict)
    """Attack -> its figures, where labels are numbers; no other figure is about these."""


def leak_to_json(leak: LeakFigures) -> dict[str, Any]:
    """Return the form of the figures in a summary's file."""
    if leak.of_numbers:
        return {_OF_NUMBERS: {name: _write_number(one) for name, one in leak.of_numbers.items()}}
    written: dict[str, Any] = {
        "leak": _each(leak.batches, BatchFigures._asdict),
        "leak_worst_epoch": leak.worst_epoch,
        "leak_run_level": _each(leak.run_level, RunFigures._asdict),
    }
    if leak.by_class is not None:
        written |= {
            "leak_classes": _each(leak.by_class.batches, ClassFigures._asdict),
            "leak_run_level_classes": _each(leak.by_class.run_level, _write_run_class),
        }
    beyond = {} if leak.beyond is None else beyond_to_json(leak.beyond)
    return beyond | written | {_COUNTS: leak.counts._asdict()}


def _each(
    figures: ByAttack[ValueT], write: Callable[[ValueT], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    return {
        layer: {attack: write(found) for attack, found in attacks.items()}
        for layer, attacks in figures.items()
    }


def _write_number(found: NumberLeak) -> dict[str, Any]:
    beyond = None if found.beyond is None else found.beyond._asdict()
    return found._asdict() | {_BEYOND: beyond}


def _write_run_class(found: ClassFigures) -> dict[str, Any]:
    return {"worst_pair": found.worst_pair, "classes": found.classes}


def leak_from_json(values: Mapping[str, Any]) -> LeakFigures | None:
    """Return the figures that a summary's JSON object holds; None if it lacks such entries."""
    beyond = beyond_from_json(values)
    if beyond is None and not values.keys() & {*LEAK_TABLES, _COUNTS}:
        return None
    by_class = None
    if values.keys() & set(_BY_CLASS):
        by_class = LeakByClass(*(by_attack(values.get(name), _read_class) for name in _BY_CLASS))
    counts = as_mapping(values.get(_COUNTS))
    return LeakFigures(
        batches=by_attack(values.get("leak"), _read_batches),
        worst_epoch=by_attack(values.get("leak_worst_epoch"), as_number),
        run_level=by_attack(values.get("leak_run_level"), _read_run),
        by_class=by_class,
        beyond=beyond,
        counts=BatchCounts(*(as_count(counts.get(name)) for name in BatchCounts._fields)),
        of_numbers=_read_numbers(values.get(_OF_NUMBERS)),
    )


def _read_numbers(value: object) -> dict[str, NumberLeak]:
    found = {}
    for attack, figures in as_mapping(value).items():
        written = as_mapping(figures)
        r2 = as_number(written.get("r2"))
        if r2 is not None:
            q95, last, random = (as_number(written.get(n)) for n in ("q95", "last_epoch", "random"))
            examples = as_count(written.get("examples"))
            beyond = _read_number_beyond(written.get(_BEYOND))
            found[str(attack)] = NumberLeak(r2, q95, last, random, examples, beyond)
    return found


def _read_number_beyond(value: object) -> NumberBeyond | None:
    written = as_mapping(value)
    r2, low, high = (as_number(written.get(name)) for name in NumberBeyond._fields)
    if r2 is None or low is None or high is None:
        return None
    return NumberBeyond(r2, low, high)


def _read_batches(value: object) -> BatchFigures | None:
    if not isinstance(value, dict):
        return None
    return BatchFigures(*(as_number(value.get(name)) for name in BatchFigures._fields))


def _read_run(value: object) -> RunFigures | None:
    """Read one attack over the run; an older file only has its leak AUC."""
    values = as_mapping(value) or {"auc": value}
    auc = as_number(values.get("auc"))
    low, high = (as_number(values.get(name)) for name in ("low", "high"))
    examples = as_count(values.get("examples"))
    rest = (values.get(name) for name in ("low", "high", "examples"))
    unread = [
        found is None and written is not None
        for found, written in zip((low, high, examples), rest, strict=True)
    ]
    if auc is None or any(unread):
        return None
    points = (as_number(values.get(name)) for name in RunFigures._fields[4:])
    return RunFigures(auc, low, high, examples, *points)


def _read_class(value: object) -> ClassFigures | None:
    if not isinstance(value, dict):
        return None
    return ClassFigures(
        tuple(map(str, as_list(value.get("worst_pair")))),
        as_number(value.get("worst_pair_auc")),
        as_number(value.get("worst_pair_random")),
        as_numbers(value.get("classes")),
        as_numbers(value.get("random")),
    )

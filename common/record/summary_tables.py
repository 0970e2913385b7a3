"""Prints the tables at the end of a run."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console

from splitveil.common.record.assessment import assess
from splitveil.common.record.figures import (
    BatchFigures,
    BeyondFigures,
    LedgerFigures,
    NumberLeak,
    RunFigures,
    SpreadFigures,
)
from splitveil.common.record.summary import Summary, plain_figures
from splitveil.common.record.values import ByAttack
from splitveil.common.text.log_lines import log_fields, writes_json
from splitveil.common.text.output import printing_console
from splitveil.common.text.upper_bounds import at_most, auc_at_most
from splitveil.common.text.visible_text import PlainTable
from splitveil.common.text.wording import in_short, in_words, label

logger = logging.getLogger(__name__)


def print_summary(party: str, summary: Summary, *, console: Console | None = None) -> None:
    """Print a run's figures to standard output, or its numbers to a log of JSON objects.

    Without a console it prints nothing to a quiet log, and all details to a verbose one.
    """
    if console is None and writes_json():
        logger.info("summary", extra=log_fields(**plain_figures(summary)))
        return
    if console is None and not logger.isEnabledFor(logging.INFO):
        return
    details = console is not None or logger.isEnabledFor(logging.DEBUG)
    console = console or printing_console()
    table = PlainTable(party, ("figure", "value"), lead=1, show_header=False)
    for name, value in _main_figures(summary):
        table.add_row(name, value)
    console.print(table)
    if details:
        _print_details(party, summary, console)
    if summary.active is None:
        for found in _adversary_tables(summary):
            console.print(found)


def _main_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    active, model = summary.of_active, summary.of_active.model
    figures = {
        **summary.counts._asdict(),
        "test_auc": model.test_auc,
        "test_average_precision": model.test_average_precision,
        "test_calibration_error": model.test_calibration_error,
        "test_accuracy": model.test_accuracy,
        "test_auc_refit": model.test_auc_refit,
        "test_auc_alone": model.test_auc_alone,
        "test_RMSE": None if model.test_number is None else model.test_number.rmse,
    }
    for name, number in figures.items():
        if number is not None:
            yield label(name), in_words(number)
    if summary.active is not None:
        assessment = assess(summary)
        if not summary.of_leak.of_numbers:
            figure = assessment.figure_in_words(assessment.strongest)
            yield "strongest attack, feature-adjusted leak AUC", figure
        yield "bound for the whole run", assessment.bound_in_words
    if active.leak_alarms:
        yield "leak alarms", str(active.leak_alarms)
    if active.refused_messages:
        yield "refused messages", in_words(active.refused_messages)


def _adversary_tables(summary: Summary) -> Iterator[PlainTable]:
    """Yield what a passive party's attacks have measured, and what they were given for it."""
    if summary.leak is not None:
        leak = summary.leak
        layers: dict[str, dict[str, float | None]] = {}
        for layer, batches in leak.batches.items():
            layers[layer] = {attack: found.mean for attack, found in batches.items()}
        for layer, of_run in leak.run_level.items():
            layers.setdefault(layer, {}).update({a: found.auc for a, found in of_run.items()})
        pair = "" if leak.by_class is None else ", worst pair of classes"
        yield _adversary_table(layers, f"raw leak AUC{pair}; given: labels for evaluation")
    if summary.audited is not None:
        yield _adversary_table(summary.audited.leak_aucs, "leak AUC, audited by the active party")


def _adversary_table(layers: Mapping[str, Mapping[str, float | None]], measured: str) -> PlainTable:
    table = PlainTable(f"adversary: {measured}", ("attack",), tuple(layers))
    for attack in dict.fromkeys(attack for found in layers.values() for attack in found):
        of_layers = (found.get(attack) for found in layers.values())
        table.add_row(attack, *("-" if auc is None else _auc(auc) for auc in of_layers))
    return table


def _print_details(party: str, summary: Summary, console: Console) -> None:
    table = PlainTable(f"{party}: summary", ("figure", "value"), lead=1, show_header=False)
    for name, value in plain_figures(summary).items():
        table.add_row(label(name), in_words(value))
    console.print(table)
    if summary.of_active.ledger is not None:
        console.print(ledger_table(summary.of_active.ledger, f"{party}: leak ledger"))
    leak = summary.of_leak
    if leak.beyond is not None and leak.beyond.adjusted:
        console.print(beyond_table(leak.beyond, f"{party}: feature-adjusted leak AUC"))
    pair = "" if leak.by_class is None else ", worst pair of classes"
    if summary.active is not None and (leak.batches or leak.run_level):
        console.print(assess(summary).raw_note, soft_wrap=True, markup=False)
    if leak.of_numbers:
        title = f"{party}: share of the labels' variance that gradients explain (R2)"
        console.print(number_table(leak.of_numbers, title))
    if leak.batches:
        console.print(leak_table(leak.batches, f"{party}: raw leak AUC{pair}"))
    if leak.run_level:
        title = f"{party}: raw leak AUC of the whole run{pair}"
        console.print(run_level_table(leak.run_level, title))


def beyond_table(beyond: BeyondFigures, title: str) -> PlainTable:
    numbers = ("adjusted", "95 % interval", "advantage", "95 % interval")
    table = PlainTable(title, ("attack",), numbers)
    for attack, found in beyond.adjusted.items():
        gain = beyond.advantage.get(attack)
        table.add_row(
            attack,
            _auc(found.value),
            f"{_auc(found.low)} .. {_auc(found.high)}",
            "-" if gain is None else f"{gain.value:+.3f}",
            "-" if gain is None else f"{gain.low:+.3f} .. {gain.high:+.3f}",
        )
    return table


def number_table(leak: Mapping[str, NumberLeak], title: str) -> PlainTable:
    numbers = ("R2", "beyond features", "95 % of batches", "last epoch", "random scores")
    table = PlainTable(title, ("attack",), numbers)
    for attack, found in leak.items():
        beyond = None if found.beyond is None else found.beyond.r2
        others = (beyond, found.q95, found.last_epoch, found.random)
        cells = ("-" if value is None else _auc(value) for value in others)
        table.add_row(attack, _auc(found.r2), *cells)
    return table


def leak_table(leak: ByAttack[BatchFigures], title: str) -> PlainTable:
    numbers = ("95 % of batches", "mean", "last epoch", "random scores")
    table = PlainTable(title, ("layer", "attack"), numbers)
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            table.add_row(layer, attack, *map(_auc, found))
    return table


def ledger_table(ledger: LedgerFigures, title: str) -> PlainTable:
    table = PlainTable(title, ("over all answers",), ("largest", "95 % of examples", "mean"))
    rows: tuple[tuple[SpreadFigures, str, Callable[[float], str]], ...] = (
        (ledger.sum_kl, "sum_kl", at_most),
        (ledger.estimate, "leak AUC, estimated", in_short),
        *((found, f"bound: {peers}", _bound) for peers, found in ledger.by_peers().items()),
    )
    for spread, meaning, written in rows:
        table.add_row(meaning, *("inf" if n is None else written(n) for n in spread))
    if ledger.epsilon is not None:
        table.add_row("epsilon", at_most(ledger.epsilon))
    return table


def _bound(auc: float) -> str:
    return auc_at_most(auc) if auc < 1 else "none"


def run_level_table(leak: ByAttack[RunFigures], title: str) -> PlainTable:
    numbers = ("leak AUC", "95 % interval", "examples")
    table = PlainTable(title, ("layer", "attack"), numbers)
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            interval = f"{_auc(found.low)} .. {_auc(found.high)}"
            examples = "-" if found.examples is None else f"{found.examples:,}"
            table.add_row(layer, attack, _auc(found.auc), interval, examples)
    return table


def _auc(value: float | None) -> str:
    return f"{math.nan if value is None else value:.3f}"

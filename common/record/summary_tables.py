"""Prints the tables at the end of a run."""

import logging
import math
from collections.abc import Callable, Mapping

from rich.console import Console

from splitveil.common.record.figures import (
    BatchFigures,
    BeyondFigures,
    ClassFigures,
    LedgerFigures,
    NumberLeak,
    RunFigures,
    SpreadFigures,
)
from splitveil.common.record.progress import progress_pipe
from splitveil.common.record.summary import Summary, plain_figures
from splitveil.common.record.values import ByAttack
from splitveil.common.text.log_lines import log_fields, writes_json
from splitveil.common.text.output import printing_console
from splitveil.common.text.upper_bounds import at_most, auc_at_most
from splitveil.common.text.visible_text import PlainTable
from splitveil.common.text.wording import in_short, in_words, label

logger = logging.getLogger(__name__)


def print_summary(party: str, summary: Summary, *, console: Console | None = None) -> None:
    """Print a run's summary to standard output, or its numbers to a log of JSON objects."""
    if console is None and writes_json():
        logger.info("summary", extra=log_fields(**plain_figures(summary)))
        return
    if console is None and progress_pipe() is not None:
        return  # a launcher shows one table of all parties
    console = console or printing_console()
    table = PlainTable(f"{party}: summary", ("figure", "value"), lead=1, show_header=False)
    for name, value in plain_figures(summary).items():
        table.add_row(label(name), in_words(value))
    console.print(table)
    if summary.of_active.ledger is not None:
        console.print(ledger_table(summary.of_active.ledger, f"{party}: leak ledger"))
    leak = summary.of_leak
    if leak.beyond is not None and leak.beyond.adjusted:
        title = f"{party}: feature-adjusted leak AUC"
        console.print(beyond_table(leak.beyond, title))
    pair = "" if leak.by_class is None else ", worst pair of classes"
    if leak.of_numbers:
        title = f"{party}: share of the labels' variance that gradients explain (R2)"
        console.print(number_table(leak.of_numbers, title))
    if leak.batches:
        console.print(leak_table(leak.batches, f"{party}: leak AUC{pair}"))
    if leak.by_class is not None:
        title = f"{party}: leak AUC class by class, mean over batches (random scores)"
        console.print(class_table(leak.by_class.batches, title))
    if leak.run_level:
        title = f"{party}: leak AUC of the whole run{pair}"
        console.print(run_level_table(leak.run_level, title))


def beyond_table(beyond: BeyondFigures, title: str = "Feature-adjusted leak AUC") -> PlainTable:
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


def leak_table(leak: ByAttack[BatchFigures], title: str = "Leak AUC") -> PlainTable:
    numbers = ("95 % of batches", "mean", "last epoch", "random scores")
    table = PlainTable(title, ("layer", "attack"), numbers)
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            table.add_row(layer, attack, *map(_auc, found))
    return table


def class_table(leak: ByAttack[ClassFigures], title: str) -> PlainTable:
    names = ("layer", "attack", "pair separated best", "class separated best from the rest")
    table = PlainTable(title, names, lead=2)
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            pair = f"{' and '.join(found.worst_pair)}: {_auc(found.worst_pair_auc)}"
            worst, leak_auc = found.worst_class() or ("-", None)
            one = f"{worst}: {_auc(leak_auc)}"
            table.add_row(
                layer,
                attack,
                f"{pair} ({_auc(found.worst_pair_random)})",
                f"{one} ({_auc(found.random.get(worst))})",
            )
    return table


def ledger_table(ledger: LedgerFigures, title: str = "Leak ledger") -> PlainTable:
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


def run_level_table(
    leak: ByAttack[RunFigures], title: str = "Leak AUC of the whole run"
) -> PlainTable:
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

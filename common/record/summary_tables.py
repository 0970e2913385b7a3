"""The tables that a run prints at its end."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from splitveil.common.text.output import printing_console
from splitveil.common.text.upper_bounds import at_most, auc_at_most
from splitveil.common.text.visible_text import cell
from splitveil.common.text.wording import in_short, in_words, label

_TABLES_OF_THEIR_OWN = {
    "leak",
    "leak_classes",
    "leak_run_level_classes",
    "ledger",
    "leak_worst_epoch",
    "leak_run_level",
    "audit",
    "transcript",
}


def print_summary(
    party: str, summary: Mapping[str, Any], *, console: Console | None = None
) -> None:
    """Print a run's summary to the standard output stream: its numbers, then its leak table.

    Args:
        party: stands above the table.
        summary: as in ``summary.json``; ``leak`` and ``ledger`` may be absent.
        console: prints elsewhere.
    """
    console = console or printing_console()
    table = Table(title=f"{party}: summary", title_justify="left", show_header=False)
    for name, value in summary.items():
        if name not in _TABLES_OF_THEIR_OWN:
            table.add_row(cell(label(name)), cell(in_words(value)))
    console.print(table)
    if summary.get("ledger"):
        console.print(ledger_table(summary["ledger"], f"{party}: leak ledger"))
    pair = ", worst pair of classes" if summary.get("leak_classes") else ""
    if summary.get("leak"):
        console.print(leak_table(summary["leak"], f"{party}: leak AUC{pair}"))
    if summary.get("leak_classes"):
        title = f"{party}: leak AUC class by class, mean over batches (random scores)"
        console.print(class_table(summary["leak_classes"], title))
    if summary.get("leak_run_level"):
        title = f"{party}: leak AUC of the whole run{pair}"
        console.print(run_level_table(summary["leak_run_level"], title))


def leak_table(
    leak: Mapping[str, Mapping[str, Mapping[str, float]]], title: str = "Leak AUC"
) -> Table:
    """Return the table of a leak summary: one row per layer and attack.

    Args:
        leak: layer -> attack -> ``q95``, ``mean``, ``last_epoch``, ``random_q95``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("layer")
    table.add_column("attack")
    columns = ("q95", "mean", "last_epoch", "random_q95")
    for heading in ("95 % of batches", "mean", "last epoch", "random scores"):
        table.add_column(heading, justify="right")
    for layer, attacks in leak.items():
        for attack, values in attacks.items():
            table.add_row(
                cell(layer), cell(attack), *(f"{values[column]:.3f}" for column in columns)
            )
    return table


def class_table(leak: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str) -> Table:
    """Return the table of which classes attacks tell apart best: one row per layer and attack.

    Args:
        leak: layer -> attack -> ``worst_pair``, ``worst_pair_auc``, ``worst_pair_random``,
            ``classes``, ``random``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "attack", "pair told apart best", "class told best from the rest"):
        table.add_column(heading)
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            first, second = found["worst_pair"]
            pair = f"{first} and {second}: {found['worst_pair_auc']:.3f}"
            measured = {name: auc for name, auc in found["classes"].items() if not math.isnan(auc)}
            worst = max(measured, key=lambda name: measured[name], default="-")
            one = f"{worst}: {measured.get(worst, math.nan):.3f}"
            table.add_row(
                cell(layer),
                cell(attack),
                cell(f"{pair} ({found['worst_pair_random']:.3f})"),
                cell(f"{one} ({found['random'].get(worst, math.nan):.3f})"),
            )
    return table


def ledger_table(ledger: Mapping[str, float | None], title: str = "Leak ledger") -> Table:
    """Return the table of a ledger: what all answers together may have told of one example.

    Args:
        ledger: ``sum_kl_max``, ``estimate_q95``, ``guarantee_mean`` and so on, ``epsilon``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("over all answers")
    for heading in ("largest", "95 % of examples", "mean"):
        table.add_column(heading, justify="right")
    for name, meaning, written in (
        ("sum_kl", "sum_kl", at_most),
        ("estimate", "leak AUC, estimated", in_short),
        ("guarantee", "leak AUC, guaranteed", auc_at_most),
    ):
        numbers = (ledger[f"{name}_{part}"] for part in ("max", "q95", "mean"))
        table.add_row(meaning, *("inf" if n is None else written(n) for n in numbers))
    epsilon = ledger.get("epsilon")
    if epsilon is not None:
        table.add_row("epsilon", at_most(epsilon))
    return table


def run_level_table(
    leak: Mapping[str, Mapping[str, Mapping[str, float]]], title: str = "Leak AUC of the whole run"
) -> Table:
    """Return the table of what attacks gathered over a run.

    Args:
        leak: layer -> attack -> ``auc``, ``low``, ``high``, ``examples``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "attack"):
        table.add_column(heading)
    for heading in ("leak AUC", "95 % interval", "examples"):
        table.add_column(heading, justify="right")
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            interval = f"{found['low']:.3f} .. {found['high']:.3f}"
            auc, examples = f"{found['auc']:.3f}", f"{found['examples']:,}"
            table.add_row(cell(layer), cell(attack), auc, interval, examples)
    return table

"""Prints an audit of gradients as tables."""

import math
import sys
from collections.abc import Mapping

from rich.console import Console

from splitveil.common.text.upper_bounds import at_least
from splitveil.common.text.visible_text import PlainTable
from splitveil.library.auditing import Audit


def print_audit(found: Audit) -> None:
    console = Console(file=sys.stdout, highlight=False)
    batches = PlainTable("single batches: mean leak AUC")
    batches.add_column("attack")
    for heading in ("leak AUC", "95 % interval", "random", "batches"):
        batches.add_column(heading, justify="right")
    batches.add_column("needs to know")
    for one in found.batches:
        interval = _interval(one.low, one.high)
        figures = (f"{one.leak_auc:.3f}", interval, f"{one.random:.3f}", str(one.batches))
        batches.add_row(one.attack, *figures, one.needs)
    console.print(batches)
    if found.run:
        of_run = {name: (one["auc"], one["low"], one["high"]) for name, one in found.run.items()}
        console.print(_intervals("all batches together", of_run))
    if found.beyond is not None:
        adjusted = {
            name: (one.value, one.low, one.high) for name, one in found.beyond.adjusted.items()
        }
        console.print(_intervals("among rows of which covariates tell the same", adjusted))
    if found.epsilon is not None:
        epsilon = found.epsilon
        console.print(
            f"epsilon of label differential privacy is at least {at_least(epsilon.epsilon)} "
            f"(confidence {epsilon.confidence:g}, delta {epsilon.delta:g}): {epsilon.attack} "
            f"guessed {epsilon.correct} of {epsilon.guesses} labels right",
            markup=False,
            soft_wrap=True,
        )
    if found.skipped_one_class:
        console.print(
            f"{found.skipped_one_class} batches of a single class were left out", markup=False
        )


def _intervals(title: str, figures: Mapping[str, tuple[float, float, float]]) -> PlainTable:
    table = PlainTable(title)
    table.add_column("attack")
    for heading in ("leak AUC", "95 % interval"):
        table.add_column(heading, justify="right")
    for attack, (auc, low, high) in figures.items():
        table.add_row(attack, f"{auc:.3f}", _interval(low, high))
    return table


def _interval(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"{low:.3f} .. {min(high, 1.0):.3f}"

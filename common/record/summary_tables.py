"""Prints the tables at the end of a run."""

import logging
from collections.abc import Iterator, Mapping

from rich.console import Console

from splitveil.common.privacy.attacks import CUT
from splitveil.common.record.assessment import assess
from splitveil.common.record.summary import Summary, plain_figures
from splitveil.common.text.log_lines import log_fields, writes_json
from splitveil.common.text.output import printing_console
from splitveil.common.text.visible_text import PlainTable
from splitveil.common.text.wording import in_words, label

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
    if summary.active is None:
        for found in _adversary_tables(summary):
            console.print(found)


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


def _adversary_tables(summary: Summary) -> Iterator[PlainTable]:
    if summary.leak is not None:
        leak = summary.leak
        layers: dict[str, dict[str, float | None]] = {}
        for layer, batches in leak.batches.items():
            layers[layer] = {attack: found.mean for attack, found in batches.items()}
        for layer, of_run in leak.run_level.items():
            layers.setdefault(layer, {}).update({a: found.auc for a, found in of_run.items()})
        pair = "" if not leak.by_class else ", worst pair of classes"
        yield _adversary_table(layers, f"raw leak AUC{pair}; given: labels for evaluation")


def _adversary_table(layers: Mapping[str, Mapping[str, float | None]], measured: str) -> PlainTable:
    table = PlainTable(f"adversary: {measured}", ("attack",), tuple(layers))
    for attack in dict.fromkeys(attack for found in layers.values() for attack in found):
        of_layers = (found.get(attack) for found in layers.values())
        table.add_row(attack, *("-" if auc is None else f"{auc:.3f}" for auc in of_layers))
    return table

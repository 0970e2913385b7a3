"""The final figures of several runs of one example, side by side."""

from collections.abc import Mapping

from rich.console import Group
from rich.text import Text

from splitveil.common.record.assessment import LeakAssessment, assess
from splitveil.common.record.summary import Summary
from splitveil.common.text.visible_text import PlainTable, cell
from splitveil.common.text.wording import label


def comparison_table(title: str, summaries: Mapping[str, Summary]) -> Group:
    """Return a table with a row for each run's active party, and lines that explain it."""
    found = {name: assess(summary) for name, summary in summaries.items()}
    models = [summary.of_active.model for summary in summaries.values()]
    alone = sorted({f"{one.test_auc_alone:.4f}" for one in models if one.test_auc_alone})
    notes = [
        "feature-adjusted leak AUC (99.99 % interval) of that attack; .5 is guessing",
        *(
            f"{name}, {label(one.strongest.attack)}: {one.strongest.why}"
            for name, one in found.items()
            if one.strongest is not None and one.strongest.why
        ),
        *(
            f"{name}: {alarms} leak alarms: an attack passed what one answer was charged"
            for name, summary in summaries.items()
            if (alarms := summary.of_active.leak_alarms)
        ),
        *([f"test AUC without the feature owner's columns: {', '.join(alone)}"] if alone else []),
    ]
    table = PlainTable(
        title,
        ("run", "test AUC", "strongest attack", "bound of the whole run"),
        lead=1,
        framed=False,
    )
    for name, summary in summaries.items():
        auc = summary.of_active.model.test_auc
        table.add_row(
            cell(name, f"{summary.counts.aligned_rows or 0:,} rows"),
            "-" if auc is None else f"{auc:.4f}",
            _strongest(summary, found[name]),
            found[name].bound_in_words,
        )
    return Group(table, *map(cell, notes))


def _strongest(summary: Summary, found: LeakAssessment) -> Text:
    if summary.of_leak.of_numbers:
        return cell("on numbers: see the report")
    attack = found.strongest
    return (
        cell(found.not_measured) if attack is None else cell(label(attack.attack), attack.figures)
    )

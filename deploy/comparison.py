"""The final figures of several runs of one example, side by side."""

from collections.abc import Mapping

from splitveil.common.record.assessment import assess
from splitveil.common.record.summary import Summary
from splitveil.common.text.visible_text import PlainTable


def comparison_table(title: str, summaries: Mapping[str, Summary]) -> PlainTable:
    """Return a table with one row per run, from the active party's summary."""
    table = PlainTable(
        title,
        ("run", "rows", "test AUC", "strongest attack", "leak AUC", "bound"),
        caption="leak AUC: feature-adjusted (95 % interval); .5 is guessing, 1 every label",
        lead=1,
    )
    for name, summary in summaries.items():
        model, found = summary.of_active.model, assess(summary)
        attack = found.strongest
        table.add_row(
            name,
            f"{summary.counts.aligned_rows or 0:,}",
            "-" if model.test_auc is None else f"{model.test_auc:.4f}",
            "-" if attack is None else attack.attack,
            found.not_measured if attack is None else attack.figures,
            found.bound_in_words,
        )
    return table

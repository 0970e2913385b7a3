"""The final figures of several runs of one example, side by side."""

from collections.abc import Mapping

from rich.console import Group
from rich.text import Text

from splitveil.common.record.assessment import assess
from splitveil.common.record.run_record import Summary
from splitveil.common.text.visible_text import PlainTable, cell
from splitveil.common.text.wording import auc_at_most, label


def comparison_table(
    title: str, summaries: Mapping[str, Summary], disclosed: Mapping[str, Text] | None = None
) -> Group:
    """Return a table with a row for each run's active party, and lines that explain it.

    ``disclosed`` says what each run has given away of the feature owner's columns, if that is here.
    """
    found = {name: assess(summary) for name, summary in summaries.items()}
    models = [summary.of_active.model for summary in summaries.values()]
    main = " or ".join(dict.fromkeys(f"test {one.test.main}" for one in models))
    alone = sorted({one.alone.in_words(4) for one in models if one.alone is not None})
    notes = [
        "labels: feature-adjusted leak AUC (99.99 % interval); 0.5 is guessing",
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
        *([f"{main} without the feature owner's columns: {', '.join(alone)}"] if alone else []),
    ]
    if disclosed:
        notes.append("columns: share of what they hide that was given away: mean, strongest")
    table = PlainTable(
        title,
        (
            *("run", main, "labels: attack", "labels: bound"),
            *(["columns"] if disclosed else []),
        ),
        lead=1,
        framed=False,
    )
    for name, summary in summaries.items():
        test, leak = summary.of_active.model.test, found[name]
        attack, bound = cell(leak.figure_in_words(None)), cell("none")
        if leak.strongest is not None:
            attack = cell(label(leak.strongest.attack), leak.strongest.figures)
        if leak.bound is not None and leak.adversary is not None:
            bound = cell(f"≤ {auc_at_most(leak.bound)}", leak.adversary)
        table.add_row(
            cell(name, f"{summary.counts.aligned_rows or 0:,} rows"),
            test.in_words(4),
            attack,
            bound,
            *([disclosed.get(name, cell("-"))] if disclosed else []),
        )
    return Group(table, *map(cell, notes))

"""What tables and lines look like on a terminal of 80 columns: no name is cut or abbreviated."""

import io
import math
import re
from collections.abc import Mapping

import pytest
from rich.console import Console, RenderableType

from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.record.figures import (
    BatchFigures,
    LeakFigures,
    LedgerFigures,
    RunFigures,
    SpreadFigures,
)
from splitveil.common.record.summary import ActiveFigures, ModelFigures, RunCounts, Summary
from splitveil.common.record.summary_tables import print_summary
from splitveil.deploy.comparison import RunResults, comparison_table

WIDTH = 80
ACCUMULATED = ("accumulated_spectral", "accumulated_residual_energy", "accumulated_cosine")
BATCHES = BatchFigures(0.8, 0.7, 0.75, 0.73)
LEAK = LeakFigures(
    batches={layer: dict.fromkeys(ATTACKS, BATCHES) for layer in ("cut", "first")},
    run_level={
        layer: dict.fromkeys(ACCUMULATED, RunFigures(0.8, 0.7, 0.9, 445))
        for layer in ("cut", "first")
    },
)


def printed(table: RenderableType, width: int = WIDTH) -> str:
    """Return what a console of this width shows of a table."""
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(table)
    return console.export_text()


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of each line of a printed table."""
    lines = [line for line in text.splitlines() if line[:1] == "│"]
    return [[one.strip() for one in line.split("│")[1:-1]] for line in lines]


def results(*defenses: str) -> Mapping[str, RunResults]:
    """Return results with every attack at two layers."""
    ledger = LedgerFigures(estimate=SpreadFigures(max=0.85), anybody=SpreadFigures(max=0.91))
    counts = RunCounts(aligned_rows=24_000, steps_per_s=70.0)
    figures = ActiveFigures(model=ModelFigures(test_auc=0.9), ledger=ledger)
    active = Summary(counts=counts, active=figures, leak=LEAK)
    return dict.fromkeys(defenses, RunResults(active, {}))


@pytest.mark.parametrize("num_runs", [1, 2, 3, 4, 9])
def test_a_comparison_of_many_runs_continues_in_tables_below(num_runs: int) -> None:
    text = printed(comparison_table("comparison", results(*map("run_{}".format, range(num_runs)))))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("aligned rows") == text.count("┏") == math.ceil(num_runs / 3)
    assert re.findall(r"run_(\d)", text) == [str(run) for run in range(num_runs)]
    first = {row[0] for row in cells_of(text)}
    assert first >= {f"cut: {attack} leak AUC" for attack in ATTACKS}
    assert first >= {f"first: {attack}" for attack in ACCUMULATED}
    assert "…" not in text


def test_a_party_beside_its_name_in_the_launcher_has_narrower_tables_with_whole_names() -> None:
    console = Console(width=70, file=io.StringIO(), record=True, highlight=False)
    counts = RunCounts(aligned_rows=24_000)
    print_summary("passive", Summary(counts=counts, leak=LEAK), console=console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 70
    assert {row[1] for row in cells_of(text) if len(row) > 1} >= {*ATTACKS, *ACCUMULATED}

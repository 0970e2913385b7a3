"""What tables and lines look like on a terminal of 80 columns: no name is cut or abbreviated."""

import io

from rich.console import Console

from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.record.figures import BatchFigures, LeakFigures, RunFigures
from splitveil.common.record.summary import RunCounts, Summary
from splitveil.common.record.summary_tables import print_summary

ACCUMULATED = ("accumulated_spectral", "accumulated_residual_energy", "accumulated_cosine")
BATCHES = BatchFigures(0.8, 0.7, 0.75, 0.73)
LEAK = LeakFigures(
    batches={layer: dict.fromkeys(ATTACKS, BATCHES) for layer in ("cut", "first")},
    run_level={
        layer: dict.fromkeys(ACCUMULATED, RunFigures(0.8, 0.7, 0.9, 445))
        for layer in ("cut", "first")
    },
)


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of each line of a printed table."""
    lines = [line for line in text.splitlines() if line[:1] == "│"]
    return [[one.strip() for one in line.split("│")[1:-1]] for line in lines]


def test_a_party_beside_its_name_in_the_launcher_has_narrower_tables_with_whole_names() -> None:
    console = Console(width=70, file=io.StringIO(), record=True, highlight=False)
    counts = RunCounts(aligned_rows=24_000)
    print_summary("passive", Summary(counts=counts, leak=LEAK), console=console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 70
    assert "raw leak AUC, features included" in text
    assert "accumulated_spectral" in "".join(row[1] for row in cells_of(text)[1:4])
    assert {row[1] for row in cells_of(text) if len(row) > 1} >= {*ATTACKS, *ACCUMULATED}

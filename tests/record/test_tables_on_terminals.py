"""What tables and lines look like on a terminal of 80 columns: no name is cut or abbreviated."""

import io

from rich.console import Console

from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.figures import BatchFigures, LeakFigures, RunFigures
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.run_record import RunCounts, Summary

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
    assert {row[0] for row in cells_of(text)} >= {*ATTACKS, *ACCUMULATED}


def test_a_passive_party_ends_with_what_its_attacks_found_at_each_layer_and_were_given() -> None:
    console = Console(width=70, file=io.StringIO(), record=True, highlight=False)
    print_summary("passive", Summary(leak=LEAK), console=console)
    text = console.export_text()
    titles = " ".join(text.split())
    assert "adversary: raw leak AUC; given: labels for evaluation" in titles
    rows = cells_of(text)
    assert {tuple(row) for row in rows if len(row) == 3} >= {
        ("norm", "0.700", "0.700"),
        ("accumulated_cosine", "0.800", "0.800"),
    }

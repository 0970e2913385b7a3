"""What tables and lines look like on a terminal of 80 columns: no name is cut or abbreviated."""

import io
import re
from collections.abc import Mapping

import pytest
from rich.console import Console, RenderableType

from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.covers import Covers
from splitveil.common.record.figures import LedgerFigures, SpreadFigures
from splitveil.common.record.leak_figures import BatchFigures, LeakFigures, RunFigures
from splitveil.common.record.summary import ActiveFigures, ModelFigures, RunCounts, Summary
from splitveil.common.record.summary_tables import leak_table, print_summary, run_level_table
from splitveil.common.text.fitted_table import FittedTable
from splitveil.common.text.wrapping import longest_part, longest_word, wrapped
from splitveil.deploy.comparison import RunResults, comparison_table

WIDTH = 80
LONGEST = max(ATTACKS, key=len)
ACCUMULATED = ("accumulated_spectral", "accumulated_residual_energy", "accumulated_cosine")
DEFENSES = ("none", "marvell power_ratio=4.0", "projected_labels leak_auc=0.6", "noisy_label")
BATCHES = BatchFigures(0.8, 0.7, 0.75, 0.73)
ROWS = "aligned rows test AUC none steps/s leak cut: first: ledger: estimate bound:"
"""The words of a comparison beside names of runs, attacks and peers."""
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


def pieces(name: str) -> set[str]:
    """Return what a line may end or begin with: words, or some whole parts of them in order."""
    found = set()
    for word in name.split():
        parts = re.split(r"(?<=[_=-])(?=\w)", word)
        ends = range(1, len(parts) + 1)
        found |= {"".join(parts[start:end]) for end in ends for start in range(end)}
    return found


def names_in(text: str) -> set[str]:
    """Return all words of a table's cells that begin with a letter."""
    lines = [line for line in text.splitlines() if line[:1] in {"│", "┃"}]
    return {word for line in lines for word in re.split(r"[│┃\s]+", line) if word[:1].isalpha()}


@pytest.mark.parametrize("num_runs", [1, 2, 3, 4, 9])
def test_a_comparison_cuts_no_name_at_80_columns(num_runs: int) -> None:
    names = [*DEFENSES, *(f"breast_cancer-noisy_label-{one}" for one in "abcde")][:num_runs]
    text = printed(comparison_table("comparison", results(*names)))
    assert max(map(len, text.splitlines())) <= WIDTH
    allowed = set().union(*map(pieces, (*names, *ATTACKS, *ACCUMULATED, ROWS, *Covers)))
    assert names_in(text) <= allowed
    assert {name for name in ATTACKS if not re.search("[_=-]", name)} <= names_in(text)
    assert "…" not in text


def test_a_comparison_of_many_runs_continues_in_a_table_below() -> None:
    few = printed(comparison_table("comparison", results(*DEFENSES)))
    assert few.count("aligned") == few.count("┏") == 1
    many = printed(comparison_table("comparison", results(*map("run_number_{}".format, range(9)))))
    assert many.count("aligned") == many.count("┏") == 2
    assert many.count("below, leak AUC of the whole run") == 1
    assert re.findall(r"\d", "".join(re.findall("┃.*┃", many))) == list("012345678")


def test_leak_tables_name_each_attack_on_one_line_at_80_columns() -> None:
    batches = printed(leak_table(LEAK.batches))
    assert {row[1] for row in cells_of(batches)} >= set(ATTACKS)
    runs = printed(run_level_table(LEAK.run_level))
    assert {row[1] for row in cells_of(runs)} >= set(ACCUMULATED)
    for text in (batches, runs):
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= WIDTH


def test_a_party_beside_its_name_in_the_launcher_has_narrower_tables_with_whole_names() -> None:
    console = Console(width=70, file=io.StringIO(), record=True, highlight=False)
    counts = RunCounts(aligned_rows=24_000)
    print_summary("passive", Summary(counts=counts, leak=LEAK), console=console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 70
    assert LONGEST in text


def test_what_a_file_says_neither_breaks_nor_styles_a_table() -> None:
    table = FittedTable("a [red]title")
    table.add_column("name\nof it")
    table.add_row("[bold]\x1b[2J")
    text = printed(table)
    assert "a [red]title" in text
    assert "[bold]\\x1b[2J" in text
    assert "name\\nof it" in text


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("residual_energy at cut", 22, ["residual_energy at cut"]),
        ("residual_energy at cut", 18, ["residual_energy at", "cut"]),
        ("at residual_energy", 15, ["at", "residual_energy"]),
        ("at residual_energy", 12, ["at residual_", "energy"]),
        ("runs/one/active/report.html", 16, ["runs/one/active/", "report.html"]),
        ("0.676  0.755 (0.724)", 14, ["0.676  0.755", "(0.724)"]),
        ("power_ratio=4.5", 12, ["power_ratio=", "4.5"]),
        ("0123456789abcdef", 15, ["01234567", "89abcdef"]),
        ("one\ntwo", 9, ["one", "two"]),
        ("", 9, [""]),
    ],
)
def test_text_is_wrapped_between_words_and_at_separators(
    text: str, width: int, lines: list[str]
) -> None:
    assert wrapped(text, width) == lines


def test_wrapping_loses_no_character_and_keeps_to_the_width() -> None:
    text = "transcript: 591 entries, runs/a_b-c/report.html " + "76ca4f4f" * 8 + " 名前_名前名前"
    for width in range(4, 90):
        lines = wrapped(text, width)
        assert max(map(longest_word, lines)) <= width
        assert "".join("".join(lines).split()) == "".join(text.split())
    assert longest_part("accumulated_spectral at cut") == len("accumulated_")

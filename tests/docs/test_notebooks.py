"""The notebooks of the documentation run from a fresh kernel, as under ``nbconvert --execute``."""

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.support.programs import ROOT
from tests.support.waiting import HANGS_AFTER_S

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MOST_LINES = 25


def code_of(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_keeps_no_output(path: Path) -> None:
    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    lines = [line for source in code_of(notebook) for line in source.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
    assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_sweeps_reports_and_takes_own_code(tmp_path: Path) -> None:
    (path,) = NOTEBOOKS
    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = nbclient.NotebookClient(
        notebook,
        timeout=int(HANGS_AFTER_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    shown = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    sweep, epochs, _, attacks = shown
    assert all(f"<td>{name}</td>" in sweep["text/html"] for name in ("marvell", "projected_labels"))
    assert epochs["text/html"].count("<tr") == 1 + 3 * 2 * 5
    assert "<html" in (tmp_path / "report.html").read_text()
    compared = (tmp_path / "comparison.html").read_text()
    assert "breast_cancer-projected_labels-seed-1" in compared
    assert "largest_entry" in attacks["text/html"]
    assert "clipped" in attacks["text/html"]

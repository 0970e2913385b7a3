"""The notebook of the documentation runs from a fresh kernel, as under ``nbconvert --execute``."""

import os
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.support.programs import ROOT
from tests.support.waiting import HANGS_AFTER_S

MOST_CELLS = 40


def test_the_notebook_does_with_modules_frames_and_sweeps_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (ROOT / "docs" / "notebooks").glob("*.ipynb")
    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    assert len(notebook.cells) <= MOST_CELLS
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] for cell in code)

    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("SHELL", raising=False)  # "!" is /bin/sh then, as in a container
    client = nbclient.NotebookClient(
        notebook,
        timeout=int(HANGS_AFTER_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in code for output in cell.outputs]
    shown = [one.data for one in outputs if one.output_type == "execute_result"]
    said = "".join(one.text for one in outputs if one.output_type == "stream")
    sweep, epochs, rows, *aucs, weights, difference, attacks, ledger, again, repeated = shown
    assert all(f"<td>{name}</td>" in sweep["text/html"] for name in ("marvell", "noisy_label"))
    assert epochs["text/html"].count("<tr") == 1 + 3 * 2 * 2
    assert "<html" in (tmp_path / "report.html").read_text()
    assert "simulated-noisy_label-seed-1" in (tmp_path / "comparison.html").read_text()
    assert "have 400 and 360 rows" in said
    assert rows["text/plain"] == "360"
    assert [0 < float(one["text/plain"]) < 1 for one in aucs] == [True] * 3
    assert "'plan.weight': (4, 4)" in weights["text/plain"]
    assert float(difference["text/plain"].removeprefix("np.float32").strip("()")) < 1e-5
    assert "did you mean 'marvell'?" in said
    assert "did you mean 'defense.strength.power_ratio'?" in said
    assert "largest_entry" in attacks["text/html"]
    assert "clipped" in attacks["text/html"]
    assert "knows class means only" in ledger["text/html"]
    assert "ended" in said
    assert "simulated-seed-0: taken from an earlier call" in said
    assert "3 runs" in again["text/html"]
    assert repeated["text/plain"] == "True"

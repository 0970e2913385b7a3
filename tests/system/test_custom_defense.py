"""A user-defined defense beside the settings file, in a run of two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_defenses import write_own_defenses
from tests.programs import run_program
from tests.runs import write_example


def run_with(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    write_example(folder / "settings")
    module = write_own_defenses(folder / "settings", "my_defenses")
    return run_program(
        *(sys.executable, "-P", "-m", "splitveil", "local", str(folder / "settings")),
        *("--runs", str(folder / "runs"), "--set", "contract.epochs=2"),
        f"active.defense={{name: custom, module: '{module}:{name}'}}",
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_it_trains_and_its_charges_are_in_the_summary(tmp_path: Path) -> None:
    done = run_with(tmp_path, "Clipped")
    assert done.returncode == 0, done.stdout
    active = tmp_path / "runs" / "small" / "active"
    summary = json.loads((active / "summary.json").read_text())
    assert summary["defense"]["module"] == "my_defenses:Clipped"
    assert summary["ledger"]["sum_kl_max"] == pytest.approx(2.0)
    page = (active / "report.html").read_text()
    assert "my_defenses:Clipped" in page
    assert "That is a bound for a peer that knows class means only" in page


def test_one_that_does_not_fit_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    done = run_with(tmp_path, "Narrow")
    assert done.returncode == 2, done.stdout
    assert "my_defenses:Narrow fails on a batch of 8 rows" in done.stdout
    assert "expected a gradient like the raw one" in done.stdout
    assert not (tmp_path / "runs" / "small" / "active").exists()

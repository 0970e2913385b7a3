"""The demo: two processes for each defense, and one table of what each costs and leaks."""

import json
import sys
from pathlib import Path

from tests.support.programs import run_program


def test_the_demo_trains_with_and_without_a_defense_and_compares_them(tmp_path: Path) -> None:
    done = run_program(
        *(sys.executable, "-m", "splitveil", "demo", "--runs", str(tmp_path)),
        *("--set", "contract.epochs=2", "--defense", "none", "projected_labels"),
    )
    assert done.returncode == 0, done.stdout
    table = done.stdout[done.stdout.rindex("┏") :]
    assert "test AUC" in table
    assert "cut: cosine leak AUC" in table
    leaks = {}
    for defense in ("none", "projected_labels"):
        folders = {
            party: tmp_path / f"breast_cancer-{defense}" / party for party in ("active", "passive")
        }
        assert all((folder / "report.html").is_file() for folder in folders.values())
        summary = json.loads((folders["passive"] / "summary.json").read_text())
        leaks[defense] = summary["leak"]["cut"]["cosine"]["mean"]
    assert leaks["none"] > 0.95
    assert leaks["projected_labels"] < leaks["none"] - 0.1

"""A whole experiment: real runs of two and three processes, collected and shown."""

import sys
from pathlib import Path
from typing import Any

import yaml
from pyarrow import parquet

from tests.experiments.test_experiments import CANCER, LABS
from tests.support.programs import ROOT, run_program

BOUNDED: dict[str, Any] = {
    "title": "Tiny",
    "about": "A bounded defense for two epochs.",
    "seeds": 1,
    "datasets": {
        "cancer": {
            "example": str(ROOT / "deploy" / "examples" / "breast_cancer"),
            "contract": {"epochs": 2},
            "active": {"leak_monitor": {"attacks": ["norm", "cosine", "accumulated_cosine"]}},
            "passive": {"adversary": {"attacks": ["norm", "cosine"]}},
        }
    },
    "variants": {
        "noisy_label": {
            "active": {"defense": {"name": "noisy_label", "insecure_noise_seed": 0}},
            "sweep": {"guarantee": [0.8]},
        }
    },
    "figures": {
        "test_auc": {"statistic": "test_auc"},
        "cosine": {"statistic": "mean", "layer": "cut", "attack": "cosine"},
        "first": {"statistic": "mean", "party": "passive", "layer": "first", "attack": "cosine"},
        "ace": {"statistic": "calibration_error"},
    },
    "plots": [{"kind": "trade_off"}, {"kind": "course"}],
}

OF_EXTREMES = {
    "data": {"features": {"numeric": "worst_*"}},
    "adversary": {
        "attacks": ["norm"],
        "labels": {"source": CANCER, "id_column": "id", "label_column": "malignant"},
    },
}
THREE: dict[str, Any] = {
    "title": "Two laboratories",
    "about": "Two passive parties for one epoch.",
    "seeds": 1,
    "datasets": {
        "cancer": LABS
        | {
            "active": LABS["active"] | {"leak_monitor": {"attacks": ["cosine"]}},
            "passives": {"passive_a": {}, "passive_b": OF_EXTREMES},
        }
    },
    "variants": {"none": {}},
    "figures": {
        "test_auc": {"statistic": "test_auc"},
        "norm": {"statistic": "mean", "party": "passive_b", "layer": "cut", "attack": "norm"},
    },
}


def run(folder: Path, experiment: dict[str, Any], exit_code: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(experiment, sort_keys=False))
    command = [sys.executable, "-m", "splitveil.experiments", "run", str(path)]
    done = run_program(*command, "--jobs", "2", "--output", str(folder / "out"))
    assert done.returncode == exit_code, done.stdout
    return done.stdout


def rows_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(
        folder / "out" / "tiny" / "results.parquet"
    ).to_pylist()
    return rows


def test_an_experiment_runs_once_and_has_figures_of_each_passive_party(tmp_path: Path) -> None:
    assert "1 to run" in run(tmp_path, THREE)
    steps = {row["party"]: row["value"] for row in rows_in(tmp_path) if row["statistic"] == "steps"}
    assert set(steps) == {"active", "passive_a", "passive_b"}
    assert len(set(steps.values())) == 1
    assert "| none | ." in (tmp_path / "out" / "tiny" / "table.md").read_text()
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("finished.json")}
    assert "1 have run, 0 to run" in run(tmp_path, THREE)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("finished.json")} == finished


def test_both_parties_in_one_process_leave_the_figures_of_two(tmp_path: Path) -> None:
    """All but the clock's and an epoch's leak, for which attacks may still be behind."""
    figures = []
    timed = {"wall_s", "steps_per_s", "epoch_leak", "first_epoch", "last_epoch", "worst_epoch"}
    for in_process in (True, False):
        folder = tmp_path / str(in_process)
        assert "1 to run" in run(folder, BOUNDED | {"in_process": in_process})
        rows = rows_in(folder)
        statistics = {row["statistic"] for row in rows}
        assert statistics >= timed | {
            *("test_auc", "best_test_auc", "test_auc_refit", "calibration_error", "run_level"),
            *("ledger_anybody_max", "epoch_test_loss", "step_leak"),
        }
        assert sum(row["value"] for row in rows if row["statistic"] == "left_out_batches") == 0
        leak = {(row["party"], row["layer"]) for row in rows if row["attack"] == "cosine"}
        assert leak == {("active", "cut"), ("passive", "cut"), ("passive", "first")}
        results = folder / "out" / "tiny"
        assert "| variant | test_auc | cosine | first | ace |" in (results / "table.md").read_text()
        drawn = sorted(path.name for path in (results / "plots").iterdir())
        assert drawn == ["1-trade_off-cancer.svg", "2-course-cancer.svg"]
        figures.append([row for row in rows if row["statistic"] not in timed])
    assert [a for a in figures[0] if a not in figures[1]] == []
    assert len(figures[0]) == len(figures[1])


def test_parties_in_one_process_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    said = run(tmp_path, THREE | {"in_process": True}, exit_code=2)
    assert "in_process: expected one passive party" in said

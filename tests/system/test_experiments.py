"""A whole experiment: real two-process runs, resumed, collected, shown."""

import sys
from pathlib import Path

import pytest
import yaml
from pyarrow import parquet

from tests.programs import ROOT, run_program

EXPERIMENT = {
    "title": "Tiny",
    "about": "Two variants for two epochs.",
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
        "none": {"active": {"defense": {"name": "none"}}},
        "marvell": {
            "active": {"defense": {"name": "marvell"}},
            "sweep": {"active.defense.strength.power_ratio": [4]},
        },
    },
    "figures": {
        "test_auc": {"statistic": "test_auc"},
        "cosine": {"statistic": "mean", "layer": "cut", "attack": "cosine"},
        "first": {"statistic": "mean", "party": "passive", "layer": "first", "attack": "cosine"},
        "ace": {"statistic": "calibration_error"},
    },
    "published": {"source": "a paper", "values": {"cancer": {"none": {"cosine": 0.99}}}},
    "plots": [
        {"kind": "trade_off"},
        {"kind": "trade_off", "leak": "run_level"},
        {"kind": "course"},
    ],
}


CANCER = {"kind": "sklearn", "dataset": "breast_cancer"}
ADAM = {"kind": "adam", "learning_rate": 0.01}
LABS = {
    "title": "Two laboratories",
    "about": "Two passive parties for two epochs.",
    "seeds": 1,
    "datasets": {
        "cancer": {
            "contract": {
                "passive_parties": ["passive_means", "passive_extremes"],
                "cut_shape": [4],
                "batch_size": 64,
                "epochs": 2,
            },
            "active": {
                "data": {"source": CANCER, "id_column": "id", "label_column": "malignant"},
                "defense": {"name": "none"},
                "top_model": {"kind": "mlp", "hidden": [8]},
                "optimizer": ADAM,
                "leak_monitor": {"attacks": ["cosine"]},
            },
            "passive": {
                "data": {"source": CANCER, "id_column": "id", "features": {"numeric": "mean_*"}},
                "bottom_model": {"kind": "mlp", "hidden": [8]},
                "optimizer": ADAM,
            },
            "passives": {
                "passive_means": {},
                "passive_extremes": {
                    "data": {"features": {"numeric": "worst_*"}},
                    "adversary": {
                        "attacks": ["norm"],
                        "labels": {
                            "source": CANCER,
                            "id_column": "id",
                            "label_column": "malignant",
                        },
                    },
                },
            },
        }
    },
    "variants": {"none": {}},
    "figures": {
        "test_auc": {"statistic": "test_auc"},
        "norm": {
            "statistic": "mean",
            "party": "passive_extremes",
            "layer": "cut",
            "attack": "norm",
        },
    },
    "plots": [{"kind": "course"}],
}


IN_ONE = EXPERIMENT | {
    "seeded_noise": True,
    "variants": {
        "projected_labels": {
            "active": {"defense": {"name": "projected_labels", "rank": 4}},
            "sweep": {"guarantee": [0.8]},
        }
    },
    "figures": {"test_auc": {"statistic": "test_auc"}},
    "published": None,
    "plots": [],
}


def run(folder: Path) -> str:
    command = [sys.executable, "-m", "splitveil.experiments", "run", str(folder / "tiny.yaml")]
    done = run_program(*command, "--jobs", "2", "--output", str(folder / "out"))
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow  # two runs one after the other; the next test has one, and what is read
def test_an_experiment_runs_once_and_leaves_figures_table_and_plots(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(EXPERIMENT, sort_keys=False))
    results = tmp_path / "out" / "tiny"
    assert "2 to run" in run(tmp_path)
    first = {path: path.stat().st_mtime_ns for path in results.rglob("finished.json")}
    assert len(first) == 2

    assert "2 have run, 0 to run" in run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("finished.json")} == first

    rows = parquet.read_table(results / "results.parquet").to_pylist()
    leak = {
        (row["variant"], row["party"], row["layer"]): row["value"]
        for row in rows
        if row["statistic"] == "mean" and row["attack"] == "cosine"
    }
    places = [("active", "cut"), ("passive", "cut"), ("passive", "first")]
    assert set(leak) == {(variant, *at) for variant in ("none", "marvell 4") for at in places}
    assert leak["none", "active", "cut"] - leak["marvell 4", "active", "cut"] > 0.2
    statistics = {row["statistic"] for row in rows}
    assert statistics >= {
        *("test_auc", "best_test_auc", "calibration_error", "steps_per_s", "wall_s", "run_level"),
        *("ledger_anybody_max", "worst_epoch", "epoch_test_loss", "epoch_leak", "step_leak"),
    }
    assert sum(row["value"] for row in rows if row["statistic"] == "left_out_batches") == 0
    table = (results / "table.md").read_text()
    assert "| variant | test_auc | cosine | published | first | ace |" in table
    drawn = ["1-trade_off-cancer.svg", "2-trade_off-cancer.svg", "3-course-cancer.svg"]
    assert sorted(path.name for path in (results / "plots").iterdir()) == drawn


def test_an_experiment_has_figures_of_each_of_several_passive_parties(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(LABS, sort_keys=False))
    assert "1 to run" in run(tmp_path)
    rows = parquet.read_table(tmp_path / "out" / "tiny" / "results.parquet").to_pylist()
    steps = {row["party"]: row["value"] for row in rows if row["statistic"] == "steps"}
    assert set(steps) == {"active", "passive_means", "passive_extremes"}
    assert len(set(steps.values())) == 1
    assert "| none | ." in (tmp_path / "out" / "tiny" / "table.md").read_text()
    assert "1 have run, 0 to run" in run(tmp_path)


def test_both_parties_in_one_process_leave_the_figures_of_two(tmp_path: Path) -> None:
    """All but the clock's and an epoch's leak, for which attacks may still be behind."""
    figures = []
    for in_process in (True, False):
        folder = tmp_path / str(in_process)
        folder.mkdir()
        experiment = IN_ONE | {"in_process": in_process}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
        assert "1 to run" in run(folder)
        rows = parquet.read_table(folder / "out" / "tiny" / "results.parquet").to_pylist()
        timed = {"wall_s", "steps_per_s", "epoch_leak", "first_epoch", "last_epoch", "worst_epoch"}
        figures.append([row for row in rows if row["statistic"] not in timed])
    assert [a for a in figures[0] if a not in figures[1]] == []
    assert len(figures[0]) == len(figures[1])
    statistics = {row["statistic"] for row in figures[0]}
    assert statistics >= {"test_auc", "test_auc_refit", "run_level", "epoch_test_loss"}


def test_parties_in_one_process_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    experiment = LABS | {"in_process": True}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
    command = [sys.executable, "-m", "splitveil.experiments", "run", str(tmp_path / "tiny.yaml")]
    done = run_program(*command, "--output", str(tmp_path / "out"))
    assert done.returncode == 2, done.stdout
    assert "in_process: expected one passive party" in done.stdout

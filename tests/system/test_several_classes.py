"""The examples of several classes as a user runs them: two real processes each.

``vehicle`` is real data, four kinds of silhouettes; ``digits`` comes with scikit-learn. Bounds were
set with room around what was measured with these seeds.
"""

import json
from pathlib import Path

import pytest

from tests.system.conftest import SAME_SPLIT, LocalRun, needs_data, run_locally

MARVELL = "{name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 7}"
SIXTEEN = "vehicle-marvell-power_ratio-16-insecure_noise_seed-7"


@pytest.fixture(scope="module")
def vehicles(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Return vehicle without a defense and with marvell."""
    runs = tmp_path_factory.mktemp("runs")
    epochs = ("--set", "contract.epochs=20")
    return run_locally(runs, "vehicle", *epochs, *SAME_SPLIT, "--defense", "none", MARVELL)


@needs_data
def test_without_a_defense_the_worst_pair_is_recovered_and_with_marvell_it_is_not(
    vehicles: LocalRun,
) -> None:
    assert vehicles.exit_code == 0, vehicles.output
    for party in ("active", "passive"):
        without, defended = (vehicles.summary(name, party) for name in ("vehicle-none", SIXTEEN))
        for attack in ("cosine", "spectral"):
            pair = without["leak_classes"]["cut"][attack]
            assert pair["worst_pair_auc"] >= 0.95
            assert without["leak"]["cut"][attack]["mean"] >= 0.95
            left = defended["leak_classes"]["cut"][attack]
            assert left["worst_pair_auc"] <= 0.65
            assert left["worst_pair_auc"] >= left["worst_pair_random"] - 0.05
        assert without["leak_run_level"]["cut"]["accumulated_cosine"]["auc"] >= 0.99
        # Fresh noise averages out; less than without, and more than in one batch.
        whole_run = defended["leak_run_level"]["cut"]["accumulated_cosine"]["auc"]
        assert 0.6 <= whole_run <= 0.9


def alarming_attacks(run: Path) -> list[str]:
    """Return what each leak alarm of a run is about."""
    lines = (run / "active" / "metrics.jsonl").read_text().splitlines()
    alarms = [line for line in map(json.loads, lines) if line["kind"] == "leak_alarm"]
    return [name for line in alarms for name in line if "/" in name]


@needs_data
def test_both_runs_learn_and_say_of_which_classes_their_figures_are(vehicles: LocalRun) -> None:
    for name in ("vehicle-none", SIXTEEN):
        summary = vehicles.summary(name, "active")
        assert summary["aligned_rows"] == 846
        assert summary["test_auc"] >= 0.85
        assert summary["test_accuracy"] >= 0.6
        assert set(summary["test_auc_by_class"]) == {"0", "1", "2", "3"}
        # Fresh marvell describes attacks on class means, and not those on weak directions.
        assert set(alarming_attacks(vehicles.runs_dir / name)) <= {"cut/residual_energy"}
        page = (vehicles.runs_dir / name / "active" / "report.html").read_text()
        assert "This run has 4 classes" in page
    assert "test accuracy" in vehicles.output
    assert (vehicles.runs_dir / "vehicle-comparison.html").is_file()

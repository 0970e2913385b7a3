"""The leak alarm in a run: it names the attack that passes what the ledger states."""

import json
from pathlib import Path

import pytest

from splitveil.active_party.watch.recorder import ActiveRecorder
from splitveil.common.privacy.settings import DEFAULT_ATTACKS
from tests.runs import build_parties, run_in_process, write_example

FRESH = "name: marvell, strength: {power_ratio: 256}"
PERSISTENT = "name: marvell, noise: persistent, strength: {power_ratio: 256}"


def alarms_of(folder: Path, defense: str) -> list[str]:
    """Run with the monitor's default attacks; return the attacks that rang."""
    write_example(folder, rows=2000)
    both = ["contract.epochs=5", "contract.batch_size=240", "contract.cut_shape=[16]"]
    parties = build_parties(
        folder,
        [
            *both,
            f"defense={{{defense}, insecure_noise_seed: 3}}",
            f"noise_key_path={folder}/noise.key",
        ],
        [*both, "adversary=null"],
    )
    assert parties.active_settings.leak_monitor is not None
    assert parties.active_settings.leak_monitor.attacks == DEFAULT_ATTACKS
    with ActiveRecorder(parties.active_settings, folder) as recorder:
        parties.session.lifecycle.observer = recorder
        run_in_process(parties)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    rang = [line for line in lines if line["kind"] == "leak_alarm"]
    assert recorder.summary({}).of_active.leak_alarms == len(rang)
    for line in rang:
        attacks = [name for name in line if name.startswith("cut/")]
        assert len(attacks) == 1, line
    return [name for line in rang for name in line if name.startswith("cut/")]


def test_the_alarm_names_the_attack_to_which_fresh_marvell_falls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rang = alarms_of(tmp_path, FRESH)
    assert rang
    assert {name.split("/")[1].removesuffix("_leak_auc") for name in rang} == {"residual_energy"}
    assert "LEAK ALARM" in caplog.text
    assert "residual_energy at cut measures a leak AUC of" in caplog.text


def test_no_attack_on_the_same_labels_passes_the_bound_of_persistent_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert alarms_of(tmp_path, PERSISTENT) == []
    assert "LEAK ALARM" not in caplog.text

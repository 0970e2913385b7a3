"""The leak alarm in a run: it names the attack that passes what the ledger states."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from splitveil.active_party.monitor.leak_guards import MIN_BATCHES, AlarmRecorder
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.settings import DEFAULT_ATTACKS
from splitveil.common.record.metrics_log import MetricsLog
from tests.support.runs import build_parties, run_in_process, write_example

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
    assert "residual_energy at cut measures a leak AUC of" in caplog.text


def measured(epoch: int, step: int, *attacks: str) -> AuditedBatch:
    """Return a batch in which attacks tell the classes apart."""
    return AuditedBatch(epoch, step, {"cut": dict.fromkeys(attacks, 0.9 + step % 2 / 100)}, 0.5)


def ring(bell: AlarmRecorder, epochs: Iterable[int], *attacks: str) -> None:
    """Have a bell judge epochs in which attacks pass the bound."""
    for epoch in epochs:
        bell.note_charge(epoch, 0.01)
        for step in range(MIN_BATCHES):
            bell.note_leak(measured(epoch, step, *attacks))
        bell.judge_measured()


def test_an_alarm_is_said_once_and_again_for_another_attack_and_recorded_each_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsLog(tmp_path) as metrics:
        bell = AlarmRecorder(metrics, ())
        ring(bell, range(3), "norm")
        assert caplog.text.count("LEAK ALARM") == caplog.text.count("norm at cut") == 1
        resumed = AlarmRecorder(metrics, ())
        resumed.load_state_dict(json.loads(json.dumps(bell.state_dict())))
        ring(resumed, range(3, 5), "norm")
        assert caplog.text.count("LEAK ALARM") == 1
        ring(resumed, range(5, 8), "norm", "spectral")
        assert caplog.text.count("LEAK ALARM") == 2
        assert caplog.text.count("spectral at cut") == 1
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert sum(line["kind"] == "leak_alarm" for line in lines) == resumed.alarms == 8 + 3


def test_no_attack_on_the_same_labels_passes_the_bound_of_persistent_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert alarms_of(tmp_path, PERSISTENT) == []
    assert "LEAK ALARM" not in caplog.text

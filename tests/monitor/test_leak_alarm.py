"""The leak alarm: attacks that measure more than the ledger states for one answer."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from splitveil.active_party.monitor.leak_watch import MIN_BATCHES, LeakAlarm
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.settings import DEFAULT_ATTACKS
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.run_record import AlarmLine, read_metrics
from tests.support.equality import same, stored
from tests.support.runs import build_parties, run_in_process, write_example


def leak(step: int, value: float, attack: str = "norm", random: float = 0.55) -> AuditedBatch:
    return AuditedBatch(step // 10, step, {"cut": {attack: value, "spectral": 0.5}}, random)


def test_an_alarm_cut_at_any_batch_resumes_the_same() -> None:
    def findings(cut: int | None) -> list[AlarmLine]:
        found: list[AlarmLine] = []
        alarm = LeakAlarm(found.append)
        for step in range(3 * MIN_BATCHES):
            if step == cut:
                state = alarm.state_dict()
                alarm = LeakAlarm(found.append)
                alarm.load_state_dict(stored(state))
                assert same(alarm.state_dict(), state)
            alarm.note_charge(step // 10, 1e-6)
            alarm.note_leak(leak(step, 0.6 + 0.1 * (step % 3)))
            alarm.judge_measured()
        return found

    expected = findings(None)
    assert expected
    for cut in range(3 * MIN_BATCHES):
        assert findings(cut) == expected, cut


def test_the_alarm_ignores_attacks_that_are_told_classes() -> None:
    """The ledger's guarantee does not speak of them; of a norm it does, inverted as well."""
    for attack, alarms in (("lda", 0), ("mean", 0), ("median", 0), ("norm", 1), ("cosine", 1)):
        found: list[AlarmLine] = []
        alarm = LeakAlarm(found.append)
        alarm.note_charge(0, 1e-6)
        for step in range(2 * MIN_BATCHES):
            alarm.note_leak(leak(step % 10, 0.1 + 0.01 * (step % 2), attack))
        alarm.judge_measured()
        assert [line.figure.attack for line in found] == [attack] * alarms


@pytest.mark.parametrize(("noise", "attacks"), [("fresh", ["residual_energy"]), ("persistent", [])])
def test_the_alarm_names_the_attack_to_which_fresh_marvell_falls_and_persistent_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, noise: str, attacks: list[str]
) -> None:
    write_example(tmp_path, rows=2000)
    both = ["contract.epochs=5", "contract.batch_size=240", "contract.cut_shape=[16]"]
    strength = "strength: {power_ratio: 256}, insecure_noise_seed: 3"
    own = [
        f"defense={{name: marvell, noise: {noise}, {strength}}}",
        f"noise_key_path={tmp_path}/noise.key",
    ]
    parties = build_parties(tmp_path, [*both, *own], [*both, "adversary=null"])
    assert parties.active_settings.leak_monitor is not None
    assert parties.active_settings.leak_monitor.attacks == DEFAULT_ATTACKS
    with ActiveRecorder(parties.active_settings, tmp_path) as recorder:
        parties.session.lifecycle.observer = recorder
        run_in_process(parties)
    rang = read_metrics(tmp_path).of(AlarmLine)
    assert recorder.summary({}).of_active.leak_alarms == len(rang)
    assert {line.figure.attack for line in rang} == set(attacks)
    assert {line.figure.layer for line in rang} <= {"cut"}
    assert ("residual_energy at cut measures a leak AUC of" in caplog.text) is bool(attacks)
    assert ("LEAK ALARM" in caplog.text) is bool(attacks)


def ring(bell: LeakAlarm, epochs: Iterable[int], *attacks: str) -> None:
    for epoch in epochs:
        bell.note_charge(epoch, 0.01)
        for step in range(MIN_BATCHES):
            leak = {"cut": dict.fromkeys(attacks, 0.9 + step % 2 / 100)}
            bell.note_leak(AuditedBatch(epoch, step, leak, 0.5))
        bell.judge_measured()


def test_an_alarm_is_said_once_and_again_for_another_attack_and_recorded_each_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsLog(tmp_path) as metrics:
        bell = LeakAlarm(metrics.write, ())
        ring(bell, range(3), "norm")
        assert caplog.text.count("LEAK ALARM") == caplog.text.count("norm at cut") == 1
        resumed = LeakAlarm(metrics.write, ())
        resumed.load_state_dict(json.loads(json.dumps(bell.state_dict())))
        ring(resumed, range(3, 5), "norm")
        assert caplog.text.count("LEAK ALARM") == 1
        ring(resumed, range(5, 8), "norm", "spectral")
        assert caplog.text.count("LEAK ALARM") == 2
        assert caplog.text.count("spectral at cut") == 1
    assert len(read_metrics(tmp_path).of(AlarmLine)) == resumed.alarms == 8 + 3

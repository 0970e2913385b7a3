"""The leak gate: the leak monitor's measurements may end a run."""

import io
import json
import statistics
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitveil.active_party.monitor.leak_guards import (
    MIN_BATCHES,
    AlarmRecorder,
    LeakAlarm,
    LeakGate,
)
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.settings import ActiveSettings, LeakGateSettings
from splitveil.common.errors import LeakGateClosed, PeerLeft, SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.settings import DEFAULT_ATTACKS
from splitveil.common.record.lines import AlarmLine, GateLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.run_record import read_metrics
from splitveil.common.record.summary import GateFigures, Summary
from splitveil.common.record.summary_tables import print_summary
from splitveil.common.run.messages import Answer
from splitveil.common.wire.status import error_from, status_for
from tests.support.equality import same, stored
from tests.support.peers import InProcessPeer
from tests.support.runs import Parties, build_parties, run_in_process, write_example
from tests.support.waiting import HANGS_AFTER_S

STRONG = "defense={name: iso, noise_ratio: 32, insecure_noise_seed: 1}"
GATE = "leak_gate={max_leak_auc: 0.75, window_steps: 6"
EPOCHS = "contract.epochs=8"


class UnhurriedPeer(InProcessPeer):
    def receive_gradient(self) -> Answer:
        recorder = self._session.lifecycle.observer
        assert isinstance(recorder, ActiveRecorder)
        assert recorder._watch.monitor is not None
        assert recorder._watch.monitor.wait_until_idle(HANGS_AFTER_S)
        return super().receive_gradient()


def leak(step: int, value: float, attack: str = "norm", random: float = 0.55) -> AuditedBatch:
    return AuditedBatch(0, step, {"cut": {attack: value, "spectral": 0.5}}, random)


def gate(**settings: Any) -> LeakGate:
    return LeakGate(LeakGateSettings(**{"window_steps": 3, "max_leak_auc": 0.65} | settings))


@pytest.mark.parametrize(
    ("settings", "values", "closes_at"),
    [
        ({}, [0.7, 0.7, 0.5, 0.7, 0.8], [4]),  # the mean of a whole window, and not before it
        ({}, [0.55, 0.55, 0.8], []),
        ({"quantile": 0.95}, [0.55, 0.55, 0.8], [2]),
        ({"attack": "norm"}, [0.9, 0.1, 0.9], [2]),  # an inverted attack counts as well
        ({"attack": "spectral"}, [0.9] * 3, []),
        ({}, [0.9] * 12, [2, 5, 8, 11]),  # one finding per window
    ],
)
def test_the_gate_judges_windows_of_an_attack(
    settings: dict[str, Any], values: list[float], closes_at: list[int]
) -> None:
    judged = gate(**settings)
    found = {step: judged.note(leak(step, value)) for step, value in enumerate(values)}
    assert [step for step, finding in found.items() if finding is not None] == closes_at
    worst = found[len(values) - 1]
    if worst is not None and not settings:
        assert worst.measured == pytest.approx(statistics.fmean(values[-3:]))
    if worst is not None:
        sentence = judged.sentence(worst)
        for text in ("norm at cut", f"is {worst.measured:.4f}", "limit of 0.65", "s: 0.5500)"):
            assert text in sentence


def test_a_gate_and_an_alarm_cut_at_any_batch_resume_the_same() -> None:
    """Both find something here: the gate once per window, the alarm once there are enough."""

    def findings(cut: int | None) -> list[object]:
        judged, alarm = gate(), LeakAlarm()
        found: list[object] = []
        for step in range(3 * MIN_BATCHES):
            if step == cut:
                states = judged.state_dict(), alarm.state_dict()
                judged, alarm = gate(), LeakAlarm()
                judged.load_state_dict(stored(states[0]))
                alarm.load_state_dict(stored(states[1]))
                assert same(judged.state_dict(), states[0])
                assert same(alarm.state_dict(), states[1])
            measured = leak(step, 0.6 + 0.1 * (step % 3))
            alarm.note_charge(step // 10, 1e-6)
            alarm.note_leak(measured)
            found += [judged.note(measured), *alarm.judge(step // 10)]
        return found

    expected = findings(None)
    assert {type(item).__name__ for item in expected} == {"NoneType", "GateFinding", "Alarm"}
    for cut in range(3 * MIN_BATCHES):
        assert findings(cut) == expected, cut


def test_the_alarm_ignores_attacks_that_are_told_classes() -> None:
    """The ledger's guarantee does not speak of them; of a norm it does, inverted as well."""
    for attack, alarms in (("lda", 0), ("mean", 0), ("median", 0), ("norm", 1), ("cosine", 1)):
        alarm = LeakAlarm()
        alarm.note_charge(0, 1e-6)
        for step in range(2 * MIN_BATCHES):
            alarm.note_leak(leak(step, 0.1 + 0.01 * (step % 2), attack))
        assert [found.attack for found in alarm.judge(0)] == [attack] * alarms


def record(example: Path, folder: Path, *active: str) -> tuple[Parties, Summary, list[GateLine]]:
    overrides = [EPOCHS, *active]
    parties = build_parties(example, overrides, [EPOCHS])
    with ActiveRecorder(parties.active_settings, folder) as recorder:
        parties.session.lifecycle.observer = recorder
        with suppress(LeakGateClosed):
            run_in_process(parties, UnhurriedPeer)
    return parties, recorder.summary({}), read_metrics(folder).of(GateLine)


def test_the_gate_stops_a_run_without_a_defense(example: Path, tmp_path: Path) -> None:
    parties, summary, lines = record(example, tmp_path, GATE + "}")
    session = parties.session
    assert session.stage is Stage.ENDED
    assert isinstance(session.lifecycle.error, LeakGateClosed)
    assert session.lifecycle.error.exit_code == 5
    assert "above the limit of 0.75 (random scores: 0." in str(session.lifecycle.error)
    assert summary.counts.steps is not None
    assert 6 <= summary.counts.steps < 8 * 4
    assert summary.of_active.gate == GateFigures(findings=1, closed=True)
    assert len(lines) == 1
    assert summary.of_active.ledger is not None
    print_summary("active party", summary, console=Console(file=io.StringIO()))


def test_the_gate_lets_a_strongly_defended_run_pass(example: Path, tmp_path: Path) -> None:
    parties, summary, lines = record(example, tmp_path, STRONG, GATE + "}")
    assert parties.session.stage is Stage.FINISHED
    assert (summary.of_active.gate, lines) == (GateFigures(findings=0, closed=False), [])


def test_a_warning_comes_once_per_window_and_ends_nothing(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parties, summary, lines = record(example, tmp_path, GATE + ", action: warn}")
    assert parties.session.stage is Stage.FINISHED
    warnings = caplog.text.count("leak_gate: epoch")
    assert summary.of_active.gate == GateFigures(findings=warnings, closed=False)
    assert len(lines) == warnings
    measured = summary.of_leak.counts.observed
    assert measured is not None
    assert 1 <= len(lines) <= measured // 6


def test_the_peer_is_told_nothing_of_the_gate() -> None:
    status = status_for(LeakGateClosed("the mean of the leak AUC is 0.9, the limit 0.65"))
    assert status.details == "ended-for-good: this party has ended the run"
    assert isinstance(error_from(status.code, status.details), PeerLeft)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["leak_gate={}", "leak_monitor=null"], "needs leak_monitor"),
        (["leak_gate={attack: lda}"], "not in leak_monitor.attacks"),
        (["leak_gate={}", "leak_monitor={attacks: [accumulated_spectral]}"], "single batches"),
        (["leak_gate={max_leak_auc: 0.5}"], "more than 0.5"),
        (["leak_gate={quantile: 1}"], "less than 1"),
        (["leak_gate={action: end}"], "'stop' or 'warn'"),
    ],
)
def test_gates_that_cannot_be_meant_are_refused(
    example: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_party_settings(ActiveSettings, example / "active.yaml", overrides)


# ---- the leak alarm in a run ----


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


def ring(bell: AlarmRecorder, epochs: Iterable[int], *attacks: str) -> None:
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
    assert len(read_metrics(tmp_path).of(AlarmLine)) == resumed.alarms == 8 + 3

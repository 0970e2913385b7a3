"""What a party shows its operators: complete, free of labels, and without any hold on the run."""

import json
import math
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from splitveil.active_party.commands.program import main as active_main
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import (
    BudgetExhausted,
    InvalidMessage,
    PeerEndedForGood,
    PeerLeft,
    PeerUnreachable,
    SettingsError,
    SplitveilError,
)
from splitveil.common.party.command_line import MAY_CHANGE
from splitveil.common.party.endpoint import (
    REQUESTS_AT_ONCE,
    StatusEndpoint,
    check_free,
    serving_status,
)
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.party.party_status import STAGES, RunStatus
from splitveil.common.record.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import Batch
from splitveil.common.run.phases import Phase
from splitveil.passive_party.recorder import noting_attempts
from splitveil.passive_party.settings import PassiveSettings
from tests.support.numbers import write_numbers
from tests.support.runs import in_background, write_example
from tests.support.simulation import free_address
from tests.support.waiting import HANGS_AFTER_S, wait_until
from tests.support.watched import (
    Watched,
    asked,
    names_in,
    series_of,
    value_of,
    watched_run,
    without_time,
)

CONTRACT = Contract(run_name="small", cut_shape=(4,), batch_size=8, epochs=3)
WITH_LIMITS = (
    "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 3}",
    "run_budget={sum_kl: 1000, adversary: knows class means only}",
    "leak_gate={max_leak_auc: 0.99, action: warn}",
)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    return folder


@pytest.fixture(scope="module")
def watched(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched_run(example, tmp_path_factory.mktemp("watched"), *WITH_LIMITS)


@pytest.fixture
def status() -> RunStatus:
    return RunStatus("passive", CONTRACT)


@pytest.fixture
def served(status: RunStatus) -> Iterator[str]:
    with StatusEndpoint(status, "127.0.0.1:0") as endpoint:
        yield endpoint.address


# ---- what is shown ----


@pytest.mark.parametrize("party", ["active", "passive"])
def test_a_run_is_counted_as_it_was(watched: Watched, party: str) -> None:
    status: RunStatus = getattr(watched, party)
    steps = value_of(status, "splitveil_steps_total")
    assert steps == value_of(status, "splitveil_course_steps") > 4
    assert steps == value_of(status, "splitveil_course_steps_done")
    assert steps == value_of(status, "splitveil_step_seconds_count") + 1
    assert value_of(status, "splitveil_aligned_rows") == 360
    assert value_of(status, "splitveil_epoch") == value_of(status, "splitveil_epochs") == 2
    assert value_of(status, "splitveil_alignment_progress_ratio") == 1
    sent, received = (
        value_of(status, "splitveil_messages_total", direction=way, call="Train")
        for way in ("sent", "received")
    )
    assert sent == received == steps


def test_what_one_party_sends_is_what_the_other_receives(watched: Watched) -> None:
    for call in ("Handshake", "Align", "Train", "Evaluate"):
        name = "splitveil_message_bytes_total"
        there = value_of(watched.passive, name, direction="sent", call=call)
        back = value_of(watched.active, name, direction="sent", call=call)
        assert there == value_of(watched.active, name, direction="received", call=call) > 0
        assert back == value_of(watched.passive, name, direction="received", call=call) > 0


def test_the_seconds_of_a_run_are_in_its_phases(watched: Watched) -> None:
    name = "splitveil_phase_seconds_total"
    of_both = {Phase.ALIGNMENT, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION, Phase.RECORD}
    of_both |= {Phase.CHECKPOINT, Phase.WAIT, Phase.OTHER}
    for status, own in ((watched.active, {Phase.DEFENSE, Phase.ANSWER}), (watched.passive, set())):
        used = {phase for phase in Phase if value_of(status, name, phase=phase) > 0}
        assert used == of_both | own


def test_the_label_owner_sees_leak_and_ledger(watched: Watched) -> None:
    series = series_of(watched.active)
    attacks = {dict(labels)["attack"] for name, labels in series if name == "splitveil_leak_auc"}
    assert {"norm", "cosine"} <= attacks
    bound = value_of(
        watched.active,
        "splitveil_ledger_leak_auc_bound",
        adversary="knows class means only",
        statistic="max",
    )
    assert 0.5 < bound < 1
    for_anybody = value_of(
        watched.active, "splitveil_ledger_leak_auc_bound", adversary="anybody", statistic="max"
    )
    assert for_anybody == 1
    spent = value_of(watched.active, "splitveil_ledger_sum_kl", statistic="max")
    assert value_of(watched.active, "splitveil_budget_left_ratio") == pytest.approx(
        1 - spent / 1000
    )
    assert value_of(watched.active, "splitveil_ledger_epsilon") == math.inf
    assert 0.5 < value_of(watched.active, "splitveil_evaluation_auc", split="test") <= 1


def test_the_run_is_named(watched: Watched) -> None:
    for status in (watched.active, watched.passive):
        (labels,) = [
            dict(labels) for name, labels in series_of(status) if name == "splitveil_run_info"
        ]
        assert labels["run"] == "small"
        assert re.fullmatch("[0-9a-f]{16}", labels["run_id"])
    assert watched.active.run_id == watched.passive.run_id


# ---- labels ----


def with_swapped_labels(example: Path, folder: Path) -> Path:
    write_example(folder)
    header, *lines = (folder / "active.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines]
    swapped = [",".join([own, str(1 - int(label)), *rest]) for own, label, *rest in cells]
    (folder / "active.csv").write_text("\n".join([header, *swapped]) + "\n")
    return folder


def test_the_feature_owner_s_metrics_are_the_same_if_all_labels_are_swapped(
    example: Path, watched: Watched, tmp_path: Path
) -> None:
    """Although its adversary knows evaluation labels, and measures leak AUCs with them."""
    folder = with_swapped_labels(example, tmp_path / "example")
    swapped = watched_run(folder, tmp_path / "runs", *WITH_LIMITS)
    assert watched.passive_summary.leak is not None
    shown = without_time(series_of(watched.passive))
    assert shown == without_time(series_of(swapped.passive))
    assert len(shown) > 20
    # The comparison would notice: at the label owner, the same swap moves figures.
    assert without_time(series_of(watched.active)) != without_time(series_of(swapped.active))


def test_the_feature_owner_has_no_metric_of_loss_leak_or_ledger(watched: Watched) -> None:
    telltale = re.compile("leak|auc|loss|ledger|budget|label|calibration|rmse|_r2$")
    own = {name for name in names_in(series_of(watched.passive)) if "connection_losses" not in name}
    assert [name for name in own if telltale.search(name)] == []
    assert [name for name in names_in(series_of(watched.active)) if telltale.search(name)]


def test_predictions_of_numbers_are_measured_at_the_label_owner_alone(tmp_path: Path) -> None:
    write_numbers(tmp_path / "settings", rows=300)
    found = watched_run(tmp_path / "settings", tmp_path / "watched", "contract.epochs=2")
    last = found.active
    lines = (tmp_path / "watched" / "active" / "metrics.jsonl").read_text().splitlines()
    test = [one for one in map(json.loads, lines) if one["kind"] == "test"][-1]
    assert value_of(last, "splitveil_evaluation_rmse", split="test") == test["rmse"]
    assert value_of(last, "splitveil_evaluation_r2", split="test") == test["r2"]
    names = names_in(series_of(last))
    assert not names & {"splitveil_evaluation_auc", "splitveil_calibration_error"}
    telltale = re.compile("rmse|_r2$|leak|evaluation|train_loss|ledger|label")
    assert [name for name in names_in(series_of(found.passive)) if telltale.search(name)] == []


def test_no_metric_is_about_one_example(watched: Watched) -> None:
    """Labels of series are names of attacks, phases and statuses: few, and no id among them."""
    for status in (watched.active, watched.passive):
        text = json.dumps([str(key) for key in series_of(status)])
        assert "person-" not in text
        assert len(series_of(status)) < 200


# ---- health and readiness ----


def test_the_endpoint_answers_what_is_asked(status: RunStatus, served: str) -> None:
    code, text = asked(served, "/healthz")
    assert (code, json.loads(text)["status"]) == (200, "ok")
    assert json.loads(text)["stage"] == "starting"
    code, text = asked(served, "/readyz")
    assert (code, json.loads(text)["reason"]) == (503, "starting")
    status.set_ready("serving")
    status.enter_stage("training")
    code, text = asked(served, "/readyz")
    assert (code, json.loads(text)) == (
        200,
        {
            "status": "ready",
            "reason": "serving",
            "party": "passive",
            "run": "small",
            "run_id": "",
            "stage": "training",
        },
    )
    code, text = asked(served, "/metrics")
    assert code == 200
    assert 'splitveil_stage{stage="training"} 1.0' in text
    assert asked(served, "/")[0] == 404


def test_exactly_one_stage_is_the_present_one(status: RunStatus) -> None:
    for stage in STAGES:
        status.enter_stage(stage)
        found = {one: value_of(status, "splitveil_stage", stage=one) for one in STAGES}
        assert [one for one, value in found.items() if value] == [stage]


def test_odd_requests_are_answered_and_other_methods_than_get_and_head_refused(
    served: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert asked(served, "/metrics", method="POST")[0] == 501
    for path in ("/healthz", "/metrics", "/metrics/"):
        assert asked(served, path, method="HEAD") == (200, "")
    assert asked(served, "/metrics", accept="application/openmetrics-text; version=x")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_named(served: str) -> None:
    for refused in (check_free, lambda address: StatusEndpoint(RunStatus("x", CONTRACT), address)):
        with pytest.raises(SettingsError, match=f"status: cannot serve at {served}: .*in use"):
            refused(served)


def test_the_check_command_names_a_taken_port(
    example: Path, served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", str(example / "active.yaml"), "--set", f"status={served}"]
    listen = f"listen={free_address()}"
    with pytest.raises(SystemExit) as end:
        active_main([*words, "--set", listen])
    assert end.value.code == 2
    assert f"status: cannot serve at {served}" in capsys.readouterr().err


def test_many_slow_clients_stop_neither_the_run_nor_a_health_check(
    status: RunStatus, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if each of them sent a byte whenever its time is nearly over.
    monkeypatch.setattr("splitveil.common.party.endpoint._Handler.timeout", None)
    host, port = served.split(":")
    silent = [
        socket.create_connection((host, int(port)), timeout=60) for _ in range(4 * REQUESTS_AT_ONCE)
    ]
    assert asked(served, "/healthz")[0] == 200
    hung_up = [one for one in silent[:-REQUESTS_AT_ONCE] if one.recv(1) == b""]
    assert len(hung_up) == 3 * REQUESTS_AT_ONCE
    status.note(Crossing("sent", "Train request", b"1"))  # the run goes on
    for one in silent:
        one.close()


def test_an_endpoint_may_be_at_ipv6_and_another_address_than_loopback_is_warned_of(
    status: RunStatus, caplog: pytest.LogCaptureFixture
) -> None:
    with StatusEndpoint(status, "[::1]:0") as endpoint:
        assert asked(endpoint.address, "/healthz")[0] == 200
    assert caplog.text == ""
    with StatusEndpoint(status, "0.0.0.0:0"):
        pass
    assert "can be reached from other machines" in caplog.text


def test_two_parties_in_one_process_do_not_share_figures() -> None:
    one, other = RunStatus("a", CONTRACT), RunStatus("b", CONTRACT)
    one.note(Crossing("sent", "Train request", b"12345"))
    assert value_of(one, "splitveil_messages_total", direction="sent", call="Train") == 1
    assert "splitveil_messages_total" not in names_in(series_of(other))


# ---- the end ----


def never() -> None:
    return None


def test_a_run_that_is_over_is_shown_to_those_who_look_regularly(status: RunStatus) -> None:
    ended = threading.Event()

    def serve() -> None:
        with serving_status(status, address, never):
            up.set()
            over.wait(HANGS_AFTER_S)
        ended.set()

    address, up, over = free_address(), threading.Event(), threading.Event()
    server = in_background(serve)
    assert up.wait(HANGS_AFTER_S)
    for _ in range(2):
        assert asked(address, "/metrics")[0] == 200
    over.set()
    wait_until(lambda: status.stage == "finished" or ended.is_set())
    server.join(HANGS_AFTER_S)
    assert ended.is_set()  # after the look, or after its patience


def test_the_last_look_ends_the_wait(status: RunStatus) -> None:
    with StatusEndpoint(status, "127.0.0.1:0") as endpoint:
        for _ in range(2):
            asked(endpoint.address, "/metrics")
        waits = in_background(lambda: endpoint.wait_for_last_look(never, HANGS_AFTER_S))
        asked(endpoint.address, "/healthz")
        assert waits.is_alive()  # health is not what says to Prometheus the stage
        asked(endpoint.address, "/metrics")
        waits.join(HANGS_AFTER_S)
        assert not waits.is_alive()


@pytest.mark.parametrize(("looks", "number"), [(1, None), (2, signal.SIGTERM)])
def test_nobody_is_waited_for_who_looks_once_and_nobody_after_a_signal(
    status: RunStatus, looks: int, number: int | None
) -> None:
    with StatusEndpoint(status, "127.0.0.1:0") as endpoint:
        for _ in range(looks):
            asked(endpoint.address, "/metrics")
        endpoint.wait_for_last_look(lambda: number, math.inf)


@pytest.mark.parametrize(
    ("error", "stage"),
    [
        (BudgetExhausted("a"), "ended"),
        (PeerEndedForGood("b"), "ended"),
        (PeerLeft("c"), "training"),
    ],
)
def test_only_a_run_that_resumes_is_left_in_training(
    status: RunStatus, error: SplitveilError, stage: str
) -> None:
    """So that the alert about a party that is gone does not fire for a run that is over."""

    def run() -> None:
        with serving_status(status, free_address(), never):
            status.enter_stage("training")
            raise error

    with pytest.raises(type(error)):
        run()
    assert status.stage == stage


# ---- the peer ----


def test_a_peer_that_is_lost_and_comes_back_is_counted_once(status: RunStatus) -> None:
    note = noting_attempts(status)
    connected = {"name": "splitveil_peer_connected", "peer": "active"}
    assert value_of(status, **connected) == 0
    status.name_run("0123456789abcdef")
    note(None)
    assert value_of(status, **connected) == 1
    assert status.readiness.ready
    for _ in range(3):
        note(PeerUnreachable("gone"))
    assert value_of(status, **connected) == 0
    assert status.readiness == (False, "the active party does not answer")
    note(None)
    assert value_of(status, "splitveil_connection_losses_total", peer="active") == 1
    assert value_of(status, "splitveil_reconnects_total", peer="active") == 1
    assert value_of(status, "splitveil_failed_calls_total", reason="PeerUnreachable") == 3
    assert status.readiness.ready


def test_refusals_are_counted_by_reason_and_a_peer_that_was_never_there_is_not_lost(
    status: RunStatus,
) -> None:
    noting_attempts(status)(PeerUnreachable("not yet"))
    assert value_of(status, "splitveil_connection_losses_total", peer="active") == 0
    status.note_refused(InvalidMessage("a"))
    status.note_refused(InvalidMessage("b"))
    assert value_of(status, "splitveil_refused_messages_total", reason="InvalidMessage") == 2


def test_what_is_not_known_yet_is_no_figure(example: Path) -> None:
    settings = load_active(example)
    for name in ("ledger_epsilon", "train_loss", "last_checkpoint_timestamp_seconds"):
        assert math.isnan(value_of(ActiveStatus(settings), f"splitveil_{name}"))


def test_steps_are_timed_from_end_to_end() -> None:
    now = iter([10.0, 10.5, 12.5])
    status = RunStatus("passive", CONTRACT, lambda: next(now))
    for step in range(3):
        status.note_step(Batch(0, "train", step, np.arange(8), b"", False, False))
    assert value_of(status, "splitveil_step_seconds_sum") == 2.5
    assert value_of(status, "splitveil_step_seconds_count") == 2
    assert value_of(status, "splitveil_rows_total") == 24


def load_active(folder: Path) -> ActiveSettings:
    return load_party_settings(ActiveSettings, folder / "active.yaml")


def test_the_status_may_change_within_a_run(example: Path) -> None:
    assert (
        {"status", "log_format"}
        <= MAY_CHANGE
        <= set(PassiveSettings.model_fields) | set(ActiveSettings.model_fields)
    )

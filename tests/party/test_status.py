"""What a party shows its operators: complete, free of labels, and without any hold on the run."""

import json
import math
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
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
from splitveil.common.party.endpoint import (
    REQUESTS_AT_ONCE,
    StatusEndpoint,
    check_free,
    serving_status,
)
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import Batch
from splitveil.common.run.progress import Phase
from splitveil.passive_party.grpc_peer import noting_attempts
from tests.support.commands import exit_code_of
from tests.support.endpoints import (
    Watched,
    asked,
    names_in,
    series_of,
    value_of,
    watched_run,
    without_time,
)
from tests.support.runs import in_background, write_example
from tests.support.simulation import free_address
from tests.support.tables import swap_labels, write_numbers
from tests.support.waiting import HANGS_AFTER_S

BIND = socket.socket.bind
CONTRACT = Contract(run_name="small", cut_shape=(4,), batch_size=8, epochs=3)
WITH_LIMITS = (
    "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 3}",
    "run_budget={sum_kl: 1000, adversary: knows class means only}",
)


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
    name = "splitveil_phase_seconds_total"
    used = {phase for phase in Phase if value_of(status, name, phase=phase) > 0}
    own = {Phase.DEFENSE, Phase.ANSWER} if party == "active" else set()
    assert used == own | {
        *(Phase.ALIGNMENT, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION, Phase.RECORD),
        *(Phase.CHECKPOINT, Phase.WAIT, Phase.OTHER),
    }
    # No metric is about one example: few series, and no id among their labels.
    series = series_of(status)
    assert len(series) < 200
    assert "person-" not in str(list(series))


def test_both_parties_name_the_run_and_count_the_same_bytes(watched: Watched) -> None:
    for status in (watched.active, watched.passive):
        (labels,) = [
            dict(labels) for name, labels in series_of(status) if name == "splitveil_run_info"
        ]
        assert labels["run"] == "small"
        assert re.fullmatch("[0-9a-f]{16}", labels["run_id"])
    assert watched.active.run_id == watched.passive.run_id
    for call in ("Handshake", "Align", "Train", "Evaluate"):
        for one, other in ((watched.passive, watched.active), (watched.active, watched.passive)):
            name = "splitveil_message_bytes_total"
            sent = value_of(one, name, direction="sent", call=call)
            assert sent == value_of(other, name, direction="received", call=call) > 0


def test_the_label_owner_sees_leak_and_ledger(watched: Watched) -> None:
    series = series_of(watched.active)
    attacks = {dict(labels)["attack"] for name, labels in series if name == "splitveil_leak_auc"}
    assert {"norm", "cosine"} <= attacks

    def largest(name: str, **labels: str) -> float:
        return value_of(watched.active, f"splitveil_ledger_{name}", statistic="max", **labels)

    assert 0.5 < largest("leak_auc_bound", adversary="knows class means only") < 1
    assert largest("leak_auc_bound", adversary="anybody") == 1
    left = value_of(watched.active, "splitveil_budget_left_ratio")
    assert left == pytest.approx(1 - largest("sum_kl") / 1000)
    assert value_of(watched.active, "splitveil_ledger_epsilon") == math.inf
    assert 0.5 < value_of(watched.active, "splitveil_evaluation_auc", split="test") <= 1


def test_the_feature_owner_s_metrics_are_the_same_if_all_labels_are_swapped(
    watched: Watched, tmp_path: Path
) -> None:
    """Although its adversary knows evaluation labels, and measures leak AUCs with them."""
    write_example(tmp_path)
    swap_labels(tmp_path / "active.csv")
    swapped = watched_run(tmp_path, tmp_path / "runs", *WITH_LIMITS)
    assert watched.passive_summary.leak is not None
    shown = without_time(series_of(watched.passive))
    assert shown == without_time(series_of(swapped.passive))
    assert len(shown) > 20
    # The comparison would notice: at the label owner, the same swap moves figures.
    assert without_time(series_of(watched.active)) != without_time(series_of(swapped.active))


def revealing(names: set[str]) -> list[str]:
    about = re.compile("leak|auc|(?<!connection_)loss|ledger|budget|label|calib|evaluat|rmse|_r2$")
    return [name for name in names if about.search(name)]


def test_the_feature_owner_has_no_metric_of_loss_leak_or_ledger(watched: Watched) -> None:
    assert not revealing(names_in(series_of(watched.passive)))
    assert revealing(names_in(series_of(watched.active)))


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
    assert not revealing(names_in(series_of(found.passive)))


def test_the_endpoint_answers_what_is_asked(
    status: RunStatus, served: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(served, "/healthz")
    assert (code, json.loads(text)["status"]) == (200, "ok")
    assert json.loads(text)["stage"] == "starting"
    code, text = asked(served, "/readyz")
    assert (code, json.loads(text)["reason"]) == (503, "starting")
    status.set_ready("serving")
    status.enter_stage("training")
    code, text = asked(served, "/readyz")
    ready = {"status": "ready", "reason": "serving", "stage": "training"}
    whose = {"party": "passive", "run": "small", "run_id": ""}
    assert (code, json.loads(text)) == (200, ready | whose)
    code, text = asked(served, "/metrics")
    assert code == 200
    assert re.findall(r'splitveil_stage{stage="(\w+)"} 1.0', text) == ["training"]
    assert asked(served, "/")[0] == 404
    assert asked(served, "/metrics", method="POST")[0] == 501
    for path in ("/healthz", "/metrics", "/metrics/"):
        assert asked(served, path, method="HEAD") == (200, "")
    assert asked(served, "/metrics", Accept="application/openmetrics-text; version=x")[0] == 200
    two_lengths = {"Content_Length": "0", "Transfer_Encoding": "chunked"}
    assert asked(served, "/metrics", **two_lengths)[0] == 400
    assert "Traceback" not in capfd.readouterr().err


def test_on_loopback_a_page_whose_name_leads_to_this_machine_gets_no_answer(
    status: RunStatus, served: str
) -> None:
    for name in ("localhost", "LocalHost:80", "127.0.0.1:80", "[::1]:80", "192.0.2.1:9464"):
        assert asked(served, "/metrics", Host=name)[0] == 200
    for name in ("rebound.example", "rebound.example:80", "localhost.rebound.example", "[x]", ""):
        assert asked(served, "/metrics", Host=name)[0] == 421
    # Whoever publishes it asks by the names of the network, such as those of containers.
    with StatusEndpoint(status, "0.0.0.0:0") as published:
        address = f"127.0.0.1:{published.address.split(':')[1]}"
        assert asked(address, "/metrics", Host="active-party:9464")[0] == 200


def test_an_endpoint_on_loopback_may_be_called_by_its_name_in_the_settings(
    status: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Debian gives the machine's own name an address on loopback.
    monkeypatch.setattr(socket.socket, "bind", lambda one, _: BIND(one, ("127.0.0.1", 0)))
    with StatusEndpoint(status, "Own-Name:0") as endpoint:
        assert asked(endpoint.address, "/healthz", Host="own-name:80")[0] == 200
        assert asked(endpoint.address, "/healthz", Host="other-name")[0] == 421


def test_a_port_that_is_taken_is_named(
    example: Path, served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for refused in (check_free, lambda address: StatusEndpoint(RunStatus("x", CONTRACT), address)):
        with pytest.raises(SettingsError, match=f"status: cannot serve at {served}: .*in use"):
            refused(served)
    words = ["check", str(example / "active.yaml"), "--set", f"status={served}"]
    assert exit_code_of(active_main, *words, "--set", f"listen={free_address()}") == 2
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


def never() -> None:
    return None


def test_a_run_that_is_over_is_shown_until_the_next_look_at_its_metrics(status: RunStatus) -> None:
    with StatusEndpoint(status, "127.0.0.1:0") as endpoint:
        for _ in range(2):
            asked(endpoint.address, "/metrics")
        waits = in_background(lambda: endpoint.wait_for_last_look(never, HANGS_AFTER_S))
        asked(endpoint.address, "/healthz")
        assert waits.is_alive()  # its health does not show Prometheus the stage
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
        (None, "finished"),
        (BudgetExhausted("a"), "ended"),
        (PeerEndedForGood("b"), "ended"),
        (PeerLeft("c"), "training"),
    ],
)
def test_only_a_run_that_resumes_is_left_in_training_and_not_shown_to_the_end(
    status: RunStatus, monkeypatch: pytest.MonkeyPatch, error: SplitveilError | None, stage: str
) -> None:
    """So that the alert about a party that is gone does not fire for a run that is over."""
    waits: list[object] = []
    monkeypatch.setattr(StatusEndpoint, "wait_for_last_look", lambda *_: waits.append(1))
    with suppress(SplitveilError), serving_status(status, free_address(), never):
        status.enter_stage("training")
        if error is not None:
            raise error
    assert status.stage == stage
    assert bool(waits) is (stage != "training")


def test_a_peer_that_is_lost_and_comes_back_is_counted_once(status: RunStatus) -> None:
    note = noting_attempts(status)
    connected = {"name": "splitveil_peer_connected", "peer": "active"}
    assert value_of(status, **connected) == 0
    note(PeerUnreachable("not yet"))  # who was never there is not lost
    assert value_of(status, "splitveil_connection_losses_total", peer="active") == 0
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
    assert value_of(status, "splitveil_failed_calls_total", reason="PeerUnreachable") == 4
    assert status.readiness.ready
    status.note_refused(InvalidMessage("a"))
    status.note_refused(InvalidMessage("b"))
    assert value_of(status, "splitveil_refused_messages_total", reason="InvalidMessage") == 2


def test_what_is_not_known_yet_is_no_figure(example: Path) -> None:
    status = ActiveStatus(load_party_settings(ActiveSettings, example / "active.yaml"))
    for name in ("ledger_epsilon", "train_loss", "last_checkpoint_timestamp_seconds"):
        assert math.isnan(value_of(status, f"splitveil_{name}"))


def test_steps_are_timed_from_end_to_end() -> None:
    now = iter([10.0, 10.5, 12.5])
    status = RunStatus("passive", CONTRACT, lambda: next(now))
    for step in range(3):
        status.note_step(Batch(0, "train", step, np.arange(8), b"", False, False))
    assert value_of(status, "splitveil_step_seconds_sum") == 2.5
    assert value_of(status, "splitveil_step_seconds_count") == 2
    assert value_of(status, "splitveil_rows_total") == 24

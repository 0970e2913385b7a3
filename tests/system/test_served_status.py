"""What both parties' ``serve`` tells operators: complete, and the same whatever was predicted."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from splitveil.active_party.http.status import OnlineStatus
from splitveil.active_party.predict.predictor import open_predictor
from splitveil.common.errors import TableRefused
from splitveil.common.party.endpoint import StatusEndpoint
from splitveil.common.record.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.passive_party.predict.service import InferenceStatus
from tests.support import inference
from tests.support.endpoints import asked as asked_at
from tests.support.endpoints import names_in, series_of, value_of, without_time
from tests.support.inference import (
    Program,
    Trained,
    answering,
    asked,
    connecting_to,
    free_port,
    train,
    write_wide_deep,
)
from tests.support.runs import CPU
from tests.support.tables import swap_labels
from tests.support.waiting import wait_until

FALLBACK = "serving.fallback=true"
CONTRACT = Contract(run_name="small", cut_shape=(4,), batch_size=8, epochs=3)


class Seen(NamedTuple):
    """What operators of both parties see after some requests, and what programs were answered."""

    active: OnlineStatus
    passive: InferenceStatus
    probabilities: NDArray[np.float32]


def seen_after_requests(trained: Trained) -> Seen:
    port, ids = free_port(), trained.test_ids[:20]
    with (
        inference.serving_passive(trained.passive("passive"), port) as service,
        answering(trained, FALLBACK, ports={"passive": port}) as program,
    ):
        probabilities = program.ask([*ids, "nobody"]).probabilities
        program.ask(ids[:3])
        program.ask(["nobody"])
        program.post(b"{")
        return Seen(program.status, service.status, probabilities)


@pytest.fixture(scope="module")
def seen(small: Trained) -> Seen:
    return seen_after_requests(small)


def outcomes(program: Program, what: str = "requests") -> dict[str, float]:
    return {
        dict(labels)["outcome"]: value
        for (name, labels), value in series_of(program.status).items()
        if name == f"splitveil_predict_{what}_total" and value
    }


# ---- what is counted ----


def test_requests_are_counted_by_outcome_and_ids_by_what_became_of_them(
    small: Trained, tmp_path: Path
) -> None:
    (tmp_path / "ids.txt").write_text("\n".join([*small.test_ids[:9], "nobody"]) + "\n")
    limits = ("serving.max_ids=20", f"serving.allowed_ids={tmp_path / 'ids.txt'}")
    with asked(small, *limits) as program:
        program.ask([*small.test_ids[:4], "nobody", "not allowed"])
        program.ask(["nobody"])
        program.ask(21 * ["nobody"])
        program.ask([""])
        program.post(b"{")
        program.post(b'{"ids": ["' + 200_000 * b"x" + b'"]}')
        found, ids = outcomes(program), outcomes(program, "ids")
    assert found == {"answered": 1, "not_found": 1, "too_large": 2, "unusable": 2}
    assert ids == {"joint": 4, "unknown": 2, "not_allowed": 1}
    assert value_of(program.status, "splitveil_predict_seconds_count") == 6
    assert value_of(program.status, "splitveil_question_ids_sum") == 6
    assert value_of(program.status, "splitveil_question_requests_sum") == 2
    assert value_of(program.status, "splitveil_predict_waiting") == 0


def test_requests_that_are_refused_or_that_nobody_can_answer_are_counted(
    small: Trained, tmp_path: Path
) -> None:
    tokens, ids = tmp_path / "tokens", small.test_ids
    tokens.write_text(f"scoring {40 * 's'}\n")
    tokens.chmod(0o600)
    limits = (f"serving.token_file={tokens}", "serving.ids_per_second=0.001")
    with asked(small, *limits) as program:
        program.ask(ids[:1])
        program.headers = {"Authorization": f"Bearer {40 * 's'}"}
        program.ask(ids[:1])
        refused = program.ask(ids[:5])
    assert outcomes(program) == {"answered": 1, "not_admitted": 1, "rate_limited": 1}
    assert outcomes(program, "ids") == {"joint": 1, "rate_limited": 5}
    assert int(refused.headers["retry-after"]) > 900
    with answering(small, ports={"passive": free_port()}) as program:
        program.ask(ids[:3])
    assert outcomes(program) == {"unavailable": 1}
    assert outcomes(program, "ids") == {"unavailable": 3}
    assert value_of(program.status, "splitveil_answering", model="none") == 1


def test_what_the_feature_owner_counts_is_what_was_asked(seen: Seen) -> None:
    assert value_of(seen.passive, "splitveil_embed_requests_total", call="Embed") == 3
    assert value_of(seen.passive, "splitveil_embed_requests_total", call="Describe") == 1
    assert value_of(seen.passive, "splitveil_embed_ids_total", outcome="known") == 23
    assert value_of(seen.passive, "splitveil_embed_ids_total", outcome="unknown") == 2
    assert value_of(seen.passive, "splitveil_embed_seconds_count") == 3
    assert value_of(seen.passive, "splitveil_served_rows") == 500
    for way, back in (("sent", "received"), ("received", "sent")):
        name = "splitveil_message_bytes_total"
        there = value_of(seen.passive, name, direction=way, call="Embed")
        assert there == value_of(seen.active, name, direction=back, call="Embed") > 0


def test_refusals_of_the_feature_owner_are_counted_by_reason(small: Trained) -> None:
    port = free_port()
    settings = small.active(connecting_to({"passive": port}))
    with (
        inference.serving_passive(small.passive("passive"), port) as service,
        open_predictor(settings, CPU, whole_table=True) as predictor,
        pytest.raises(TableRefused),
    ):
        predictor.take_tables(small.test_ids[:1])
    assert value_of(service.status, "splitveil_refused_messages_total", reason="TableRefused") == 1


def test_drift_is_shown_from_a_thousand_rows_on_and_test_rows_have_none(tmp_path: Path) -> None:
    """The predictions that are given out are, bit for bit, those that the bins were made of."""
    write_wide_deep(tmp_path)
    halves = "contract.split={kind: hash, train: 0.5, test: 0.5}"
    trained, port = train(tmp_path, tmp_path / "runs", halves), free_port()
    assert len(trained.test_ids) > 200
    with (
        inference.serving_passive(trained.passive("passive"), port) as service,
        answering(trained, ports={"passive": port}) as program,
    ):
        asked_for = 0
        while asked_for < 1000:
            shown = series_of(program.status) | series_of(service.status)
            assert not {"splitveil_score_psi", "splitveil_column_psi"} & names_in(shown)
            program.ask(trained.test_ids)
            asked_for += len(trained.test_ids)
    assert value_of(program.status, "splitveil_score_psi", score="0") == pytest.approx(0, abs=1e-9)
    shown = series_of(service.status)
    (index,) = (shown[one] for one in shown if one[0] == "splitveil_column_psi")
    assert 0 < index < 0.25


# ---- labels and predictions ----


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("swapped")
    write_wide_deep(folder)
    swap_labels(folder / "active.csv")
    return train(folder, folder / "runs", active=(FALLBACK,))


@pytest.fixture(scope="module")
def seen_of_swapped(swapped: Trained) -> Seen:
    return seen_after_requests(swapped)


@pytest.mark.parametrize("party", ["active", "passive"])
def test_metrics_are_the_same_if_all_labels_are_swapped(
    seen: Seen, seen_of_swapped: Seen, party: str
) -> None:
    """At the label owner, too: below a thousand predictions, nothing is said of their values."""
    here, there = getattr(seen, party), getattr(seen_of_swapped, party)
    assert not np.array_equal(seen.probabilities, seen_of_swapped.probabilities, equal_nan=True)
    assert without_time(series_of(here)) == without_time(series_of(there))
    assert len(without_time(series_of(here))) > 20


def test_drift_at_the_feature_owner_is_the_same_if_all_labels_are_swapped(
    small: Trained, swapped: Trained
) -> None:
    pages = []
    for trained in (small, swapped):
        port = free_port()
        with (
            inference.serving_passive(trained.passive("passive"), port) as service,
            answering(trained, ports={"passive": port}) as program,
        ):
            while value_of(service.status, "splitveil_embed_ids_total", outcome="known") < 1000:
                program.ask(small.test_ids)
        pages.append(without_time(series_of(service.status)))
    assert pages[0] == pages[1]
    assert "splitveil_column_psi" in names_in(pages[0])


def test_the_feature_owner_has_no_metric_of_predictions_or_labels(seen: Seen) -> None:
    telltale = re.compile("predict|leak|auc|loss|ledger|label|probab|fallback|joint")
    names = {one for one in names_in(series_of(seen.passive)) if "connection_losses" not in one}
    assert [name for name in names if telltale.search(name)] == []
    assert [name for name in names_in(series_of(seen.active)) if telltale.search(name)]


def test_no_metric_is_about_one_example(seen: Seen, small: Trained) -> None:
    """The series exist before the first request: none is added by who or what is asked for."""
    fresh = OnlineStatus(small.settings.active.contract)
    for status in (seen.active, seen.passive):
        text = json.dumps([str(key) for key in series_of(status)])
        assert not [one for one in (*small.test_ids, "nobody") if one in text]
    added = series_of(seen.active).keys() - series_of(fresh).keys()
    assert {name for name, _ in added} <= {
        "splitveil_run_info",
        "splitveil_messages_total",
        "splitveil_message_bytes_total",
        "splitveil_peer_silence_seconds",
    }


# ---- readiness ----


def test_the_label_owner_is_ready_while_the_joint_model_answers() -> None:
    own = OnlineStatus(CONTRACT)
    with StatusEndpoint(own, "127.0.0.1:0") as endpoint:

        def state() -> tuple[int, str, str]:
            code, text = asked_at(endpoint.address, "/readyz")
            seen = json.loads(text)
            return code, seen["reason"], seen["answering"]

        trouble: str | None = "passive party 'passive' is away"
        assert state() == (503, "starting", "none")
        own.follow(lambda: trouble, lambda: 0, fallback=True)
        assert state() == (503, trouble, "fallback")
        assert value_of(own, "splitveil_answering", model="fallback") == 1
        assert value_of(own, "splitveil_ready") == 0
        trouble = None
        assert state() == (200, "the joint model answers", "joint")
        assert value_of(own, "splitveil_ready") == 1
        assert value_of(own, "splitveil_stage", stage="serving") == 1
        own.close()
        assert state() == (503, "stopping", "none")
        assert json.loads(asked_at(endpoint.address, "/healthz")[1])["stage"] == "closing"


def test_the_state_of_a_passive_party_and_of_the_fallback_is_seen(small: Trained) -> None:
    port, ids = free_port(), small.test_ids[:3]
    with ExitStack() as resources:
        with inference.serving_passive(small.passive("passive"), port) as service:
            program = resources.enter_context(answering(small, FALLBACK, ports={"passive": port}))
            own = program.status
            program.ask(ids)
            assert value_of(own, "splitveil_peer_connected", peer="passive") == 1
            assert value_of(service.status, "splitveil_peer_connected", peer="active") == 1
            assert value_of(service.status, "splitveil_embed_streams") == 1
        wait_until(lambda: own.answering == "fallback")
        program.ask(ids)
        assert value_of(own, "splitveil_peer_connected", peer="passive") == 0
        assert not own.readiness.ready
        with inference.serving_passive(small.passive("passive"), port):
            wait_until(lambda: own.readiness.ready)
            program.ask(ids)
        assert value_of(own, "splitveil_reconnects_total", peer="passive") == 1
    assert outcomes(program) == {"answered": 2, "fallback": 1}
    assert outcomes(program, "ids") == {"joint": 6, "fallback": 3}
    assert service.status.stage == "closing"
    assert value_of(own, "splitveil_failed_calls_total", reason="PeerUnreachable") >= 1


def test_a_peer_that_has_nothing_to_ask_is_not_lost() -> None:
    own = InferenceStatus("passive", CONTRACT)
    own.note(Crossing("received", "Embed request", b"1"))
    own.note_embedded(3, 2, 0.1)
    own.note_stream_ended(0)
    assert value_of(own, "splitveil_peer_connected", peer="active") == 0
    assert value_of(own, "splitveil_connection_losses_total", peer="active") == 0
    own.note_described()
    assert value_of(own, "splitveil_peer_connected", peer="active") == 1
    assert value_of(own, "splitveil_reconnects_total", peer="active") == 0

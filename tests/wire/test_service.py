"""The real wire over localhost: the same results as without it, and how a run ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.errors import PeerError, PeerUnreachable
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.record.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import Batch, run_course
from splitveil.common.run.messages import Activation, Answer
from splitveil.common.wire.connection import Retrying
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.limits import SERVICE
from splitveil.common.wire.tensor_codec import TensorLimits, encode_activation
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.equality import assert_same_weights
from tests.support.loopback import peer_of, serving
from tests.support.peers import at_first_step
from tests.support.runs import Parties, build_parties, pipelined, run_in_process, run_over_grpc
from tests.support.waiting import HANGS_AFTER_S


def test_the_passive_party_waits_for_an_active_one_that_comes_later(
    example: Path, port: int
) -> None:
    parties = build_parties(example)
    with ThreadPoolExecutor(1) as executor, peer_of(parties, port) as peer:
        run = executor.submit(parties.run.run, peer)
        with pytest.raises(TimeoutError):
            run.result(1)
        with serving(parties, port):
            run.result(HANGS_AFTER_S)
    assert parties.session.stage is Stage.FINISHED


class ImpatientFromTheFirstStep(GrpcPeer):
    """Until then it has the patience of its settings, which a slow machine may need."""

    def send_activation(self, activation: Activation) -> None:
        self._reconnect = ReconnectSettings(max_s=1, deadline_s=1)
        self._retrying = Retrying(
            self._reconnect, lambda: None, self.connection.where, self.connection.renew
        )
        super().send_activation(activation)


def test_a_peer_that_takes_messages_and_never_answers_is_given_up(example: Path, port: int) -> None:
    """A connection that stands and says nothing: deadlines, not only keepalive."""
    parties, stuck, asked = build_parties(example), threading.Event(), list[int]()

    def never_answer(*_: object) -> None:
        asked.append(1)
        stuck.wait(HANGS_AFTER_S)

    parties.session.exchange = never_answer  # type: ignore[method-assign, assignment]
    with serving(parties, port), peer_of(parties, port, kind=ImpatientFromTheFirstStep) as peer:
        with pytest.raises(PeerUnreachable, match=r"has not answered for 1 s"):
            parties.run.run(peer)
        stuck.set()
    assert asked


def test_the_standard_health_service_answers(example: Path, port: int) -> None:
    parties = build_parties(example)
    with serving(parties, port), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=name)
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_fault_of_this_party_is_not_described_to_the_peer(example: Path, port: int) -> None:
    parties = build_parties(example)

    def break_down(*_: object) -> Activation:
        raise ValueError("secret detail")

    parties.session.exchange = break_down  # type: ignore[method-assign, assignment]
    with pytest.raises(PeerError, match="internal fault") as caught:
        run_over_grpc(parties, port)
    assert "secret" not in str(caught.value)
    assert parties.session.stage is Stage.ENDED


# ---- activations sent ahead ----


MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"


class Breaking(GrpcPeer):
    count = 0

    def receive_gradient(self) -> Answer:
        self.count += 1
        if self.count % 3 == 0 and self._train.stream is not None:
            assert len(self._train.unanswered) <= 4
            self._train.stream._call.cancel()
        if self.count % 4 == 0 and self._evaluate.stream is not None:
            self._evaluate.stream._call.cancel()
        return super().receive_gradient()


def test_broken_streams_change_no_bit(
    example: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contract, "unchunked_bytes", 100)
    both = pipelined(4)
    there, here = (build_parties(example, [*both, MARVELL], both) for _ in range(2))
    run_in_process(here)
    with serving(there, port), peer_of(there, port, kind=Breaking) as peer:
        there.run.run(peer)
    assert peer.count > 20
    assert_same_weights(there.weights(), here.weights())


class Crossings(list[str]):
    def note(self, crossing: Crossing) -> None:
        self.append(crossing.kind)


def test_what_is_sent_beyond_the_depth_is_read_and_answered_one_by_one_as_if_in_its_turn(
    example: Path, port: int
) -> None:
    """An epoch's questions, and one of the next, are all under way before any is answered."""
    (there, first), (here, _) = (at_first_step(example, *pipelined(2), MARVELL) for _ in range(2))
    assert there.passive.rows is not None
    course = run_course(there.run.contract, there.passive.rows)
    training = [batch for batch in course if batch.split == "train"]
    due = [batch for batch in training if batch.epoch == 0]
    limits, crossed, all_sent = TensorLimits.of(there.run.contract), Crossings(), threading.Event()

    def asked(parties: Parties, batch: Batch) -> Activation:
        values = first.values[: len(batch.positions)] * (1 + 0.1 * batch.step)
        return Activation(batch.identity(parties.session.run_id), values)

    def send() -> Iterator[bytes]:
        for batch in training[: len(due) + 1]:
            yield from (frame.data for frame in encode_activation(asked(there, batch), limits))
        all_sent.set()

    exchange, received = there.session.exchange, list[bytes]()

    def answer_late(*question: Any) -> Answer:
        assert all_sent.wait(HANGS_AFTER_S)
        return exchange(*question)

    there.session.exchange = answer_late  # type: ignore[method-assign, assignment]
    with (
        serving(there, port, transcript=crossed),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        train: Any = channel.stream_stream(method_path("Train"))
        with pytest.raises(grpc.RpcError) as refused:
            received.extend(train(send(), timeout=HANGS_AFTER_S))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert crossed == ["Train request", "Train reply"] * len(due) + ["Train request"]
    for batch, reply in zip(due, received, strict=True):
        answer = here.session.exchange(asked(here, batch))
        here.session.finish_step()
        assert pb.TensorFrame.FromString(reply).data == answer.values.numpy().tobytes()
    assert there.session.leak_bounds() == here.session.leak_bounds()
    (party,) = there.session.parties
    assert len(party.answered) == 2
    assert there.session.lifecycle.error is None

"""Mutated messages to either party are refused, and the run of the honest parties continues."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.alignment.exchange import align, build_engine
from splitveil.common.errors import AlignmentError, ContractMismatch, InvalidMessage, PeerError
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.run.messages import Activation, Course, LeaveReason, Offer
from splitveil.common.wire import connection, limits
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.limits import STREAMS_PER_CONNECTION
from splitveil.common.wire.tensor_codec import Frame, TensorAssembler, TensorLimits
from splitveil.library.in_process import InProcessPeer
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import peer_hello
from tests.support.equality import assert_same_weights
from tests.support.inference import free_port
from tests.support.loopback import serving
from tests.support.mutations import (
    METHODS,
    UNARY,
    DirectSender,
    Mutator,
    Tape,
    WireSender,
    run_disturbed,
    send_mutants,
)
from tests.support.runs import Parties, build_parties, run_in_process
from tests.support.waiting import HANGS_AFTER_S
from tests.system.test_floods import Flood, silence


def assert_undisturbed(parties: Parties, example: Path) -> None:
    assert parties.session.stage is Stage.FINISHED
    assert parties.session.lifecycle.error is None
    undisturbed = build_parties(example)
    run_in_process(undisturbed)
    assert_same_weights(parties.weights(), undisturbed.weights())
    assert parties.active.losses == undisturbed.active.losses
    assert parties.active.evaluations == undisturbed.active.evaluations


def test_mutants_in_the_midst_of_a_run_change_no_bit_of_it(
    example: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two steps directly to the handlers, and over the wire while training continues.

    What is mutated was answered before: a mutated activation of the step that is due, under its
    right header, is an activation that a peer may send.
    """
    parties, tape = build_parties(example), Tape()
    statuses, executor = set[str](), ThreadPoolExecutor(1)
    floods: list[Future[None]] = []

    def send(sender: DirectSender | WireSender, mutator: Mutator, count: int) -> None:
        statuses.update(status for _, status in send_mutants(sender, mutator, count))

    def mutants(seed: int) -> Mutator:
        return Mutator(tape.requests(), seed, run_id=parties.run.run_id)

    def send_straight(service: ActiveService) -> None:
        send(DirectSender(service, parties.run.contract), mutants(1), 4000)

    def begin_flood(_: ActiveService) -> None:
        floods.append(executor.submit(send, sender, mutants(2), 800))

    def finish_flood(_: ActiveService) -> None:
        floods[0].result(HANGS_AFTER_S)
        sender.close()

    sender = WireSender(port)
    acts = {2: send_straight, 3: begin_flood, 5: send_straight, 8: finish_flood}
    service = run_disturbed(parties, port, tape, acts)
    assert "fault in a handler" not in caplog.text
    assert not {"INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED"} & statuses
    assert "UNAVAILABLE" not in statuses  # streams that ended are no longer counted
    assert {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"} <= statuses
    assert service.refused["InvalidMessage"] > 100
    assert service.refused["OutOfStep"] > 100
    assert_undisturbed(parties, example)


def test_a_handshake_under_another_contract_ends_no_run_that_is_under_way(
    example: Path, port: int
) -> None:
    parties, tape = build_parties(example), Tape()

    def meet(service: ActiveService) -> None:
        sender = DirectSender(service, parties.run.contract)
        request = pb.HandshakeRequest.FromString(tape.requests()["Handshake"][0])
        for changes in ({"contract": "{}"}, {"protocol_version": 2}, {"party": "other"}):
            changed = pb.HandshakeRequest.FromString(request.SerializeToString())
            for name, value in changes.items():
                setattr(changed, name, value)
            status = sender.send("Handshake", [changed.SerializeToString()])
            assert status is grpc.StatusCode.FAILED_PRECONDITION

    service = run_disturbed(parties, port, tape, {3: meet})
    assert service.refused == {"ContractMismatch": 3}
    assert_undisturbed(parties, example)


class StopsEarly(InProcessPeer):
    def evaluate(self, activation: Activation) -> Course:
        super().evaluate(activation)
        return Course.STOP


def test_a_run_is_not_over_in_the_midst_of_an_epoch(example: Path) -> None:
    parties = build_parties(example)
    with pytest.raises(InvalidMessage, match="middle of an epoch"):
        run_in_process(parties, StopsEarly)
    assert parties.passive.epochs == []


class Answers(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        self.replies: list[bytes] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if str(details.method).rpartition("/")[2] in UNARY:
            return grpc.unary_unary_rpc_method_handler(lambda _request, _: self.replies[0])
        return grpc.stream_stream_rpc_method_handler(self._stream)

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        next(requests, None)
        yield from self.replies


@contextmanager
def answering(port: int) -> Iterator[Answers]:
    answers = Answers()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[answers])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield answers
    finally:
        server.stop(0).wait()


@pytest.fixture(scope="module")
def recorded(example: Path) -> tuple[Parties, Tape]:
    parties, tape = build_parties(example), Tape()
    run_disturbed(parties, free_port(), tape, {})
    return parties, tape


def activation(parties: Parties, frame: bytes) -> Activation:
    message = TensorAssembler(TensorLimits.of(parties.run.contract), Activation).add(Frame(frame))
    assert message is not None
    return message


def asks(parties: Parties, tape: Tape) -> dict[str, Callable[[GrpcPeer], object]]:
    """Say for each method what the passive party asks, and check what it believes."""
    contract, sent = parties.run.contract, tape.requests()
    train, held_out = (activation(parties, sent[m][0]) for m in ("Train", "Evaluate"))
    engine = build_engine(contract.alignment)

    def handshake(peer: GrpcPeer) -> None:
        for offer in (None, Offer(train.batch.run_id, frozenset({0, 5}))):
            opening = peer.handshake("passive", contract.canonical_json(), bytes(32), offer)
            assert 0 < len(opening.run_id) <= 64
            assert len(opening.nonce) == len(opening.contract_digest) == 32
            assert offer is None or opening.resumes_at in (0, 5)

    def train_step(peer: GrpcPeer) -> None:
        peer.send_activation(train)
        gradient = peer.receive_gradient()
        assert gradient.batch == train.batch
        assert gradient.values.shape[1:] == contract.cut_shape
        assert bool(gradient.values.isfinite().all())

    def evaluate(peer: GrpcPeer) -> None:
        peer.send_held_out(held_out)
        assert peer.receive_course() in (Course.CONTINUE, Course.STOP)

    def ids(peer: GrpcPeer) -> None:
        names = [f"person-{n}" for n in range(30)]
        align(engine, names, peer.open_alignment(), nonce=bytes(32), run_id=train.batch.run_id)
        peer.close_alignment()

    def leave(peer: GrpcPeer) -> None:
        peer.leave(train.batch.run_id, LeaveReason.FINISHED)

    return {"Handshake": handshake, "Train": train_step, "Evaluate": evaluate,
            "Align": ids, "Leave": leave}  # fmt: skip


def replies_of(tape: Tape) -> dict[str, list[bytes]]:
    made = {"Leave": [b""]}
    return {
        method: tape.messages.get(f"{method} reply", made.get(method, [])) for method in METHODS
    }


def test_mutated_replies_are_errors_of_the_peer_or_believable(
    recorded: tuple[Parties, Tape], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty of every kind of call: never a crash, a hang, or a gradient that is none."""
    monkeypatch.setattr(connection, "FIRST_WAIT_S", 0.0001)
    monkeypatch.setattr(connection, "LONGEST_WAIT_S", 0.0001)
    parties, tape = recorded
    replies = replies_of(tape)
    ask, mutator = asks(parties, tape), Mutator(replies, seed=3)
    reconnect = ReconnectSettings(max_s=0.01, deadline_s=60)
    refused: dict[str, int] = dict.fromkeys(METHODS, 0)
    with (
        answering(port) as server,
        GrpcPeer(PeerConnection(f"127.0.0.1:{port}", parties.run.contract), reconnect) as peer,
    ):
        server.replies = [replies["Train"][0]]
        ask["Train"](peer)  # what is recorded and unchanged is believed
        for number in range(300):
            method = METHODS[number % len(METHODS)]
            kept: Sequence[bytes] = replies[method][: 4 if method == "Align" else 1]
            server.replies = [mutator.mutate(kept[0]), *kept[1:]]
            try:
                ask[method](peer)
            except (PeerError, AlignmentError, ContractMismatch):
                refused[method] += 1
            peer._drop_streams()
    assert all(refused[method] > 5 for method in METHODS if method != "Leave"), refused


# ---- idle streams, and silent alignments ----


PATIENCE = ReconnectSettings(max_s=300, deadline_s=300)


def handshake(flood: Flood, parties: Parties) -> str:
    request = pb.HandshakeRequest(
        protocol_version=1,
        party="passive",
        contract=parties.run.contract.canonical_json(),
        nonce_commitment=bytes(32),
    )
    call = flood.unary(flood.channel(), "Handshake")
    reply = pb.HandshakeReply.FromString(call(request.SerializeToString(), timeout=300))
    return str(reply.run_id)


@contextmanager
def met(parties: Parties, port: int) -> Iterator[tuple[ActiveService, Flood]]:
    flood = Flood(port)
    with serving(parties, port) as service, flood.open:
        yield service, flood


def align_with(flood: Flood, run_id: str, set_size: int) -> Any:
    """Say hello, and then neither say anything more nor end the stream."""
    message = peer_hello(set_size)
    message.run_id, message.chunk_ids = run_id, limits.CHUNK_IDS
    said = pb.AlignFrame(hello=message).SerializeToString()
    return flood.stream(flood.channel(), "Align", chain([said], silence()))


def run_honestly(parties: Parties, port: int) -> None:
    with GrpcPeer(PeerConnection(f"127.0.0.1:{port}", parties.run.contract), PATIENCE) as peer:
        parties.run.run(peer)


@pytest.mark.parametrize("method", ["Train", "Evaluate", "Align"])
def test_idle_streams_do_not_hold_others_up(example: Path, port: int, method: str) -> None:
    parties = build_parties(example)
    with met(parties, port) as (_, hostile):
        handshake(hostile, parties)
        channel = hostile.channel()
        for _ in range(STREAMS_PER_CONNECTION):
            hostile.stream(channel, method, silence())
        run_honestly(parties, port)
    assert_undisturbed(parties, example)


def test_an_alignment_that_never_gets_on_is_left_for_the_next_handshake(
    example: Path, port: int
) -> None:
    """It has announced the largest set that there may be, and sends none of it."""
    parties = build_parties(example)
    with met(parties, port) as (_, hostile):
        most = parties.run.contract.alignment.max_set_size
        for _ in range(3):
            run_id = handshake(hostile, parties)
            call = align_with(hostile, run_id, most)
            assert pb.AlignFrame.FromString(next(call)).WhichOneof("body") == "hello"
        run_honestly(parties, port)
    assert_undisturbed(parties, example)


def test_a_silent_alignment_ends_after_its_deadline(example: Path, port: int) -> None:
    parties = build_parties(example)
    with met(parties, port) as (service, hostile):
        service._deadline_s = 0.3
        run_id = handshake(hostile, parties)
        call = align_with(hostile, run_id, 100)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

"""The real wire over localhost: the same results as without it, and the replies to a bad peer."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run.stages import Stage
from splitveil.common.alignment import AlignmentEngine, AlignmentExchange, Splits
from splitveil.common.errors import (
    AlignmentError,
    ContractMismatch,
    Interrupted,
    PeerError,
    PeerLeft,
    PeerUnreachable,
    SettingsError,
)
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.run.messages import Activation, LeaveReason, Offer, Opening
from splitveil.common.wire.connection import PeerConnection, Retrying
from splitveil.common.wire.endpoint import SERVICE, channel_options, method_path
from splitveil.common.wire.tensor_codec import TensorLimits, encode_activation
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.compared import assert_same_weights
from tests.support.lines import peer_of
from tests.support.runs import (
    Parties,
    build_parties,
    in_background,
    run_in_process,
    run_over_grpc,
    serving,
)
from tests.support.waiting import HANGS_AFTER_S


def test_a_run_over_grpc_is_bit_equal_to_one_in_process(example: Path, port: int) -> None:
    there, here = build_parties(example), build_parties(example)
    run_over_grpc(there, port)
    run_in_process(here)
    assert_same_weights(there.weights(), here.weights())
    assert there.active.evaluations == here.active.evaluations
    assert there.active.losses == here.active.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(there.passive.received, here.passive.received, strict=True)
    )


def test_chunked_tensors_change_nothing(example: Path, port: int) -> None:
    overrides = [
        "contract.cut_shape=[512, 16]",
        "contract.wire={unchunked_bytes: 1000000, chunk_bytes: 524288}",
        "contract.epochs=1",
    ]
    there = build_parties(example, overrides, overrides)
    here = build_parties(example, overrides, overrides)
    run_over_grpc(there, port)
    run_in_process(here)
    assert_same_weights(there.weights(), here.weights())


def test_the_passive_party_waits_for_an_active_one_that_comes_later(
    example: Path, port: int
) -> None:
    parties = build_parties(example)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with peer_of(parties, port) as peer:
                parties.run.run(peer)
        except BaseException as error:
            errors.append(error)

    thread = in_background(run)
    thread.join(1.0)
    assert thread.is_alive()
    with serving(parties, port):
        thread.join(HANGS_AFTER_S)
        assert not thread.is_alive()
    assert not errors
    assert parties.session.stage is Stage.FINISHED


def test_a_peer_that_never_comes_is_given_up_after_max_s(example: Path, port: int) -> None:
    parties = build_parties(example, [], ["reconnect={max_s: 1, first_wait_s: 0.1}"])
    with peer_of(parties, port) as peer, pytest.raises(PeerUnreachable, match="1 s"):
        parties.run.run(peer)


class ImpatientFromTheFirstStep(GrpcPeer):
    """Until then it has the patience of its settings, which a slow machine may need."""

    def send_activation(self, activation: Activation) -> None:
        self._reconnect = ReconnectSettings(max_s=1, first_wait_s=0.1, deadline_s=1)
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


def test_waiting_can_be_interrupted(example: Path, port: int) -> None:
    parties = build_parties(example)
    contract, reconnect = parties.run.contract, parties.passive_settings.reconnect
    with (
        GrpcPeer(PeerConnection(f"127.0.0.1:{port}", contract), reconnect, lambda: 15) as peer,
        pytest.raises(Interrupted) as caught,
    ):
        parties.run.run(peer)
    assert caught.value.exit_code == 143


def test_different_contracts_are_named_on_both_sides(example: Path, port: int) -> None:
    parties = build_parties(example, ["contract.epochs=3", "contract.cut_shape=[5]"])
    with pytest.raises(ContractMismatch) as caught:
        run_over_grpc(parties, port)
    assert caught.value.fields == ("cut_shape", "epochs")
    assert str(caught.value).startswith("contract.cut_shape: ")
    assert caught.value.exit_code == 2
    assert parties.session.lifecycle.error is None


def test_too_small_an_intersection_is_found_by_both_with_the_counts(
    example: Path, port: int
) -> None:
    overrides = ["contract.alignment.min_aligned=361"]
    parties = build_parties(example, overrides, overrides)
    with pytest.raises(AlignmentError, match="360"):
        run_over_grpc(parties, port)
    assert isinstance(parties.session.lifecycle.error, AlignmentError)
    assert "360" in str(parties.session.lifecycle.error)


def test_an_interrupted_active_party_says_so(example: Path, port: int) -> None:
    parties = build_parties(example, ["contract.epochs=1000"], ["contract.epochs=1000"])
    steps = threading.Event()
    parties.passive.on_epoch = lambda epoch: steps.set()  # type: ignore[method-assign]

    def interrupt() -> None:
        steps.wait(HANGS_AFTER_S)
        parties.session.end(Interrupted())

    in_background(interrupt)
    with pytest.raises(PeerLeft, match="stopped by a person"):
        run_over_grpc(parties, port)


def test_a_port_that_is_taken_is_a_settings_error(example: Path, port: int) -> None:
    parties = build_parties(example)
    with serving(parties, port), pytest.raises(SettingsError, match="cannot serve"):
        serving(parties, port).__enter__()


def test_the_standard_health_service_answers(example: Path, port: int) -> None:
    parties = build_parties(example)
    with serving(parties, port), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=name)
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


# ---- a peer that breaks the rules, over the real wire ----


class AtFirstStep(GrpcPeer):
    """Stops at the first training step and keeps its message."""

    held_back: Activation

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        self.opening = super().handshake(party, contract_json, commitment, offer)
        return self.opening

    def send_activation(self, activation: Activation) -> None:
        self.held_back = activation
        raise KeyboardInterrupt

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """Leave without a word, so that the session stays open."""


@pytest.fixture
def at_first_step(
    example: Path, port: int
) -> Iterator[tuple[Parties, ActiveService, Activation, grpc.Channel]]:
    parties = build_parties(example)
    contract = parties.run.contract
    options = channel_options(contract)
    with (
        serving(parties, port) as service,
        peer_of(parties, port, kind=AtFirstStep) as peer,
        grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel,
    ):
        with pytest.raises(KeyboardInterrupt):
            parties.run.run(peer)
        yield parties, service, peer.held_back, channel


def call(channel: grpc.Channel, method: str, frames: list[bytes]) -> list[bytes]:
    stub: Any = channel.stream_stream(method_path(method))
    return list(stub(iter(frames), timeout=60))


def changed(frame: bytes, **changes: object) -> bytes:
    fields = pb.TensorFrame.FromString(frame)
    for name, value in changes.items():
        setattr(fields, name, value)
    return fields.SerializeToString()


# One or two for each status: test_tensor_codec.py has all that a frame can be.
BAD_FRAMES: list[tuple[Callable[[bytes], bytes], grpc.StatusCode]] = [
    (lambda frame: b"\xff" * 40, grpc.StatusCode.INVALID_ARGUMENT),
    (lambda frame: changed(frame, data=b"\0\0\xc0\x7f" * 256), grpc.StatusCode.INVALID_ARGUMENT),
    (lambda frame: changed(frame, rows=10**6), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (lambda frame: b"\0" * (2 * 1024 * 1024), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (lambda frame: changed(frame, step=5), grpc.StatusCode.FAILED_PRECONDITION),
    (lambda frame: changed(frame, epoch=1), grpc.StatusCode.FAILED_PRECONDITION),
    (lambda frame: changed(frame, run_id="x"), grpc.StatusCode.FAILED_PRECONDITION),
    (lambda frame: changed(frame, rows_digest=b"0" * 16), grpc.StatusCode.FAILED_PRECONDITION),
]


@pytest.mark.parametrize(("spoil", "code"), BAD_FRAMES)
def test_a_bad_message_gets_its_status_and_leaves_the_session_unharmed(
    at_first_step: tuple[Parties, ActiveService, Activation, grpc.Channel],
    spoil: Callable[[bytes], bytes],
    code: grpc.StatusCode,
) -> None:
    parties, service, message, channel = at_first_step
    (encoded,) = encode_activation(message, TensorLimits.of(parties.run.contract))
    frame = encoded.data
    if len(spoil(frame)) > 1_200_000:
        with grpc.insecure_channel(f"127.0.0.1:{service_port(channel)}") as wide:
            refuse(wide, spoil(frame), code)
    else:
        refuse(channel, spoil(frame), code)
        assert sum(service.refused.values()) == 1
    assert parties.session.lifecycle.error is None
    (answer,) = call(channel, "Train", [frame])
    assert pb.TensorFrame.FromString(answer).rows == 64


def refuse(channel: grpc.Channel, frame: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "Train", [frame])
    assert caught.value.code() is code


def service_port(channel: grpc.Channel) -> int:
    target: str = channel._channel.target().decode()  # type: ignore[attr-defined]
    return int(target.rpartition(":")[2])


def test_a_fault_of_this_party_is_not_described_to_the_peer(example: Path, port: int) -> None:
    parties = build_parties(example)

    def break_down(*_: object) -> Activation:
        raise ValueError("secret detail")

    parties.session.exchange = break_down  # type: ignore[method-assign, assignment]
    with pytest.raises(PeerError, match="internal fault") as caught:
        run_over_grpc(parties, port)
    assert "secret" not in str(caught.value)
    assert parties.session.stage is Stage.ENDED


class DisagreeingEngine:
    """Finds the common ids, and gives the peer another digest."""

    def __init__(self, engine: AlignmentEngine) -> None:
        self._engine = engine

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> AlignmentExchange:
        session = self._engine.start(ids, nonce=nonce, run_id=run_id, splits=splits)
        receive = session.receive

        def tampered(frame: pb.AlignFrame) -> list[pb.AlignFrame]:
            replies = list(receive(frame))
            for reply in replies:
                if reply.WhichOneof("body") == "done":
                    reply.done.digest = bytes(32)
            return replies

        session.receive = tampered  # type: ignore[method-assign]
        return session

    def close(self) -> None:
        self._engine.close()


def test_parties_that_disagree_on_the_intersection_never_train(example: Path, port: int) -> None:
    parties = build_parties(example)
    parties.run.aligner.engine = DisagreeingEngine(parties.run.aligner.engine)
    with pytest.raises(AlignmentError) as caught:
        run_over_grpc(parties, port)
    assert isinstance(parties.session.lifecycle.error, AlignmentError)
    assert caught.value.exit_code == parties.session.lifecycle.error.exit_code == 3
    assert parties.active.sent == []

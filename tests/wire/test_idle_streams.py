"""Idle streams do not keep other callers waiting, and silent alignments end."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.common.alignment.ecdh import ENGINE, VERSION
from splitveil.common.data.ids import NORMALISATION
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.wire import limits
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.limits import STREAMS_PER_CONNECTION
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.runs import Parties, build_parties, serving
from tests.wire.test_fuzz import assert_undisturbed

PATIENCE = ReconnectSettings(max_s=300, first_wait_s=0.1, longest_wait_s=0.5, deadline_s=300)


class Hostile:
    """Opens streams on connections of its own, and leaves them open."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._port = port
        self._stack = stack

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return self._stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{self._port}", options))

    def stream(self, channel: grpc.Channel, method: str, *messages: bytes) -> Any:
        """Send messages, and then neither say anything more nor end the stream."""
        waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for message in messages:
            waiting.put(message)
        self._stack.callback(waiting.put, None)
        stub: Any = channel.stream_stream(method_path(method))
        return stub(iter(waiting.get, None))

    def fill(self, method: str) -> None:
        """Open as many as one connection may have."""
        channel = self.channel()
        calls = [self.stream(channel, method) for _ in range(STREAMS_PER_CONNECTION)]
        self._stack.callback(lambda: [call.cancel() for call in calls])

    def handshake(self, parties: Parties) -> str:
        request = pb.HandshakeRequest(
            protocol_version=1,
            party="passive",
            contract=parties.run.contract.canonical_json(),
            nonce_commitment=bytes(32),
        )
        call: Any = self.channel().unary_unary(method_path("Handshake"))
        reply = pb.HandshakeReply.FromString(call(request.SerializeToString(), timeout=300))
        return str(reply.run_id)


@contextmanager
def met(parties: Parties, port: int) -> Iterator[tuple[ActiveService, Hostile]]:
    with ExitStack() as stack, serving(parties, port) as service:
        yield service, Hostile(port, stack)
        stack.close()


def hello(run_id: str, set_size: int) -> bytes:
    parameters: dict[str, Any] = {
        "engine": ENGINE,
        "version": VERSION,
        "normalisation": NORMALISATION,
        "tag_bytes": limits.TAG_BYTES,
        "chunk_ids": limits.CHUNK_IDS,
        "nonce": bytes(32),
    }
    message = pb.AlignHello(**parameters, set_size=set_size, run_id=run_id)
    return pb.AlignFrame(hello=message).SerializeToString()


def run_honestly(parties: Parties, port: int) -> None:
    with GrpcPeer(PeerConnection(f"127.0.0.1:{port}", parties.run.contract), PATIENCE) as peer:
        parties.run.run(peer)


@pytest.mark.parametrize("method", ["Train", "Evaluate", "Align"])
def test_idle_streams_do_not_hold_others_up(example: Path, port: int, method: str) -> None:
    parties = build_parties(example)
    with met(parties, port) as (_, hostile):
        hostile.handshake(parties)
        hostile.fill(method)
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
            run_id = hostile.handshake(parties)
            call = hostile.stream(hostile.channel(), "Align", hello(run_id, most))
            assert pb.AlignFrame.FromString(next(call)).WhichOneof("body") == "hello"
        run_honestly(parties, port)
    assert_undisturbed(parties, example)


def test_a_silent_alignment_ends_after_its_deadline(example: Path, port: int) -> None:
    parties = build_parties(example)
    with met(parties, port) as (service, hostile):
        service._deadline_s = 0.3
        run_id = hostile.handshake(parties)
        call = hostile.stream(hostile.channel(), "Align", hello(run_id, 100))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

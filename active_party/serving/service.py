"""The active party's gRPC service: translates between wire and session, no more."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.serving.error_interceptor import ErrorInterceptor
from splitveil.active_party.serving.stream_places import StreamPlaces
from splitveil.common.alignment import (
    WAIT_S,
    Agree,
    AlignChannel,
    Alignment,
    AlignmentEngine,
    StreamChannel,
    TriedIds,
    align,
    share_frames,
    wait_frame,
)
from splitveil.common.errors import (
    AlignmentError,
    ContractMismatch,
    InvalidMessage,
    NothingBegun,
    NotOpen,
    OthersAwaited,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
)
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.party.transcript import Transcript
from splitveil.common.run.contract import Contract
from splitveil.common.wire.audit_codec import decode_question
from splitveil.common.wire.endpoint import SERVICE, add_port, channel_options
from splitveil.common.wire.enums import leave_reason_from_wire
from splitveil.common.wire.evaluation_codec import encode_course
from splitveil.common.wire.handshake_codec import decode_greeting, encode_opening
from splitveil.common.wire.limits import (
    ALIGN_FRAME_BYTES,
    CONCURRENT_RPCS,
    HANDSHAKE_BYTES,
    PARTY_KEY,
    REFUSALS_LOGGED,
    SERVER_THREADS,
    SMALL_BYTES,
    STREAMS_PER_CONNECTION,
    THREADS_PER_PARTY,
    believed,
    reader,
)
from splitveil.common.wire.noted_calls import NotingServer
from splitveil.common.wire.tensor_codec import TensorAssembler, TensorLimits, encode_answer
from splitveil.common.wire.tls import PartyInterceptor
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

GOODBYE_WAIT_S = 5.0
_POLL_S = 0.2


class _Caller:
    """What the calls of one passive party share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard_at = time.monotonic()
        self.aligning = threading.Lock()
        self.exchange_of_ids: StreamChannel | None = None
        self.align_places = StreamPlaces()
        self.train_places = StreamPlaces()
        self.evaluate_places = StreamPlaces()

    def hear(self) -> None:
        """Note that something came, or that this party is ready for it."""
        self.heard_at = time.monotonic()


class ActiveService:
    """Serves one session. Each passive party has streams of its own, and waits by itself.

    Args:
        session: holds the rules.
        engine: this side of the alignment.
        deadline_s: how long the peer may be silent within the alignment.
        tried: counts the ids that each peer tries; by default while this process lives.
    """

    def __init__(
        self,
        session: ActiveSession,
        engine: AlignmentEngine,
        deadline_s: float,
        tried: TriedIds | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """How many messages were refused, by the kind of error."""
        self._broken_streams = 0
        self._session = session
        self._engine = engine
        self.tried = tried or TriedIds(session.contract.alignment.max_set_size)
        self._deadline_s = deadline_s
        self._limits = TensorLimits.of(session.contract)
        self._told_of_end = threading.Semaphore(0)
        self._callers = {name: _Caller(name) for name in session.contract.passive_parties}

    def silent_s(self, party: str) -> float:
        """Return the seconds since a passive party's last message."""
        return time.monotonic() - self._callers[party].heard_at

    def tell_end(
        self, timeout_s: float, interruption: Callable[[], int | None] = lambda: None
    ) -> None:
        """Let peers that are still there hear that the run ended early: their next call is told.

        Args:
            timeout_s: how long to wait for such calls.
            interruption: returns the signal that asks this party to stop, once there is one.
        """
        until = time.monotonic() + timeout_s
        untold = len(self._callers) if self._session.has_last_words else 0
        while untold and time.monotonic() < until:
            untold -= self._told_of_end.acquire(timeout=_POLL_S)
            if interruption() is not None:
                return

    def handshake(
        self, request: pb.HandshakeRequest, context: grpc.ServicerContext
    ) -> pb.HandshakeReply:
        """Open the run."""
        caller = self._caller(context)
        caller.hear()
        greeting = decode_greeting(request)
        if self._has_several and greeting.party != caller.name:
            raise InvalidMessage("a handshake that names another party than its call")
        opening = self._session.handshake(*greeting, context.is_active)
        if caller.exchange_of_ids is not None:
            # The peer has given it up, though its end may never come.
            caller.exchange_of_ids.close()
        caller.align_places.clear()  # nor may it ever take what it was sent
        logger.info("handshake done: run %s with party %s", opening.run_id, greeting.party)
        return encode_opening(opening)

    def align(
        self, requests: Iterator[pb.AlignFrame], context: grpc.ServicerContext
    ) -> Iterator[pb.AlignFrame]:
        """Run this side of the alignment over one stream, which ends when this side is ready."""
        caller = self._caller(context)
        with caller.align_places.enter(context):
            self._wait_for_the_alignment_before(caller, context)
            try:
                yield from self._align(caller, requests, context)
            finally:
                caller.exchange_of_ids = None
                caller.aligning.release()

    @staticmethod
    def _wait_for_the_alignment_before(caller: _Caller, context: grpc.ServicerContext) -> None:
        # A peer that was lost and came back may be faster than the end of its earlier stream.
        until = time.monotonic() + GOODBYE_WAIT_S
        while context.is_active() and time.monotonic() < until:
            if caller.aligning.acquire(timeout=0.1):
                return
        raise NotOpen("a second alignment at the same time")

    def _align(
        self, caller: _Caller, requests: Iterator[pb.AlignFrame], context: grpc.ServicerContext
    ) -> Iterator[pb.AlignFrame]:
        self._session.begin_alignment(party=caller.name)
        caller.align_places.answered(context)
        channel = StreamChannel(
            lambda _: self._heard(caller, requests), deadline_s=self._deadline_s
        )
        caller.exchange_of_ids = channel
        with ThreadPoolExecutor(1, thread_name_prefix="align") as executor:
            ready = executor.submit(self._align_over, channel, caller.name)
            try:
                yield from channel.outgoing
            finally:
                channel.close()  # where the stream has ended before the exchange
            ready.result()

    def _align_over(self, channel: StreamChannel, party: str) -> None:
        session, run_id = self._session, self._session.run_id
        try:
            alignment = align(
                self._engine,
                session.ids,
                channel,
                nonce=session.nonce,
                run_id=run_id,
                # An interrupted session says so now, and not only when all ids are through.
                progress=lambda _done_ids, _total_ids: session.begin_alignment(run_id, party),
                agree=agreeing(session, party) if self._has_several else None,
                splits=session.file_splits,
                counting=partial(self.tried.counted, party),
            )
        except AlignmentError as error:
            session.end(error)  # now, before the peer's goodbye that comes for the same reason
            raise
        except PeerUnreachable as error:
            # It may come back and align anew; nothing was answered yet.
            raise NotOpen(f"the alignment broke off: {error}") from error
        if not self._has_several:
            session.aligned(alignment.rows, alignment.peer_nonce)

    def train(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer activations with defended gradients; learn only after the answer has left."""
        assembler = TensorAssembler.of_activations(self._limits)
        caller = self._caller(context)
        with caller.train_places.enter(context):
            for frame in self._heard(caller, requests):
                activation = assembler.add(frame)
                if activation is not None:
                    answer = self._session.exchange(activation, caller.name, context.is_active)
                    caller.train_places.answered(context)
                    yield from encode_answer(answer, self._limits)
                    self._session.finish_step()

    def evaluate(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.EvaluateReply]:
        """Score held-out activations."""
        assembler = TensorAssembler.of_activations(self._limits)
        caller = self._caller(context)
        with caller.evaluate_places.enter(context):
            for frame in self._heard(caller, requests):
                activation = assembler.add(frame)
                if activation is not None:
                    course = self._session.evaluate(activation, caller.name, context.is_active)
                    caller.evaluate_places.answered(context)
                    yield encode_course(activation.batch, course)
                    self._session.finish_step()

    def audit(self, request: pb.AuditRequest, context: grpc.ServicerContext) -> pb.AuditReply:
        """Measure the peer's scores."""
        caller = self._caller(context)
        caller.hear()
        leak_auc = self._session.audit(decode_question(request), caller.name)
        return pb.AuditReply(leak_auc_percent=round(100 * leak_auc))

    def leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        """Take note of the peer's goodbye."""
        caller = self._caller(context)
        caller.hear()
        # A failing alignment fails on both sides: what this side found says more than the goodbye.
        reason = leave_reason_from_wire(request.reason)
        is_meant = request.run_id == self._session.run_id
        if is_meant and caller.aligning.acquire(timeout=GOODBYE_WAIT_S):
            caller.aligning.release()
        self._session.leave(request.run_id, reason, caller.name, context.is_active)
        return pb.LeaveReply()

    def on_error(self, error: Exception) -> None:
        """Log and count an error; one that is not the peer's fault ends the run."""
        if isinstance(error, (OthersAwaited, NothingBegun)):
            logger.info("%s", error)
            return
        if self._session.error is not None:
            self._told_of_end.release()
        # Contracts that differ end a run that waits for its peer, and the session does that itself.
        if isinstance(error, (ProtocolError, ContractMismatch)):
            kind = type(error).__name__
            self.refused[kind] += 1
            _warn(f"refused a message: {error}", self.refused[kind])
        elif isinstance(error, SplitveilError):
            self._session.end(error)
        else:
            logger.error("fault in a handler", exc_info=error)
            self._session.end(SplitveilError(f"fault in a handler: {error!r}"))

    @property
    def _has_several(self) -> bool:
        return len(self._callers) > 1

    def _caller(self, context: grpc.ServicerContext) -> _Caller:
        """Return the calling party; with credentials, the interceptor has compared the two."""
        if not self._has_several:
            return next(iter(self._callers.values()))
        named = [value for key, value in context.invocation_metadata() if key == PARTY_KEY]
        if len(named) != 1 or named[0] not in self._callers:
            raise InvalidMessage("a call that names no passive party of the contract")
        return self._callers[str(named[0])]

    def _heard(self, caller: _Caller, requests: Iterator[Any]) -> Iterator[Any]:
        """Pass a stream's messages on; one that breaks just ends, and the peer may come again."""
        while True:
            caller.hear()  # the peer's silence begins when this party is ready for its next message
            try:
                message = next(requests)
            except StopIteration:
                return
            except grpc.RpcError:
                if not self._session.over:
                    self._broken_streams += 1
                    _warn(
                        "the peer's stream broke off; waiting for it to come back",
                        self._broken_streams,
                    )
                return
            caller.hear()
            yield believed(message)


def agreeing(session: ActiveSession, party: str) -> Agree:
    """Return what tells a passive party, once all are aligned, which ids they all have."""

    def agree(alignment: Alignment, channel: AlignChannel) -> Alignment:
        session.aligned(alignment.rows, alignment.peer_nonce, party)
        while (share := session.share_of(party, WAIT_S)) is None:
            channel.send(wait_frame())
        for frame in share_frames(share):
            channel.send(frame)
        return alignment

    return agree


class HealthService(health.HealthServicer):  # type: ignore[misc]
    """Says when asked whether this party serves, and has no streams that would say it later."""

    def Watch(self, request: Any, context: grpc.ServicerContext) -> None:  # noqa: ARG002, N802 (gRPC's)
        """Refuse: streams that last would take every place that calls have."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check")


def start_server(
    service: ActiveService,
    contract: Contract,
    address: str,
    credentials: CredentialFiles | None = None,
    transcript: Transcript | None = None,
) -> grpc.Server:
    """Serve at an address, together with the standard health service.

    Args:
        service: answers the calls.
        contract: gives the limits, and lists who may call.
        address: host and port.
        credentials: this party's; without them it serves plain text, on loopback only.
        transcript: notes what crosses, if there is one.

    Raises:
        SettingsError: the address is taken, or not this machine's, or needs credentials.
    """
    # The outermost first. The status of an error is found outside of the transcript, which may be
    # what fails: on a full disk.
    interceptors: list[grpc.ServerInterceptor] = []
    parties = len(contract.passive_parties)
    if credentials is not None:
        interceptors.append(PartyInterceptor(contract))
    interceptors.append(ErrorInterceptor(service.on_error))
    if transcript is not None:
        interceptors.append(NotingServer(transcript))
    server = grpc.server(
        ThreadPoolExecutor(
            SERVER_THREADS + THREADS_PER_PARTY * (parties - 1), thread_name_prefix="grpc"
        ),
        interceptors=interceptors,
        options=[
            *channel_options(contract),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
            # A few kilobytes would become any number of them.
            ("grpc.compression_enabled_algorithms_bitset", 1),
        ],
        maximum_concurrent_rpcs=CONCURRENT_RPCS * parties,
    )
    handlers = method_handlers(service, contract)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health_servicer = HealthService()
    health_servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    add_port(server, address, credentials)
    server.start()
    return server


def method_handlers(
    service: ActiveService, contract: Contract
) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    """Return what reads, answers and writes the messages of each method."""
    return {
        "Handshake": _unary(service.handshake, reader(pb.HandshakeRequest, HANDSHAKE_BYTES)),
        "Audit": _unary(service.audit, reader(pb.AuditRequest, contract.max_message_bytes)),
        "Leave": _unary(service.leave, reader(pb.LeaveRequest, SMALL_BYTES)),
        "Align": grpc.stream_stream_rpc_method_handler(
            service.align, reader(pb.AlignFrame, ALIGN_FRAME_BYTES), pb.AlignFrame.SerializeToString
        ),
        # Tensors come and go as raw bytes: tensor_codec reads and writes them.
        "Train": grpc.stream_stream_rpc_method_handler(service.train),
        "Evaluate": grpc.stream_stream_rpc_method_handler(
            service.evaluate, None, pb.EvaluateReply.SerializeToString
        ),
    }


def _unary(
    behaviour: Callable[[Any, grpc.ServicerContext], Any], read: Callable[[bytes], Any]
) -> "grpc.RpcMethodHandler[Any, Any]":
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return behaviour(believed(request), context)

    return grpc.unary_unary_rpc_method_handler(
        answer, read, lambda reply: reply.SerializeToString()
    )


def _warn(text: str, count: int) -> None:
    """Log what came for the ``count``-th time: the first ones, and then every doubling."""
    if count <= REFUSALS_LOGGED:
        logger.warning("%s", text)
    elif count & (count - 1) == 0:
        logger.warning("%s (%d times so far)", text, count)

"""The active party at the other end of a gRPC channel, with deadlines and streams.

What the settings say of the connection is read here, and its state shown in a party's status.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil.common import errors
from splitveil.common.alignment.channel import AlignChannel, StreamChannel
from splitveil.common.errors import PeerError, PeerUnreachable
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.endpoint import check_free
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.party.party_status import OPEN, RunStatus
from splitveil.common.record.transcript import Transcript
from splitveil.common.run import messages
from splitveil.common.run.contract import ACTIVE, check_same_contract
from splitveil.common.run.messages import Activation
from splitveil.common.text.files import Closing
from splitveil.common.wire import probes, small_messages, tensor_codec
from splitveil.common.wire.connection import (
    FIRST_WAIT_S,
    Interruption,
    MessageStream,
    NoteAttempt,
    PeerConnection,
    Retrying,
)
from splitveil.common.wire.endpoint import HANDSHAKE_TIMEOUT_S, log_security, method_path
from splitveil.common.wire.http_proxy import HttpProxy, named_proxy, proxy_of_environment
from splitveil.common.wire.limits import (
    ALIGN_FRAME_BYTES,
    PARTY_KEY,
    PROBE_BYTES,
    SERVICE,
    SMALL_BYTES,
    Refused,
    believed,
    reader,
)
from splitveil.common.wire.recorded_calls import AllNotes, Notes
from splitveil.common.wire.status import error_from
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb

ReplyT = TypeVar("ReplyT")


class ActivationStream(Generic[ReplyT]):
    def __init__(
        self,
        open_stream: Callable[[], MessageStream],
        read: Callable[[MessageStream, Activation], ReplyT],
        limits: tensor_codec.TensorLimits,
    ) -> None:
        self.stream: MessageStream | None = None
        """None before the first reply is awaited, and after the stream was lost."""
        self.unanswered: deque[Activation] = deque()
        """Activations whose reply has not been received."""
        self._open_stream = open_stream
        self._read = read
        self._limits = limits

    def send(self, activation: Activation) -> None:
        self.unanswered.append(activation)
        if self.stream is not None:
            self.stream.send_all(tensor_codec.encode_activation(activation, self._limits))

    def oldest_reply(self) -> ReplyT:
        """Wait for the reply to the oldest activation without one.

        If there is no stream, one is opened, and every activation without a reply is sent again.
        A failed attempt abandons the stream, and can be repeated.
        """
        if not self.unanswered:
            raise RuntimeError("an activation must be sent first")
        if self.stream is None:
            self.stream = self._open_stream()
            for activation in self.unanswered:
                self.stream.send_all(tensor_codec.encode_activation(activation, self._limits))
        stream = self.stream
        try:
            return self._read(stream, self.unanswered[0])
        except errors.SplitveilError:
            self.stream = None
            stream.drop()
            raise

    def take(self) -> None:
        self.unanswered.popleft()

    def drop(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.drop()

    def forget(self) -> None:
        self.drop()
        self.unanswered.clear()

    def finish(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.finish()


GOODBYE_S = 15.0
"""Time to repeat the last goodbye to a peer that may just be starting again."""
HEALTH_TIMEOUT_S = 3.0

MessageT = TypeVar("MessageT", bound=Message)


class GrpcPeer(Closing):
    def __init__(
        self,
        connection: PeerConnection,
        reconnect: ReconnectSettings,
        interruption: Interruption = lambda: None,
        party: str | None = None,
        note: NoteAttempt = lambda _: None,
    ) -> None:
        self.connection = connection
        is_multi_party = len(connection.contract.passive_parties) > 1
        self._metadata = ((PARTY_KEY, party),) if is_multi_party and party is not None else None
        self._limits = tensor_codec.TensorLimits.of(connection.contract)
        self._reconnect = reconnect
        self._interruption = interruption
        self._retrying = Retrying(reconnect, interruption, connection.where, connection.renew, note)
        self._train = ActivationStream(
            lambda: self._open("Train", tensor_codec.Frame), self._read_answer, self._limits
        )
        self._evaluate = ActivationStream(
            lambda: self._open("Evaluate", reader(pb.EvaluateReply, SMALL_BYTES)),
            lambda stream, asked: small_messages.decode_course(
                believed(stream.receive()), asked.batch
            ),
            self._limits,
        )
        self._align: Any = None

    def close(self) -> None:
        for stream in (self._train, self._evaluate):
            stream.finish()
        if self._align is not None:
            self._align.cancel()
        self.connection.close()

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: messages.Offer | None = None
    ) -> messages.Opening:
        """Open a run, or resume one, waiting for an active party that does not serve yet."""
        self._drop_streams()
        request = small_messages.encode_greeting(party, contract_json, commitment, offer)

        def ask() -> messages.Opening:
            reply = self._unary("Handshake", request, pb.HandshakeReply, HANDSHAKE_TIMEOUT_S)
            return small_messages.decode_opening(reply, offer)

        try:
            return self._retrying.until_answered(ask)
        except errors.ContractMismatch:
            own = probes.Introduction(party, contract_json, time.time(), None)
            probe = pb.ProbeRequest(introduction=probes.encode_introduction(own))
            with suppress(errors.PeerError):  # what the refusal has said is enough
                found = self._unary(
                    "Probe", probe, pb.ProbeReply, HANDSHAKE_TIMEOUT_S, probes.SERVICE, PROBE_BYTES
                )
                theirs = probes.decode_introduction(found.introduction).contract
                check_same_contract(self.connection.contract, theirs, "the active party")
            raise

    def is_ready(self) -> bool:
        """Ask once whether the active party serves, or raise PeerError."""
        try:
            reply = health_pb2_grpc.HealthStub(self._connected()).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=HEALTH_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise self.connection.error_of(error) from error
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def open_alignment(self) -> AlignChannel:
        method: Any = self._connected().stream_stream(
            method_path("Align"),
            pb.AlignFrame.SerializeToString,
            reader(pb.AlignFrame, ALIGN_FRAME_BYTES),
        )

        def connect(outgoing: Iterator[pb.AlignFrame]) -> Iterator[pb.AlignFrame]:
            self._align = method(outgoing, metadata=self._metadata)
            return map(believed, self._align)

        return StreamChannel(
            connect, deadline_s=self._reconnect.deadline_s, translate=self.connection.error_of
        )

    def close_alignment(self) -> None:
        """Wait until the peer has the result as well, and is ready to train."""
        call, self._align = self._align, None
        ended = threading.Event()
        if call.add_callback(ended.set) and not ended.wait(self._reconnect.deadline_s):
            call.cancel()
            raise errors.PeerUnreachable("the peer did not get ready to train in time")
        if call.code() is not grpc.StatusCode.OK:
            raise error_from(call.code(), call.details())

    def send_activation(self, activation: messages.Activation) -> None:
        self._train.send(activation)

    def receive_gradient(self) -> messages.Answer:
        return self._receive(self._train)

    def send_held_out(self, activation: messages.Activation) -> None:
        self._evaluate.send(activation)

    def receive_course(self) -> messages.Course:
        return self._receive(self._evaluate)

    def _receive(self, stream: ActivationStream[ReplyT]) -> ReplyT:
        reply = self._retrying.until_answered(stream.oldest_reply)
        stream.take()
        return reply

    def _read_answer(
        self, stream: MessageStream, activation: messages.Activation
    ) -> messages.Answer:
        is_one_shot = self.connection.contract.is_one_shot
        assembler = tensor_codec.TensorAssembler.of_answers(self._limits, as_arrays=is_one_shot)
        while (answer := assembler.add(stream.receive())) is None:
            pass
        if answer.batch != activation.batch:
            raise errors.InvalidMessage("received a gradient for another step than the one due")
        return answer

    def leave(self, run_id: str, reason: messages.LeaveReason) -> None:
        """Say goodbye once; after a finished run for a while, because the peer waits for it."""
        request = pb.LeaveRequest(run_id=run_id, reason=small_messages.LEAVE_REASON_TO_WIRE[reason])
        patience_s = GOODBYE_S if reason is messages.LeaveReason.FINISHED else 0.0
        deadline = time.monotonic() + min(patience_s, self._reconnect.max_s)
        while True:
            try:
                self._unary("Leave", request, pb.LeaveReply, timeout_s=5.0)
            except errors.PeerUnreachable as error:
                if isinstance(error, errors.OthersAwaited):
                    deadline = time.monotonic() + patience_s  # the peer decides when to go
                if time.monotonic() > deadline:
                    raise
                self._retrying.sleep(FIRST_WAIT_S)
            else:
                return

    def _drop_streams(self) -> None:
        self._train.forget()
        self._evaluate.forget()
        if self._align is not None:
            self._align.cancel()
        self._align = None

    def _connected(self) -> grpc.Channel:
        if self.connection.is_outdated:
            self._train.drop()
            self._evaluate.drop()
        return self.connection.channel()

    def _unary(
        self,
        method: str,
        request: Any,
        reply: type[MessageT],
        timeout_s: float,
        service: str = SERVICE,
        max_bytes: int = SMALL_BYTES,
    ) -> MessageT:
        call = self._connected().unary_unary(
            method_path(method, service),
            request_serializer=type(request).SerializeToString,
            response_deserializer=reader(reply, max_bytes),
        )
        try:
            answer: MessageT | Refused = call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self.connection.error_of(error) from error
        return believed(answer)

    def _open(self, method: str, read: Callable[[bytes], Any]) -> MessageStream:
        call: Any = self._connected().stream_stream(
            method_path(method), tensor_codec.Frame.serialised, response_deserializer=read
        )
        named = partial(call, metadata=self._metadata)
        return MessageStream(
            named, self._reconnect.deadline_s, self._interruption, self.connection.error_of
        )


Connect = Callable[[Transcript | None, RunStatus, Interruption], GrpcPeer]


def noting_attempts(status: RunStatus) -> NoteAttempt:
    status.peers.expect(ACTIVE)

    def note(error: PeerError | None) -> None:
        if error is not None:
            status.note_failed_call(error)
            if isinstance(error, PeerUnreachable):
                status.peers.lost(ACTIVE)
                status.set_ready("the active party does not answer", ready=False)
            return
        status.peers.heard(ACTIVE)
        if status.run_id and not status.readiness.ready:
            status.set_ready(OPEN)

    return note


def http_proxy(settings: PassiveSettings) -> HttpProxy | None:
    match settings.proxy:
        case None:
            return None
        case "environment":
            return proxy_of_environment(settings.connect)
        case url:
            known = settings.proxy_credentials
            return named_proxy(url, None if known is None else settings.base_dir / known)


def checked_connection(settings: PassiveSettings) -> Connect:
    """Check the settings of connection and status, and return a function that connects."""
    credentials = credential_files(settings, settings.party)
    log_security(credentials, settings.connect, "connect")
    http_proxy(settings)
    check_free(settings.status)

    def connect(
        transcript: Transcript | None, status: RunStatus, interruption: Interruption
    ) -> GrpcPeer:
        notes = status if transcript is None else AllNotes(transcript, status)
        link = connection_of(settings, credentials, notes)
        noting = noting_attempts(status)
        return GrpcPeer(link, settings.reconnect, interruption, settings.party, noting)

    return connect


def connection_of(
    settings: PassiveSettings, credentials: CredentialFiles | None, notes: Notes | None = None
) -> PeerConnection:
    return PeerConnection(
        settings.connect, settings.contract, credentials, notes, http_proxy(settings)
    )


def idle_peer(settings: PassiveSettings) -> GrpcPeer:
    connection = connection_of(settings, credential_files(settings, settings.party))
    return GrpcPeer(connection, settings.reconnect, party=settings.party)

"""The active party at the other end of a gRPC channel: calls, deadlines, retries."""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil.common.alignment import AlignChannel, StreamChannel
from splitveil.common.errors import (
    Interrupted,
    InvalidMessage,
    OthersAwaited,
    PeerRenewed,
    PeerUnreachable,
    PeerUntrusted,
    ProtocolError,
    SplitveilError,
)
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.party.transcript import Transcript
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import (
    Activation,
    Answer,
    AuditQuestion,
    Course,
    LeaveReason,
    Offer,
    Opening,
)
from splitveil.common.wire.audit_codec import encode_question
from splitveil.common.wire.endpoint import HANDSHAKE_TIMEOUT_S, SERVICE, method_path, open_channel
from splitveil.common.wire.enums import LEAVE_REASON_TO_WIRE
from splitveil.common.wire.evaluation_codec import decode_course
from splitveil.common.wire.handshake_codec import Greeting, decode_opening, encode_greeting
from splitveil.common.wire.http_proxy import HttpProxy
from splitveil.common.wire.limits import (
    ALIGN_FRAME_BYTES,
    PARTY_KEY,
    SMALL_BYTES,
    Refused,
    believed,
    reader,
)
from splitveil.common.wire.noted_calls import NotingClient
from splitveil.common.wire.status import error_from
from splitveil.common.wire.tensor_codec import (
    TensorAssembler,
    TensorLimits,
    encode_activation,
)
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

FAREWELL_S = 2.0
MAX_DAMAGED = 3
"""How often in a row one question is asked again because it, or its answer, came damaged."""
GOODBYE_S = 15.0
"""How long the last goodbye is repeated to a peer that may just be starting again."""
HEALTH_TIMEOUT_S = 3.0

MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")
Interruption = Callable[[], int | None]


class GrpcPeer:
    """Speaks to the active party, and again after the connection was lost.

    Args:
        address: host and port of the active party.
        contract: gives limits and formats.
        reconnect: how long to try, and how long one answer may take.
        interruption: returns the signal that asks this party to stop, once there is one.
        credentials: this party's; without them plain text is spoken, on loopback only.
        transcript: notes what crosses, if there is one.
        party: this party's name, which every call carries where there are several.
        proxy: what to connect through, with credentials only.
    """

    def __init__(
        self,
        address: str,
        contract: Contract,
        reconnect: ReconnectSettings,
        interruption: Interruption = lambda: None,
        credentials: CredentialFiles | None = None,
        transcript: Transcript | None = None,
        party: str | None = None,
        proxy: HttpProxy | None = None,
    ) -> None:
        self.where = address if proxy is None else f"{address} through the proxy {proxy}"
        """The active party's address, in words."""
        self._address = address
        self._proxy = proxy
        self._contract = contract
        several = len(contract.passive_parties) > 1
        self._metadata = ((PARTY_KEY, party),) if several and party is not None else None
        self._limits = TensorLimits.of(contract)
        self._reconnect = reconnect
        self._interruption = interruption
        self._files = credentials
        self._shown = None if credentials is None else credentials.current()
        self._transcript = transcript
        # With credentials, opening it needs a peer that answers.
        self._channel = self._open_channel() if credentials is None else None
        self._has_to_look_again = False
        self._train: _Stream | None = None
        self._evaluate: _Stream | None = None
        self._align: Any = None
        self._last_activation: Activation | None = None
        self._was_answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every stream and the connection."""
        for stream in (self._train, self._evaluate):
            if stream is not None:
                stream.finish()
        if self._align is not None:
            self._align.cancel()
        if self._channel is not None:
            self._channel.close()

    def handshake(
        self, party: str, canonical_contract: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        """Open a run, or go on with one, waiting for an active party that is not there yet."""
        self._drop_streams()
        request = encode_greeting(Greeting(party, canonical_contract, commitment, offer))

        def ask() -> Opening:
            reply = self._unary("Handshake", request, pb.HandshakeReply, HANDSHAKE_TIMEOUT_S)
            return decode_opening(reply, offer)

        return self._retrying(ask)

    def is_ready(self) -> bool:
        """Ask once whether the active party serves.

        Raises:
            PeerError: nobody answers, or not somebody whom this party believes.
        """
        try:
            reply = health_pb2_grpc.HealthStub(self._connected()).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=HEALTH_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise self._error_of(error) from error
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def open_alignment(self) -> AlignChannel:
        """Open the alignment stream."""
        method = self._connected().stream_stream(
            method_path("Align"),
            pb.AlignFrame.SerializeToString,
            reader(pb.AlignFrame, ALIGN_FRAME_BYTES),
        )
        return StreamChannel(
            self._start_alignment(method),
            deadline_s=self._reconnect.deadline_s,
            translate=self._error_of,
        )

    def _start_alignment(self, method: Any) -> Callable[[Iterator[pb.AlignFrame]], Any]:
        def connect(outgoing: Iterator[pb.AlignFrame]) -> Any:
            self._align = method(outgoing, metadata=self._metadata)
            return map(believed, self._align)

        return connect

    def close_alignment(self) -> None:
        """Wait until the peer has its own result, and is ready to train."""
        call, self._align = self._align, None
        ended = threading.Event()
        if call.add_callback(ended.set) and not ended.wait(self._reconnect.deadline_s):
            call.cancel()
            raise PeerUnreachable("the peer did not get ready to train in time")
        if call.code() is not grpc.StatusCode.OK:
            raise error_from(call.code(), call.details())

    def send_activation(self, activation: Activation) -> None:
        """Send the activation of a training batch, without waiting for anything."""
        self._last_activation = activation
        if self._train is not None:
            self._train.send_all(encode_activation(activation, self._limits))

    def receive_gradient(self) -> Answer:
        """Wait for the gradient of the last activation, asking again where the stream broke."""
        return self._retrying(self._gradient_of_last_activation)

    def evaluate(self, activation: Activation) -> Course:
        """Send the activation of held-out rows, and return whether the run continues."""

        def ask() -> Course:
            if self._evaluate is None:
                self._evaluate = self._open("Evaluate", reader(pb.EvaluateReply, SMALL_BYTES))
            stream = self._evaluate
            stream.send_all(encode_activation(activation, self._limits))
            try:
                return decode_course(believed(stream.receive()), activation.batch)
            except SplitveilError:
                self._evaluate = None
                stream.drop()
                raise

        return self._retrying(ask)

    def audit(self, question: AuditQuestion) -> float:
        """Ask for the leak AUC of scores, once: it is worth no waiting."""
        request = encode_question(question)
        reply = self._unary("Audit", request, pb.AuditReply, self._reconnect.deadline_s)
        percent: int = reply.leak_auc_percent
        if not 50 <= percent <= 100:
            raise InvalidMessage(f"audit: {percent} % is no leak AUC")
        return percent / 100

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """Say goodbye, once; but for a while that a run has finished, as the peer waits for it."""
        request = pb.LeaveRequest(run_id=run_id, reason=LEAVE_REASON_TO_WIRE[reason])
        patience_s = GOODBYE_S if reason is LeaveReason.FINISHED else 0.0
        deadline = time.monotonic() + min(patience_s, self._reconnect.max_s)
        while True:
            try:
                self._unary("Leave", request, pb.LeaveReply, timeout_s=5.0)
            except PeerUnreachable as error:
                if isinstance(error, OthersAwaited):
                    deadline = time.monotonic() + patience_s  # the active party says when to go
                if time.monotonic() > deadline:
                    raise
                self._sleep(self._reconnect.first_wait_s)
            else:
                return

    def _drop_streams(self) -> None:
        """Forget what was under way: the peer answers nothing of it after a handshake."""
        for stream in (self._train, self._evaluate):
            if stream is not None:
                stream.drop()
        if self._align is not None:
            self._align.cancel()
        self._train = self._evaluate = self._align = self._last_activation = None

    def _gradient_of_last_activation(self) -> Answer:
        if self._last_activation is None:
            raise RuntimeError("no activation was sent")
        if self._train is None:
            self._train = self._open("Train", None)
            self._train.send_all(encode_activation(self._last_activation, self._limits))
        stream, assembler = self._train, TensorAssembler.of_answers(self._limits)
        try:
            while True:
                answer = assembler.add(stream.receive())
                if answer is None:
                    continue
                if answer.batch != self._last_activation.batch:
                    raise InvalidMessage("a gradient came for another step than the last one")
                return answer
        except SplitveilError:
            self._train = None
            stream.drop()
            raise

    def _retrying(self, ask: Callable[[], ResultT]) -> ResultT:
        """Ask until an answer comes, ``reconnect.max_s`` have passed, or a signal says stop.

        What came damaged, or was refused because it did, is asked for a few times more: the same
        bytes get the same answer.
        """
        wait_s = self._reconnect.first_wait_s
        lost_at: float | None = None
        damaged = 0
        while True:
            try:
                answer = ask()
            except (PeerUntrusted, ProtocolError) as error:
                # What the peer is believed by may have been replaced since the channel was made.
                if isinstance(error, PeerUntrusted) and self._renew_channel():
                    continue
                damaged += 1
                hopeless = isinstance(error, PeerUntrusted) and not self._was_answered
                if hopeless or damaged > MAX_DAMAGED:
                    raise
                logger.warning("%s; asking again", error)
                left_s = wait_s
            except PeerUnreachable as error:
                now = time.monotonic()
                if lost_at is None:
                    lost_at = now
                    logger.warning(
                        "%s at %s; trying for up to %g s",
                        error,
                        self.where,
                        self._reconnect.max_s,
                    )
                left_s = lost_at + self._reconnect.max_s - now
                if left_s <= 0:
                    raise PeerUnreachable(
                        f"{self.where} has not answered for {self._reconnect.max_s:g} s "
                        f"(reconnect.max_s)"
                    ) from error
            else:
                self._was_answered = True
                return answer
            self._renew_channel()
            self._sleep(min(wait_s * random.uniform(0.5, 1.0), left_s))
            wait_s = min(2 * wait_s, self._reconnect.longest_wait_s)

    def _renew_channel(self) -> bool:
        """Connect with the certificates as they are now, if they are others than before.

        A channel keeps those that it was made with.
        """
        now = None if self._files is None else self._files.current()
        if now is self._shown:
            return False
        self._shown = now
        self._has_to_look_again = True
        return True

    def _connected(self) -> grpc.Channel:
        """Return the channel, made anew where other certificates are in use than it was made with.

        Raises:
            PeerError: nobody answers, or not somebody whom this party believes.
        """
        if self._has_to_look_again and self._channel is not None:
            for stream in (self._train, self._evaluate):
                if stream is not None:
                    stream.drop()
            self._train = self._evaluate = None
            self._channel.close()
            self._channel = None
        self._has_to_look_again = False
        if self._channel is None:
            self._channel = self._open_channel()
        return self._channel

    def _error_of(self, error: Exception) -> SplitveilError:
        meaning = _error_of(error)
        if isinstance(meaning, PeerRenewed):
            self._has_to_look_again = True
        return meaning

    def _open_channel(self) -> grpc.Channel:
        channel = open_channel(self._address, self._contract, self._shown, self._proxy)
        if self._transcript is None:
            return channel
        return grpc.intercept_channel(channel, NotingClient(self._transcript))

    def _sleep(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            signal_number = self._interruption()
            if signal_number is not None:
                raise Interrupted(signal_number)
            time.sleep(min(left, 0.1))

    def _unary(
        self, method: str, request: Any, reply: type[MessageT], timeout_s: float
    ) -> MessageT:
        call = self._connected().unary_unary(
            method_path(method),
            request_serializer=type(request).SerializeToString,
            response_deserializer=reader(reply, SMALL_BYTES),
        )
        try:
            answer: MessageT | Refused = call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error_of(error) from error
        return believed(answer)

    def _open(
        self,
        method: str,
        read: Callable[[bytes], Any] | None,
    ) -> "_Stream":
        """Open a stream of tensors, and of answers to them, which stay bytes without ``read``."""
        call: Any = self._connected().stream_stream(method_path(method), response_deserializer=read)
        named = partial(call, metadata=self._metadata)
        return _Stream(named, self._reconnect.deadline_s, self._interruption, self._error_of)


class _Stream:
    """One bidirectional stream, with a deadline for every answer instead of one for the stream."""

    def __init__(
        self,
        method: Any,
        deadline_s: float,
        interruption: Interruption,
        error_of: Callable[[Exception], SplitveilError],
    ) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = method(iter(self._outgoing.get, None))
        self._deadline_s = deadline_s
        self._interruption = interruption
        self._error_of = error_of
        self._waiting_since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="stream-deadline", daemon=True).start()

    def send_all(self, messages: Iterable[Any]) -> None:
        """Queue several messages."""
        for message in messages:
            self._outgoing.put(message)

    def receive(self) -> Any:
        """Wait for one message."""
        self._waiting_since = time.monotonic()
        try:
            return next(self._call)
        except StopIteration as error:
            raise PeerUnreachable("the peer closed the stream") from error
        except grpc.RpcError as error:
            raise self._error_of(error) from error
        finally:
            self._waiting_since = None

    def finish(self) -> None:
        """Close this side, and give the other a moment to close its own."""
        self._outgoing.put(None)
        ended = threading.Event()
        if self._call.add_callback(ended.set):
            ended.wait(FAREWELL_S)
        self.drop()

    def drop(self) -> None:
        """Abandon the stream; what was not received is lost."""
        self._closed.set()
        self._outgoing.put(None)
        self._call.cancel()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            since = self._waiting_since
            if since is None:
                continue
            patience = 5.0 if self._interruption() is not None else self._deadline_s
            if time.monotonic() - since > patience:
                self._call.cancel()


def _error_of(error: Exception) -> SplitveilError:
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = error.details() if isinstance(error, grpc.Call) else None
    return error_from(code, details)

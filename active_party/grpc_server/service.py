"""The active party's gRPC service: translates between the wire and the session, and no more."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import grpc

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment.channel import WAIT_S, AlignChannel, StreamChannel, wait_frame
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.exchange import Agree, Alignment, align, share_frames
from splitveil.common.alignment.store import ExchangeStore, ExchangeStores
from splitveil.common.alignment.tried_ids import TriedIds
from splitveil.common.errors import (
    AlignmentError,
    ContractMismatch,
    InvalidMessage,
    NotOpen,
    OthersAwaited,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
    StartedOver,
)
from splitveil.common.party.party_status import Presence, RunStatus
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.messages import Activation, LeaveReason
from splitveil.common.run.progress import Phase
from splitveil.common.text.imports import fault_of_own_code
from splitveil.common.text.log_lines import log_fields
from splitveil.common.wire import small_messages
from splitveil.common.wire.limits import PARTY_KEY, REFUSALS_LOGGED, believed
from splitveil.common.wire.tensor_codec import Frame, TensorAssembler, TensorLimits, encode_answer
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

GOODBYE_WAIT_S = 5.0
INTERRUPTED_WORDS_S = 3.0
"""Longest time that a party asked to stop waits for its peers to hear of it."""
_POLL_S = 0.2


class Stream(Protocol):
    """The part of ``grpc.ServicerContext`` that is used here."""

    def is_active(self) -> bool: ...

    def cancel(self) -> object:
        """End the call, even while it waits."""


class StreamSlots:
    """Two slots: one for the stream that was answered last, one for the newest of all others.

    A peer that lost its stream opens another, whose first answer takes the slot of the lost one, so
    no idle limit is needed. A thousand streams that send nothing, or nothing valid, only push each
    other out: they neither occupy more than one thread nor cost the answered stream its slot.
    """

    def __init__(self) -> None:
        self._answered: Stream | None = None
        self._newest: Stream | None = None
        self._lock = threading.Lock()

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """Hold a slot for a stream, and cancel the newest one that had no answer yet."""
        gone = None
        if stream.is_active():  # the peer may have given it up while it waited for a thread
            with self._lock:
                gone, self._newest = self._newest, stream
        if gone is not None:
            gone.cancel()
        try:
            yield
        finally:
            with self._lock:
                if stream is self._answered:
                    self._answered = None
                if stream is self._newest:
                    self._newest = None

    def answered(self, stream: Stream) -> None:
        """Note that a stream had an answer, and cancel the one that was answered before."""
        with self._lock:
            if stream is not self._newest:
                return
            gone, self._answered, self._newest = self._answered, stream, None
        if gone is not None:
            gone.cancel()

    def clear(self) -> None:
        with self._lock:
            gone, self._answered, self._newest = (self._answered, self._newest), None, None
        for stream in gone:
            if stream is not None:
                stream.cancel()


class Caller:
    """The record of one calling passive party."""

    def __init__(
        self, name: str, presence: Presence, exchange_store: ExchangeStore | None = None
    ) -> None:
        self.name = name
        self.exchange_store = exchange_store
        self._presence = presence
        self._has_outcome = False
        self._counting = threading.Lock()
        self._open_streams = 0
        self.heard_at = time.monotonic()
        self.aligning = threading.Lock()
        self.exchange_of_ids: StreamChannel | None = None
        self.align_slots = StreamSlots()
        self.train_slots = StreamSlots()
        self.evaluate_slots = StreamSlots()

    @property
    def has_open_stream(self) -> bool:
        """True if this party has an open stream that can carry messages to it."""
        return self._open_streams > 0 or self.exchange_of_ids is not None

    def hear(self) -> None:
        """Restart the clock of this party's silence."""
        self.heard_at = time.monotonic()

    def align_again(self) -> None:
        """Note that another exchange of ids begins."""
        self._has_outcome = False

    def is_aligned(self) -> None:
        """Note a message that shows that this party has the outcome of the exchange of ids."""
        if not self._has_outcome and self.exchange_store is not None:
            self.exchange_store.discard()
        self._has_outcome = True

    def arrive(self) -> None:
        self.hear()
        self._presence.heard(self.name)

    def opened_stream(self, context: grpc.ServicerContext, is_over: Callable[[], bool]) -> None:
        """Note that a stream of tensors is open; if the last one ends too early, the peer is lost.

        A killed peer's stream may look as if it had been closed.
        """

        def ended() -> None:
            with self._counting:
                self._open_streams -= 1
                is_last = self._open_streams == 0
            if is_last and not is_over():
                self._presence.lost(self.name)

        with self._counting:
            self._open_streams += 1
        if not context.add_callback(ended):
            ended()


class ActiveService:
    """Serves one session. Each passive party has streams of its own, and waits on its own."""

    def __init__(
        self,
        session: ActiveSession,
        engine: EcdhEngine,
        deadline_s: float,
        tried: TriedIds | None = None,
        status: RunStatus | None = None,
        exchanges: ExchangeStores | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Number of refused messages by kind of error."""
        self._broken_streams = 0
        self._session = session
        self._engine = engine
        self.tried = tried or TriedIds(session.contract.alignment.max_set_size)
        self._status = status or RunStatus(ACTIVE, session.contract)
        self._deadline_s = deadline_s
        self._limits = TensorLimits.of(session.contract)
        self._heard_of_end = threading.Semaphore(0)
        self._callers = {
            name: Caller(
                name, self._status.peers, None if exchanges is None else exchanges.of(name)
            )
            for name in session.contract.passive_parties
        }

    def silent_s(self, party: str) -> float:
        return time.monotonic() - self._callers[party].heard_at

    def announce_end(
        self, timeout_s: float, interruption: Callable[[], int | None] = lambda: None
    ) -> None:
        """Fail the next call of each connected peer, so that it learns that the run ended early.

        Args:
            timeout_s: how long to wait for these calls.
            interruption: returns the signal that asks this party to stop, if there is one. Then
                only peers in the middle of a call are waited for, and not for long.
        """
        begun = time.monotonic()
        until = begun + timeout_s
        unheard = len(self._callers) if self._session.lifecycle.has_unsent_notice else 0
        while unheard and time.monotonic() < until:
            unheard -= self._heard_of_end.acquire(timeout=_POLL_S)
            if interruption() is not None and not (
                time.monotonic() < begun + INTERRUPTED_WORDS_S
                and any(caller.has_open_stream for caller in self._callers.values())
            ):
                return

    def settle(self) -> None:
        """Keep no exchange of ids and no count of the ids tried: the run has finished."""
        for caller in self._callers.values():
            caller.is_aligned()
        self.tried.forget()

    def handshake(
        self, request: pb.HandshakeRequest, context: grpc.ServicerContext
    ) -> pb.HandshakeReply:
        caller = self._caller(context)
        caller.hear()
        greeting = small_messages.decode_greeting(request)
        if self._is_multi_party and greeting.party != caller.name:
            raise InvalidMessage("a handshake that names another party than its call")
        opening = self._session.handshake(*greeting, context.is_active)
        caller.arrive()
        self._status.name_run(opening.run_id)
        if caller.exchange_of_ids is not None:
            # The peer has given the exchange up, although the end of its stream may never arrive.
            caller.exchange_of_ids.close()
        caller.align_slots.clear()  # the peer may never read what it was sent, either
        logger.info(
            "handshake done: run %s with party %s",
            opening.run_id,
            greeting.party,
            extra=log_fields(peer=greeting.party),
        )
        return small_messages.encode_opening(opening)

    def align(
        self, requests: Iterator[pb.AlignFrame], context: grpc.ServicerContext
    ) -> Iterator[pb.AlignFrame]:
        """Run this side of the alignment over one stream, which ends when this side is done."""
        caller = self._caller(context)
        with caller.align_slots.enter(context):
            self._wait_for_the_alignment_before(caller, context)
            try:
                yield from self._align(caller, requests, context)
            finally:
                caller.exchange_of_ids = None
                caller.aligning.release()

    @staticmethod
    def _wait_for_the_alignment_before(caller: Caller, context: grpc.ServicerContext) -> None:
        # A peer that was lost may be back before the end of its earlier stream is noticed.
        until = time.monotonic() + GOODBYE_WAIT_S
        while context.is_active() and time.monotonic() < until:
            if caller.aligning.acquire(timeout=0.1):
                return
        raise NotOpen("a second alignment at the same time")

    def _align(
        self, caller: Caller, requests: Iterator[pb.AlignFrame], context: grpc.ServicerContext
    ) -> Iterator[pb.AlignFrame]:
        self._session.require_aligning(party=caller.name)
        caller.align_slots.answered(context)
        channel = StreamChannel(
            lambda _: self._heard(caller, requests), deadline_s=self._deadline_s
        )
        caller.exchange_of_ids = channel
        logger.debug("exchanging ids with party %s", caller.name)
        with (
            self._status.phases(Phase.ALIGNMENT),
            ThreadPoolExecutor(1, thread_name_prefix="align") as executor,
        ):
            ready = executor.submit(self._align_over, channel, caller)
            try:
                yield from channel.outgoing
            finally:
                channel.close()  # in case the stream has ended before the exchange
            ready.result()

    def _align_over(self, channel: StreamChannel, caller: Caller) -> None:
        session, run_id, party = self._session, self._session.run_id, caller.name
        caller.align_again()

        def progress(done_ids: int, total_ids: int) -> None:
            # An interrupted session says so now, and not only after all ids.
            session.require_aligning(run_id, party)
            self._status.note_alignment(done_ids, total_ids)

        try:
            alignment = align(
                self._engine,
                session.ids,
                channel,
                nonce=session.lifecycle.run.nonce,
                run_id=run_id,
                progress=progress,
                agree=agreeing(session, party) if self._is_multi_party else None,
                splits=session.file_splits,
                counting=partial(self.tried.counted, party),
                store=caller.exchange_store,
            )
        except AlignmentError as error:
            session.end(error)  # now: the peer is about to leave for the same reason
            raise
        except PeerUnreachable as error:
            # The peer may return and align again; nothing has been answered yet.
            raise NotOpen(f"the alignment broke off: {error}") from error
        if not self._is_multi_party:
            session.aligned(alignment.rows, alignment.peer_nonce)

    def train(self, requests: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[Frame]:
        """Answer activations with defended gradients; learn from each after its answer has left."""
        caller = self._caller(context)
        caller.opened_stream(context, lambda: self._session.stage.is_over)
        with caller.train_slots.enter(context):
            for activation in self._activations(caller, requests):
                answer = self._session.exchange(activation, caller.name, context.is_active)
                caller.train_slots.answered(context)
                yield from encode_answer(answer, self._limits)
                self._session.finish_step()

    def evaluate(
        self, requests: Iterator[Frame], context: grpc.ServicerContext
    ) -> Iterator[pb.EvaluateReply]:
        caller = self._caller(context)
        caller.opened_stream(context, lambda: self._session.stage.is_over)
        with caller.evaluate_slots.enter(context):
            for activation in self._activations(caller, requests):
                course = self._session.evaluate(activation, caller.name, context.is_active)
                caller.evaluate_slots.answered(context)
                yield small_messages.encode_course(activation.batch, course)
                self._session.finish_step()

    def leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        caller = self._caller(context)
        caller.hear()
        reason = small_messages.leave_reason_from_wire(request.reason)
        is_meant = request.run_id == self._session.run_id
        if is_meant and reason is LeaveReason.FINISHED:
            caller.is_aligned()
        # An alignment that fails does so on both sides: let this side finish, because its own error
        # says more than the goodbye.
        if is_meant and caller.aligning.acquire(timeout=GOODBYE_WAIT_S):
            caller.aligning.release()
        self._session.leave(request.run_id, reason, caller.name, context.is_active)
        return pb.LeaveReply()

    def on_error(self, error: Exception) -> None:
        """Log and count an error, and end the run unless it is the peer's fault."""
        if isinstance(error, (OthersAwaited, StartedOver)):
            logger.info("%s", error)
            return
        if self._session.lifecycle.error is not None:
            self._heard_of_end.release()
        if isinstance(error, (ProtocolError, ContractMismatch)):
            kind = type(error).__name__
            self.refused[kind] += 1
            self._status.note_refused(error)
            _warn(f"refused a message: {error}", self.refused[kind], kind)
        elif isinstance(error, SplitveilError):
            self._session.end(error)
        elif (own := fault_of_own_code(error)) is not None:
            self._session.end(own)
        else:
            logger.error("fault in a handler", exc_info=error)
            self._session.end(SplitveilError(f"fault in a handler: {error!r}"))

    @property
    def _is_multi_party(self) -> bool:
        return len(self._callers) > 1

    def _caller(self, context: grpc.ServicerContext) -> Caller:
        if not self._is_multi_party:
            return next(iter(self._callers.values()))
        named = [value for key, value in context.invocation_metadata() if key == PARTY_KEY]
        if len(named) != 1 or named[0] not in self._callers:
            raise InvalidMessage("a call that names no passive party of the contract")
        return self._callers[str(named[0])]

    def _activations(self, caller: Caller, requests: Iterator[Frame]) -> Iterator[Activation]:
        assembler = TensorAssembler(self._limits, Activation)
        for frame in self._heard(caller, requests):
            activation = assembler.add(frame)
            if activation is not None:
                caller.is_aligned()
                yield activation

    def _heard(self, caller: Caller, requests: Iterator[Any]) -> Iterator[Any]:
        """Yield the messages of a stream; a broken one just ends, as the peer may reconnect."""
        while True:
            caller.hear()  # the peer's silence starts when this party is ready for a message
            try:
                message = next(requests)
            except StopIteration:
                return
            except grpc.RpcError:
                if not self._session.stage.is_over:
                    self._broken_streams += 1
                    _warn(
                        "the peer's stream broke off; waiting for it to come back",
                        self._broken_streams,
                    )
                return
            caller.arrive()
            yield believed(message)


def agreeing(session: ActiveSession, party: str) -> Agree:
    """Return a function that says to a passive party which ids all parties have, once aligned."""

    def agree(alignment: Alignment, channel: AlignChannel) -> Alignment:
        session.aligned(alignment.rows, alignment.peer_nonce, party)
        while (share := session.share_of(party, WAIT_S)) is None:
            channel.send(wait_frame())
        for frame in share_frames(share):
            channel.send(frame)
        return alignment

    return agree


def _warn(text: str, count: int, reason: str = "PeerUnreachable") -> None:
    """Log an event that has occurred ``count`` times: the first few, and then every doubling."""
    fields = log_fields(reason=reason, count=count)
    if count <= REFUSALS_LOGGED:
        logger.warning("%s", text, extra=fields)
    elif count & (count - 1) == 0:
        logger.warning("%s (%d times so far)", text, count, extra=fields)

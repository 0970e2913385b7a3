"""The active party's record of one calling passive party."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc

from splitveil.common.alignment.channel import StreamChannel
from splitveil.common.alignment.store import ExchangeStore
from splitveil.common.party.party_status import Presence


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

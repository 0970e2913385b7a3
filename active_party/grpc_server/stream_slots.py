"""Limits the open streams of one method, so that an idle one never occupies a thread forever."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


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
            self._leave(stream)

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

    def _leave(self, stream: Stream) -> None:
        with self._lock:
            if stream is self._answered:
                self._answered = None
            if stream is self._newest:
                self._newest = None

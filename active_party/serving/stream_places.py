"""Which streams of one method may stay open: so that an idle one never holds a thread for ever."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stream(Protocol):
    """What is asked of a call, as gRPC's ``ServicerContext`` has it."""

    def is_active(self) -> bool:
        """Say whether it goes on."""

    def cancel(self) -> object:
        """End it, whatever it waits for."""


class StreamPlaces:
    """Two places: one for the stream that was answered last, one for the newest of all others.

    A peer that lost its stream opens another, whose first answer takes the place of the lost one:
    no idle limit is needed. And a thousand streams that say nothing, or nothing valid, only push
    each other out: they neither hold more than one thread nor cost the answered one its place.
    """

    def __init__(self) -> None:
        self._answered: Stream | None = None
        self._newest: Stream | None = None
        self._lock = threading.Lock()

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """Hold a place for a stream; the newest one that had no answer yet has to go."""
        gone = None
        if stream.is_active():  # it may have been given up while it waited for a thread
            with self._lock:
                gone, self._newest = self._newest, stream
        if gone is not None:
            gone.cancel()
        try:
            yield
        finally:
            self._leave(stream)

    def answered(self, stream: Stream) -> None:
        """Note that a message of a stream was right; whichever was answered before has to go."""
        with self._lock:
            if stream is not self._newest:
                return
            gone, self._answered, self._newest = self._answered, stream, None
        if gone is not None:
            gone.cancel()

    def clear(self) -> None:
        """Let every stream go."""
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

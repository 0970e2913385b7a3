"""Wraps a bidirectional gRPC stream, with a deadline per answer instead of one for the stream."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from splitveil.common.errors import PeerUnreachable, SplitveilError

FAREWELL_S = 2.0  # time that the other side of a stream may take to close it as well
Interruption = Callable[[], int | None]


class MessageStream:
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
        """Queue messages to be sent."""
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
        """Close this side, and give the other side a moment to close its own."""
        self._outgoing.put(None)
        ended = threading.Event()
        if self._call.add_callback(ended.set):
            ended.wait(FAREWELL_S)
        self.drop()

    def drop(self) -> None:
        """Abandon the stream; messages not yet received are lost."""
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

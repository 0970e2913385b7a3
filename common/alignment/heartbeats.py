"""Signs of life: what a party sends while it has nothing to send but is at work.

A party may be busy for longer than the other one is willing to hear nothing: it sorts its tags, or
writes them to a slow disk. It then sends a frame without content from time to time. A sign of life
must not hold the other party for ever, so that only so many of them may come between two frames
with content.
"""

import threading
import time
from types import TracebackType
from typing import Self

from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.alignment.share import WAIT_S, wait_frame
from splitveil.common.errors import SplitveilError, TooLarge
from splitveil.protos.split_learning_pb2 import AlignFrame

MOST_HEARTBEATS = 7200
"""Signs of life that are accepted between two frames with content: those of four hours."""


class Heartbeats:
    """A channel that sends signs of life by itself, and passes over those of the peer.

    Leaving its context ends the signs of life, and closes the channel only after an error.

    Args:
        every_s: seconds without a frame after which a sign of life is sent.
    """

    def __init__(
        self, channel: AlignChannel, every_s: float = WAIT_S, most: int = MOST_HEARTBEATS
    ) -> None:
        self._channel, self._every_s, self._most = channel, every_s, most
        self._sent_at = time.monotonic()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="align-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        if error is not None:
            self._channel.close()  # the thread may wait for a peer that takes nothing
        self._thread.join()

    def send(self, frame: AlignFrame) -> None:
        self._channel.send(frame)
        self._sent_at = time.monotonic()

    def receive(self) -> AlignFrame:
        """Wait for the peer's next frame with content; see ``AlignChannel``. Raises TooLarge."""
        for _ in range(self._most + 1):
            frame = self._channel.receive()
            if frame.WhichOneof("body") != "wait":
                return frame
        raise TooLarge(f"expected at most {self._most} signs of life in a row")

    def close(self) -> None:
        self._has_ended.set()
        self._channel.close()

    def _beat(self) -> None:
        while True:
            due_s = self._sent_at + self._every_s - time.monotonic()
            if self._has_ended.wait(max(due_s, 0.0)):
                return
            if time.monotonic() < self._sent_at + self._every_s:
                continue
            try:
                self.send(wait_frame())
            except SplitveilError:
                return  # the threads that send and receive find out by themselves

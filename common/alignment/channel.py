"""Channels carry alignment frames between the parties, in one process or over a stream.

Each direction is a bounded queue, so that a fast party cannot fill a slow party's memory, and
every wait has a deadline.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, Self

from splitveil.common.errors import PeerUnreachable, SplitveilError, TooLarge
from splitveil.protos.split_learning_pb2 import AlignFrame, AlignWait

DEFAULT_DEADLINE_S = 60.0

WAIT_S = 2.0  # seconds between two wait frames to a party that waits

# A frame holds at most one chunk, 128 KiB. Making one frame overlaps with sending another; longer
# queues only cost memory.
DEFAULT_QUEUE_FRAMES = 4


class AlignChannel(Protocol):
    """One party's end of the exchange. One thread may send while another receives."""

    def send(self, frame: AlignFrame) -> None:
        """Send a frame, waiting until the peer has taken earlier frames. Raises PeerUnreachable."""

    def receive(self) -> AlignFrame:
        """Wait for the peer's next frame, or raise PeerUnreachable."""

    def close(self) -> None:
        """Stop. Frames already sent still reach the peer, and pending waits on both ends return."""


class FrameQueue:
    """The frames in transit in one direction, never more than the capacity."""

    def __init__(self, capacity: int) -> None:
        self._frames: deque[AlignFrame] = deque()
        self._capacity = capacity
        self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def put(self, frame: AlignFrame, deadline_s: float | None) -> None:
        """Add a frame, waiting for space, or raise PeerUnreachable or Exception."""
        with self._changed:
            self._wait(lambda: len(self._frames) < self._capacity or self._closed, deadline_s)
            if self._closed:
                raise self._error or PeerUnreachable("the exchange of ids was closed")
            self._frames.append(frame)
            self._changed.notify_all()

    def get(self, deadline_s: float | None) -> AlignFrame | None:
        """Take the next frame; None after the last frame of a closed queue."""
        with self._changed:
            self._wait(lambda: self._frames or self._closed, deadline_s)
            if self._frames:
                frame = self._frames.popleft()
                self._changed.notify_all()
                return frame
            if self._error is not None:
                raise self._error
            return None

    def close(self, error: Exception | None = None) -> None:
        """Accept no more frames; queued frames can still be taken. Only the first call counts."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], object], deadline_s: float | None) -> None:
        if not self._changed.wait_for(condition, deadline_s):
            raise PeerUnreachable(f"the other party was silent for {deadline_s:g} s")


class QueueChannel:
    """A channel made of two queues, for instance to a peer in the same process."""

    def __init__(self, outgoing: FrameQueue, incoming: FrameQueue, deadline_s: float) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._deadline_s = deadline_s

    def send(self, frame: AlignFrame) -> None:
        self._outgoing.put(frame, self._deadline_s)

    def receive(self) -> AlignFrame:
        frame = self._incoming.get(self._deadline_s)
        if frame is None:
            raise PeerUnreachable(
                "the other party closed the exchange of ids before it was complete"
            )
        return frame

    def close(self) -> None:
        self._outgoing.close()
        self._incoming.close()


def channel_pair(
    *, deadline_s: float = DEFAULT_DEADLINE_S, queue_frames: int = DEFAULT_QUEUE_FRAMES
) -> tuple[QueueChannel, QueueChannel]:
    there, back = FrameQueue(queue_frames), FrameQueue(queue_frames)
    return QueueChannel(there, back, deadline_s), QueueChannel(back, there, deadline_s)


class StreamChannel(QueueChannel):
    """A channel over a bidirectional stream, the same on both of its ends.

    The client's end: ``StreamChannel(stub.Align)``. The server's end, in the handler::

        channel = StreamChannel(lambda _outgoing: request_iterator)
        future = executor.submit(align, engine, ids, channel, ...)
        yield from channel.outgoing
        future.result()

    ``align`` closes the channel when it returns; ``outgoing`` then ends after the last frame.
    """

    outgoing: Iterator[AlignFrame]  # the frames to put on the stream; for one consumer

    def __init__(
        self,
        connect: Callable[[Iterator[AlignFrame]], Iterable[AlignFrame]],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        queue_frames: int = DEFAULT_QUEUE_FRAMES,
        translate: Callable[[Exception], Exception] | None = None,
    ) -> None:
        outgoing, incoming = FrameQueue(queue_frames), FrameQueue(queue_frames)
        super().__init__(outgoing, incoming, deadline_s)
        self.outgoing = iter(lambda: outgoing.get(None), None)
        frames = connect(self.outgoing)
        # A thread, because waiting for the next frame of a stream has no deadline of its own. The
        # thread ends with the stream, or at the first frame after `close`.
        threading.Thread(
            target=_pump,
            args=(frames, incoming, translate or _unreachable),
            name="align-receive",
            daemon=True,
        ).start()


def _pump(
    frames: Iterable[AlignFrame], queue: FrameQueue, translate: Callable[[Exception], Exception]
) -> None:
    try:
        for frame in frames:
            queue.put(frame, None)
    except SplitveilError as error:  # handed to the thread that receives
        queue.close(error)
    except Exception as error:  # handed over as well
        queue.close(translate(error))
    else:
        queue.close()


def _unreachable(error: Exception) -> Exception:
    unreachable = PeerUnreachable("the stream of ids broke off")
    unreachable.__cause__ = error
    return unreachable


# ---- signs of life ----


def wait_frame() -> AlignFrame:
    return AlignFrame(wait=AlignWait())


MOST_HEARTBEATS = 7200
"""Signs of life accepted between two frames with content: four hours of them."""


class Heartbeats:
    """A channel that sends signs of life by itself, and ignores the peer's.

    A party may be busy for longer than the other one is willing to hear nothing: it sorts its tags,
    or writes them to a slow disk. It then sends a frame without content from time to time, but only
    so many between two frames with content: it must not hold the other party for ever.

    Leaving its context ends the signs of life, and closes the channel only after an error.

    Args:
        every_s: seconds without a frame before a sign of life is sent.
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

    def __exit__(self, *raised: object) -> None:
        self._has_ended.set()
        if any(raised):
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

"""Alignment: which ids both parties have, in one common order, and nothing else about the others.

An engine holds what outlives one alignment (worker processes), a session the rules of one
alignment, a channel moves frames, and ``align`` puts them together. All engines and all channels
can be exchanged.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from pydantic import Field

from splitveil.common.alignment.channel import (
    AlignChannel,
    QueueChannel,
    StreamChannel,
    channel_pair,
)
from splitveil.common.alignment.ecdh import EcdhEngine, RowIndices, Splits
from splitveil.common.alignment.share import (
    WAIT_S,
    Share,
    intersect,
    receive_share,
    share_frames,
    wait_frame,
)
from splitveil.common.alignment.tried_ids import TriedIds, file_of_count
from splitveil.common.run.contract import AlignmentSettings
from splitveil.common.settings import Section
from splitveil.protos.split_learning_pb2 import AlignFrame

__all__ = [
    "WAIT_S",
    "Agree",
    "AlignChannel",
    "Alignment",
    "AlignmentEngine",
    "AlignmentResources",
    "AlignmentSession",
    "QueueChannel",
    "RowIndices",
    "Share",
    "Splits",
    "StreamChannel",
    "TriedIds",
    "align",
    "build_engine",
    "channel_pair",
    "file_of_count",
    "intersect",
    "receive_share",
    "share_frames",
    "wait_frame",
]


class AlignmentResources(Section):
    """What a party spends on alignment; private."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Worker processes; 0 computes in the party's own process, on up to two cores."""


class AlignmentSession(Protocol):
    """The rules of one alignment: received frames in, frames to send out, no I/O.

    ``own_frames`` is iterated in one thread while another calls ``receive``.
    """

    @property
    def peer_nonce(self) -> bytes:
        """The peer's share of the joint seed, from its hello."""

    @property
    def peer_set_size(self) -> int:
        """How many ids the peer has."""

    @property
    def done_ids(self) -> int:
        """Ids of both parties that are through, of ``total_ids``."""

    @property
    def total_ids(self) -> int:
        """Ids of both parties together."""

    @property
    def answered_ids(self) -> int:
        """Ids of the peer for which tags were made."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will be sent or is expected."""

    def hello(self) -> AlignFrame:
        """Return the frame that opens the exchange."""

    def own_frames(self) -> Iterator[AlignFrame]:
        """Yield what is sent without being asked; after the peer's hello was received."""

    def receive(self, frame: AlignFrame) -> Iterable[AlignFrame]:
        """Take the peer's next frame; return what is to be sent because of it."""

    def result(self) -> RowIndices:
        """Return the rows of the common ids, in the common order, or raise AlignmentError."""


class AlignmentEngine(Protocol):
    """What outlives one alignment. Built before the party's first gRPC channel."""

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> AlignmentSession:
        """Begin one alignment, with keys of its own."""

    def close(self) -> None:
        """Give back what the engine holds."""


class Alignment(NamedTuple):
    """The outcome of one alignment."""

    rows: RowIndices  # own rows of the common ids, in the order that both parties share
    peer_nonce: bytes
    peer_set_size: int
    nonces: tuple[bytes, ...] = ()  # of all passive parties, where there are several


Counting = Callable[[AlignmentSession], AbstractContextManager[None]]
"""Counts what the peer tries in an exchange whose hello has come; see ``TriedIds.counted``."""

Agree = Callable[[Alignment, AlignChannel], Alignment]
"""What two parties do once they know their common ids, before they close the channel."""


def build_engine(settings: AlignmentSettings, resources: AlignmentResources) -> AlignmentEngine:
    """Build the engine that the contract names, and start its workers."""
    return EcdhEngine(
        min_aligned=settings.min_aligned,
        max_set_size=settings.max_set_size,
        workers=resources.workers,
    )


def align(
    engine: AlignmentEngine,
    ids: Sequence[str],
    channel: AlignChannel,
    *,
    nonce: bytes,
    run_id: str,
    progress: Callable[[int, int], None] | None = None,
    agree: Agree | None = None,
    splits: Splits | None = None,
    counting: Counting = lambda _: nullcontext(),
) -> Alignment:
    """Find the ids that both parties have. Closes the channel in the end, come what may.

    Args:
        engine: from ``build_engine``.
        ids: from ``canonical_ids``.
        channel: to the other party, which calls ``align`` on its end.
        nonce: this party's share of the joint seed.
        run_id: as the handshake gave it.
        progress: is told how many ids of both parties are through, and of how many.
        agree: what is left to do where there are several passive parties.
        splits: what this party's column says of the split of each id, where the contract splits by
            a column: the peer's must say the same of every common id.
        counting: surrounds all that tells the peer something of the ids.

    Raises:
        AlignmentError: the intersection is too small, or the parties disagree, on both ends; or
            the peer has tried too many ids.
        PeerError: the peer is silent, gone, or breaks a rule.
    """
    try:
        session = engine.start(ids, nonce=nonce, run_id=run_id, splits=splits)
        channel.send(session.hello())
        for reply in session.receive(channel.receive()):
            channel.send(reply)
        with counting(session):
            _exchange(session, channel, progress or _ignore)
        found = Alignment(session.result(), session.peer_nonce, session.peer_set_size)
        return found if agree is None else agree(found, channel)
    finally:
        channel.close()


def _exchange(
    session: AlignmentSession, channel: AlignChannel, progress: Callable[[int, int], None]
) -> None:
    """Receive in this thread and send in another.

    This thread never waits to send. If both parties did, each with full buffers between them, both
    would wait for ever for the other to receive. What queues up in ``replies`` instead is no more
    than the session keeps anyway.
    """
    replies: SimpleQueue[AlignFrame | None] = SimpleQueue()
    failures: list[BaseException] = []

    def send() -> None:
        try:
            _send_all(channel, session.own_frames(), replies)
        except BaseException as error:  # raised by the receiving thread
            failures.append(error)
            channel.close()

    sender = threading.Thread(target=send, name="align-send", daemon=True)
    sender.start()
    try:
        while not session.is_complete:
            for reply in session.receive(channel.receive()):
                replies.put(reply)
            progress(session.done_ids, session.total_ids)
    except BaseException as error:
        failures.append(error)
        channel.close()
    replies.put(None)
    sender.join()
    if failures:
        # The first one: closing the channel makes the other thread fail as well.
        raise failures[0]


def _send_all(
    channel: AlignChannel,
    own_frames: Iterator[AlignFrame],
    replies: SimpleQueue[AlignFrame | None],
) -> None:
    for frame in own_frames:
        channel.send(frame)
        for _ in range(replies.qsize()):
            reply = replies.get()
            if reply is None:
                return
            channel.send(reply)
    while (reply := replies.get()) is not None:
        channel.send(reply)


def _ignore(_done_ids: int, _total_ids: int) -> None:
    """Stand in for a progress callback."""

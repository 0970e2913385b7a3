"""Holds the tags of both parties: each commits to those it computed, then both show them in turns.

A tag that a party shows was computed before it saw any tag of the other, because the commitments
come first. A commitment includes the points of its sender, so that a copy of it binds nobody else,
and a party whose points are a copy of the other's is refused.
"""

import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator

from splitveil.common.alignment.store import ExchangeStore, ResumePoint, StoredName
from splitveil.common.errors import InvalidMessage, OutOfStep, TooLarge
from splitveil.common.wire.limits import POINT_BYTES, TAG_BYTES
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

TURNS = 64
"""Number of parts that each party shows its tags in; more if a part would exceed a chunk."""

_DOMAIN = b"splitveil alignment tags 2\x00"


Frames = Iterator[pb.AlignFrame]
"""Frames that are made one by one when they are sent: together, their tags may be many, as a party
with few ids is shown many tags for each of its own."""


class TagTurns:
    """The tags of one exchange. The threads that send and receive may use it at the same time.

    ``finish`` makes the frame that follows the last tags.
    """

    def __init__(self, num_own: int, chunk_ids: int, finish: Callable[[], pb.AlignFrame]) -> None:
        self.own = bytearray()
        """Tags of this party's ids, in the order of its points, computed by the peer."""

        self.of_peer = bytearray()
        """Tags of the peer's ids, in the order of its points, computed by this party."""

        self.num_own = num_own
        self.num_peer = 0  # number of the peer's ids, once its hello is there
        self.num_shown = 0  # number of the peer's ids whose tags it was sent
        self._store: ExchangeStore | None = None
        self._chunk_ids = chunk_ids
        self._part = part_of(chunk_ids)
        self._finish = finish
        self._is_finished = False
        self._is_on_disk = False
        self._num_stored = 0  # own points that an earlier attempt has stored
        self._points_sent = 0
        self._own_points = hashlib.sha256()
        self._peer_points = hashlib.sha256()
        self._has_committed = False
        self._peer_commitment: bytes | None = None
        self._earlier_commitment = b""
        self._answered_before = 0
        self._lock = threading.RLock()

    @property
    def num_sent(self) -> int:
        return self._points_sent // POINT_BYTES

    @property
    def num_taken(self) -> int:
        """The number of this party's ids whose tags the peer has shown."""
        return len(self.own) // TAG_BYTES

    @property
    def num_computed(self) -> int:
        """The number of the peer's ids whose tags this party has computed."""
        return len(self.of_peer) // TAG_BYTES

    @property
    def num_answered(self) -> int:
        """The largest number of tags that the peer can have been sent, in earlier attempts too."""
        return max(self.num_shown, self._answered_before)

    def stored_points(self) -> bytes:
        """Return the next chunk of own points if an earlier attempt has stored it."""
        count = min(self._chunk_ids, self._num_stored - self.num_sent)
        if self._store is None or count <= 0:
            return b""
        return self._store.part("own.points", self.num_sent, count)

    def note_sent(self, points: bytes) -> None:
        with self._lock:
            if self.num_sent >= self._num_stored:
                self._append("own.points", points)
            self._own_points.update(points)
            self._points_sent += len(points)

    def note_answered(self, points: bytes, tags: bytes) -> None:
        with self._lock:
            self._append("peer.points", points)
            self._append("peer.tags", tags)
            self._peer_points.update(points)
            self.of_peer += tags

    def store_in(self, store: ExchangeStore) -> None:
        """Store points and tags from now on, for an exchange that resumes this one."""
        with self._lock:
            self._store = store

    def restore(self, point: ResumePoint, peer: pb.AlignResume) -> bool:
        """Continue a stored exchange where both have what was sent.

        A peer that understates what it has is sent the same bytes again: it learns nothing new.
        Returns whether this bucket is complete, because the peer is in the next one.

        Raises InvalidMessage: the peer cannot have that.
        """
        if point.state.peer_size != self.num_peer:
            raise InvalidMessage("the other party resumes with another number of ids")
        state, store, num_held, num_taken = point.state, point.store, peer.points, peer.tags
        ahead = peer.bucket - state.bucket
        if ahead == 1 and peer.bucket < state.buckets:
            # It has this party's last message, and so all of the bucket.
            num_held, num_taken, digest = self.num_own, self.num_peer, None
        elif ahead == -1:
            # It has read nothing of this bucket yet.
            num_held, num_taken, digest = 0, 0, hashlib.sha256().digest()
        elif ahead:
            raise InvalidMessage("the other party resumes in another bucket")
        else:
            digest = peer.points_digest
        with self._lock:
            self.own, self.of_peer = point.own_tags, point.peer_tags
            are_whole = num_held == self.num_own or num_held % self._chunk_ids == 0
            sent = store.points_digest("own.points", min(num_held, point.own_points))
            is_sent = are_whole and num_held <= point.own_points
            if not is_sent or digest not in {None, sent.digest()}:
                raise InvalidMessage("the other party has kept other points than were sent")
            part = self._part(self.num_peer)
            if num_taken > self.num_peer or (num_taken % part and num_taken < self.num_peer):
                raise InvalidMessage("the other party has kept other tags than were shown")
            self._store, self._num_stored = store, point.own_points
            self._own_points, self._points_sent = sent, num_held * POINT_BYTES
            self._peer_points = store.points_digest("peer.points", point.peer_points)
            self.num_shown = num_taken
            self._earlier_commitment = point.peer_commitment
            if self._earlier_commitment:
                self._answered_before = self._due(num_taken)
        logger.info(
            "resuming an exchange of ids in bucket %d of %d: %d of %d own points were sent, %d of "
            "%d answered",
            *(state.bucket + 1, state.buckets, self.num_sent, self.num_own),
            *(self.num_computed, self.num_peer),
        )
        if ahead == 1:
            if self.num_taken < self.num_own or self.num_computed < self.num_peer:
                raise InvalidMessage("the other party resumes after tags that it has not shown")
            self._peer_commitment = self._earlier_commitment
            self._check_commitment()
        return ahead == 1

    def commit(self) -> Frames:
        """Commit to all tags, once, as soon as every point of both parties was sent and received.

        Raises InvalidMessage: the peer has sent this party's points back.
        """
        with self._lock:
            are_sent = self._points_sent == self.num_own * POINT_BYTES
            are_computed = self.num_computed == self.num_peer
            if self._has_committed or not are_sent or not are_computed:
                return iter(())
            if self._own_points.digest() == self._peer_points.digest():
                raise InvalidMessage("the other party sends this party's own points back")
            self._has_committed = True
            digest = _commitment(self._own_points.digest(), self.of_peer)
            frame = pb.AlignFrame(commitment=pb.AlignCommitment(digest=digest))
            return itertools.chain([frame], self._show())

    def receive_commitment(self, message: pb.AlignCommitment) -> Frames:
        """Take the peer's commitment, and return the tags that may be shown now.

        Raises InvalidMessage or OutOfStep: the peer broke a rule of the protocol.
        """
        with self._lock:
            if self._peer_commitment is not None:
                raise OutOfStep("received a second commitment to tags")
            if self.num_computed < self.num_peer:
                raise OutOfStep("received a commitment to tags before all points")
            if len(message.digest) != hashlib.sha256().digest_size:
                raise InvalidMessage(
                    f"expected a commitment of 32 bytes, got {len(message.digest)}"
                )
            if not self._earlier_commitment:
                self._append("peer.commitment", message.digest)
            elif message.digest != self._earlier_commitment:
                raise InvalidMessage("the other party commits to other tags than before")
            self._peer_commitment = message.digest
            return self._show()

    def receive(self, message: pb.Tags) -> Frames:
        """Take tags of this party's ids, and return those whose turn it is then.

        Raises InvalidMessage, OutOfStep or TooLarge: the peer broke a rule of the protocol.
        """
        with self._lock:
            if not self._has_committed or self._peer_commitment is None:
                raise OutOfStep("received tags before both parties had committed to theirs")
            part = self._part(self.num_own)
            expected = min(part, self.num_own - self.num_taken)
            if not expected:
                raise OutOfStep("received more tags than points were sent")
            check_chunk("tags", message.chunk, self.num_taken // part)
            check_length("tags", message.tags, expected * TAG_BYTES)
            self._append("own.tags", message.tags)
            self.own += message.tags
            return self._show()

    def _append(self, name: StoredName, data: bytes) -> None:
        if self._store is not None:
            self._store.append(name, data)

    def _check_commitment(self) -> None:
        if _commitment(self._peer_points.digest(), self.own) != self._peer_commitment:
            raise InvalidMessage("the other party's tags are not those that it committed to")

    def _show(self) -> Frames:
        """Show the tags whose turn it is, once both parties have committed to theirs.

        It is a party's turn while it has shown no larger share of its tags than the other.
        """
        if not self._has_committed or self._peer_commitment is None:
            return iter(())
        if not self._is_on_disk:
            if self._store is not None:
                self._store.sync()
            self._is_on_disk = True
        if self.num_taken == self.num_own:
            self._check_commitment()
        part = self._part(self.num_peer)
        first, self.num_shown = self.num_shown, self._due(self.num_shown)
        frames = (self._tags_frame(at, part) for at in range(first, self.num_shown, part))
        # In the same call as the last tags: another thread would send it before them.
        if self.num_taken < self.num_own or self._is_finished:
            return frames
        self._is_finished = True
        return itertools.chain(frames, [self._finish()])

    def _tags_frame(self, first: int, part: int) -> pb.AlignFrame:
        tags = bytes(self.of_peer[first * TAG_BYTES : (first + part) * TAG_BYTES])
        return pb.AlignFrame(tags=pb.Tags(chunk=first // part, tags=tags))

    def _due(self, shown: int) -> int:
        """Return the number of tags that are to be shown by now, if so many have been."""
        part = self._part(self.num_peer)
        while shown < self.num_peer and shown * self.num_own <= self.num_taken * self.num_peer:
            shown = min(shown + part, self.num_peer)
        return shown


def part_of(chunk_ids: int) -> Callable[[int], int]:
    """Return the function from a number of tags to the number of those shown at a time."""
    return lambda size: max(min(chunk_ids, -(-size // TURNS)), 1)


def _commitment(points_digest: bytes, tags: bytearray) -> bytes:
    digest = hashlib.sha256(_DOMAIN + points_digest)
    digest.update(tags)
    return digest.digest()


def check_chunk(what: str, number: int, expected: int) -> None:
    if number != expected:
        raise OutOfStep(f"expected {what} of chunk {expected}, got chunk {number}")


def check_length(what: str, data: bytes, expected: int) -> None:
    if len(data) > expected:
        raise TooLarge(f"expected {expected} bytes of {what}, got {len(data)}")
    if len(data) < expected:
        raise InvalidMessage(f"expected {expected} bytes of {what}, got {len(data)}")

"""Keeps the tags of both parties: each commits to those it computed, then both show them in turns.

A tag that a party shows was computed before it saw any tag of the other, because the commitments
come first. A commitment includes the points of its sender, so that a copy of it binds nobody else,
and a party whose points are a copy of the other's is refused.
"""

import hashlib
import threading

from splitveil.common.errors import InvalidMessage, OutOfStep, TooLarge
from splitveil.common.wire.limits import POINT_BYTES, TAG_BYTES
from splitveil.protos import split_learning_pb2 as pb

TURNS = 64
"""Number of parts in which each party shows its tags; more if a part would exceed a chunk."""

_DOMAIN = b"splitveil alignment tags 2\x00"


class TagTurns:
    """The tags of one exchange. The threads that send and receive may use it at the same time.

    Args:
        num_own: number of this party's ids.
        chunk_ids: largest number of points or tags in a message.
    """

    def __init__(self, num_own: int, chunk_ids: int) -> None:
        self.own = bytearray()
        """Tags of this party's ids, in the order of its points, computed by the peer."""

        self.of_peer = bytearray()
        """Tags of the peer's ids, in the order of its points, computed by this party."""

        self.num_peer = 0
        """Number of the peer's ids, once its hello is there."""

        self.num_shown = 0
        """Number of the peer's ids whose tags it was sent."""

        self._num_own = num_own
        self._chunk_ids = chunk_ids
        self._points_sent = 0
        self._own_points = hashlib.sha256()
        self._peer_points = hashlib.sha256()
        self._has_committed = False
        self._peer_commitment: bytes | None = None
        self._lock = threading.RLock()

    @property
    def num_received(self) -> int:
        """The number of this party's ids whose tags it was sent."""
        return len(self.own) // TAG_BYTES

    @property
    def num_computed(self) -> int:
        """The number of the peer's ids whose tags this party has computed."""
        return len(self.of_peer) // TAG_BYTES

    def note_sent(self, points: bytes) -> None:
        """Note points of this party, before they are sent."""
        with self._lock:
            self._own_points.update(points)
            self._points_sent += len(points)

    def note_answered(self, points: bytes, tags: bytes) -> None:
        """Keep the tags of some of the peer's points."""
        with self._lock:
            self._peer_points.update(points)
            self.of_peer += tags

    def commit(self) -> list[pb.AlignFrame]:
        """Commit to all tags, once, as soon as every point of both parties was sent and received.

        Raises:
            InvalidMessage: the peer has sent this party's points back.
        """
        with self._lock:
            are_sent = self._points_sent == self._num_own * POINT_BYTES
            are_computed = self.num_computed == self.num_peer
            if self._has_committed or not are_sent or not are_computed:
                return []
            if self._own_points.digest() == self._peer_points.digest():
                raise InvalidMessage("the other party sends this party's own points back")
            self._has_committed = True
            digest = _commitment(self._own_points.digest(), self.of_peer)
            frame = pb.AlignFrame(commitment=pb.AlignCommitment(digest=digest))
            return [frame, *self._show()]

    def receive_commitment(self, message: pb.AlignCommitment) -> list[pb.AlignFrame]:
        """Take the peer's commitment, and return the tags that may be shown now.

        Raises:
            InvalidMessage, OutOfStep: the peer broke a rule of the protocol.
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
            self._peer_commitment = message.digest
            return self._show()

    def receive(self, message: pb.Tags) -> list[pb.AlignFrame]:
        """Take tags of this party's ids, and return those whose turn it is then.

        Raises:
            InvalidMessage, OutOfStep, TooLarge: the peer broke a rule of the protocol.
        """
        with self._lock:
            if not self._has_committed or self._peer_commitment is None:
                raise OutOfStep("received tags before both parties had committed to theirs")
            part = self._part(self._num_own)
            expected = min(part, self._num_own - self.num_received)
            if not expected:
                raise OutOfStep("received more tags than points were sent")
            check_chunk("tags", message.chunk, self.num_received // part)
            check_length("tags", message.tags, expected * TAG_BYTES)
            self.own += message.tags
            if self.num_received == self._num_own:
                self._check_commitment()
            return self._show()

    def _check_commitment(self) -> None:
        if _commitment(self._peer_points.digest(), self.own) != self._peer_commitment:
            raise InvalidMessage("the other party's tags are not those that it committed to")

    def _show(self) -> list[pb.AlignFrame]:
        """Show the tags whose turn it is, once both parties have committed to theirs.

        It is a party's turn while it has shown no larger share of its tags than the other.
        """
        frames: list[pb.AlignFrame] = []
        if not self._has_committed or self._peer_commitment is None:
            return frames
        own, peer, part = self._num_own, self.num_peer, self._part(self.num_peer)
        while self.num_shown < peer and self.num_shown * own <= self.num_received * peer:
            first = self.num_shown
            tags = bytes(self.of_peer[first * TAG_BYTES : (first + part) * TAG_BYTES])
            self.num_shown = min(first + part, peer)
            frames.append(pb.AlignFrame(tags=pb.Tags(chunk=first // part, tags=tags)))
        return frames

    def _part(self, size: int) -> int:
        """Return the number of tags, out of so many, that are shown at a time."""
        return min(self._chunk_ids, -(-size // TURNS))


def _commitment(points_digest: bytes, tags: bytes | bytearray) -> bytes:
    return hashlib.sha256(_DOMAIN + points_digest + tags).digest()


def check_chunk(what: str, number: int, expected: int) -> None:
    """Refuse another chunk than the next one."""
    if number != expected:
        raise OutOfStep(f"expected {what} of chunk {expected}, got chunk {number}")


def check_length(what: str, data: bytes, expected: int) -> None:
    """Refuse data that are longer or shorter than they have to be."""
    if len(data) > expected:
        raise TooLarge(f"expected {expected} bytes of {what}, got {len(data)}")
    if len(data) < expected:
        raise InvalidMessage(f"expected {expected} bytes of {what}, got {len(data)}")

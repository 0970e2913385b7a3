"""Private set intersection by Diffie-Hellman on ristretto255.

    hello   both    name and parameters of the engine, size of the sender's set, its nonce
    points  both    a H(id) for every id of the sender, shuffled, in chunks
    commit  both    SHA-256 that binds the sender to its tags of all points of the other party
    tags    both    the first bytes of b (a H(id)), in the order of the points, in turns
    done    both    count and SHA-256 of the sorted common tags

H is the uniform map of RFC 9496 from SHA-512(domain || id); a and b are the parties' scalars, fresh
for every exchange. Since a b H(id) = b a H(id), two ids are equal exactly when their
tags are, and sorting the common tags gives both parties the same pseudo-random order, independent
of the order of their files. Two ids among n and m different ones share a tag with probability
n m / 2^127 (the lowest bit of an encoding is always zero): 2^-87 for a million each. Huberman,
Franklin, Hogg 1999; secure against parties that follow the protocol, under the decisional
Diffie-Hellman assumption.

Both parties learn the intersection and the size of the other's set if both follow the protocol to
its end. A party shows no tag before both are bound to all of theirs (``turns.py``): nobody can echo
tags or points, because a false common id would take b (b H(id)) from b H(id), the computational
Diffie-Hellman problem. The tags are shown in turns: a party that breaks off is ahead by one
sixty-fourth of them, or a chunk if that is less. Tags are not proved, however: a party that is
bound to wrong ones learns the intersection, while the other misses what they hide. The number of
ids that a peer tries, over all exchanges, is counted (``tried_ids.py``).

A stored exchange (``store.py``) continues where it broke off, if both hellos name it: with the same
scalars, points and commitments, so that it reveals nothing but what it would have revealed.
"""

import logging
import os
from collections.abc import Iterator, Sequence

import numpy as np

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.agreement import (
    agreed_rows,
    check_done,
    check_hello,
    number_of_exchange,
)
from splitveil.common.alignment.common_tags import common_rows, secret_order
from splitveil.common.alignment.interface import RowIndices, Splits
from splitveil.common.alignment.store import (
    ExchangeState,
    ExchangeStore,
    ResumePoint,
    digest_of_ids,
    forgetting,
)
from splitveil.common.alignment.tag_lists import SecretOrder
from splitveil.common.alignment.turns import Frames, TagTurns, check_chunk, check_length, part_of
from splitveil.common.alignment.workers import GroupOperations, WorkerPool
from splitveil.common.data.ids import NORMALISATION
from splitveil.common.errors import (
    AlignmentError,
    InvalidMessage,
    OutOfStep,
    SplitveilError,
    TooLarge,
)
from splitveil.common.wire import limits
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

ENGINE = "ecdh-ristretto255"
VERSION = 2
TAG_BYTES = limits.TAG_BYTES
CHUNK_IDS = limits.CHUNK_IDS


class EcdhEngine:
    """Starts exchanges, and owns the worker threads that they share."""

    def __init__(
        self,
        *,
        min_aligned: int,
        max_set_size: int,
        workers: int = 1,
        group: GroupOperations | None = None,
    ) -> None:
        self._min_aligned = min_aligned
        self._max_set_size = max_set_size
        try:
            self._library = ristretto.load()
        except ristretto.LibraryError as error:
            raise SplitveilError(f"ids cannot be aligned without libsodium:\n{error}") from error
        self._group = group or WorkerPool(workers, self._library)

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> "EcdhExchange":
        """Start one alignment; AlignmentError if there are no ids, or more than allowed."""
        if not 0 < len(ids) <= self._max_set_size:
            raise AlignmentError(f"expected 1 to {self._max_set_size} own ids, got {len(ids)}")
        return EcdhExchange(
            ids,
            hello=pb.AlignHello(
                engine=ENGINE,
                version=VERSION,
                normalisation=NORMALISATION,
                tag_bytes=TAG_BYTES,
                chunk_ids=CHUNK_IDS,
                set_size=len(ids),
                nonce=nonce,
                run_id=run_id,
            ),
            scalar=self._library.random_scalar(),
            group=self._group,
            min_aligned=self._min_aligned,
            max_set_size=self._max_set_size,
            splits=splits,
        )


class EcdhExchange:
    """The rules of one alignment: takes received frames, returns frames to send, does no I/O.

    ``own_frames`` may be iterated in one thread while another thread calls ``receive``.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        hello: pb.AlignHello,
        scalar: bytes,
        group: GroupOperations,
        min_aligned: int,
        max_set_size: int,
        splits: Splits | None = None,
    ) -> None:
        self._ids = ids
        self._splits = splits
        self._hello = hello
        self._scalar, self._shuffle_seed = scalar, os.urandom(32)
        self._group = group
        self._min_aligned = min_aligned
        self._max_set_size = max_set_size
        self._order: SecretOrder | None = None
        self._peer_hello: pb.AlignHello | None = None
        self._tags = TagTurns(len(ids), CHUNK_IDS, lambda: pb.AlignFrame(done=self._intersect()))
        self._store: ExchangeStore | None = None
        self._resume_point: ResumePoint | None = None
        self._exchange = b""
        self._common_rows: RowIndices | None = None
        self._own_done: pb.AlignDone | None = None
        self._peer_done: pb.AlignDone | None = None

    @property
    def peer_nonce(self) -> bytes:
        return self._require_hello().nonce

    @property
    def peer_set_size(self) -> int:
        return int(self._require_hello().set_size)

    @property
    def done_ids(self) -> int:
        return len(self._tags.own) + len(self._tags.of_peer)

    @property
    def total_ids(self) -> int:
        return self._tags.num_own + self._tags.num_peer

    @property
    def answered_ids(self) -> int:
        return self._tags.num_answered

    @property
    def number(self) -> str:
        return self._exchange.hex()

    @property
    def is_complete(self) -> bool:
        return self._own_done is not None and self._peer_done is not None

    def store_in(self, store: ExchangeStore) -> None:
        self._store = store
        point = store.load(digest_of_ids(self._ids), CHUNK_IDS, part_of(CHUNK_IDS))
        if point is not None:
            self._resume_point = point
            self._hello.resume.CopyFrom(
                pb.AlignResume(
                    exchange=point.state.exchange,
                    points=point.peer_points,
                    points_digest=store.points_digest("peer.points", point.peer_points).digest(),
                    tags=len(point.own_tags),
                )
            )

    def forget(self) -> None:
        if self._store is not None:
            self._store.discard()

    def hello(self) -> pb.AlignFrame:
        return pb.AlignFrame(hello=self._hello)

    def own_frames(self) -> Iterator[pb.AlignFrame]:
        """Mask this party's ids, chunk by chunk. Call it after the peer's hello was received."""
        order = self._require_order()
        for first in range(self._tags.num_sent, self._tags.num_own, CHUNK_IDS):
            rows = order.rows(first, CHUNK_IDS).tolist()
            digests = ristretto.digest_ids([self._ids[row] for row in rows])
            points = self._group.mask(digests, self._scalar)
            self._tags.note_sent(points)
            chunk = first // CHUNK_IDS
            yield pb.AlignFrame(points=pb.MaskedPoints(chunk=chunk, points=points))
        with forgetting(self.forget):
            last = self._tags.commit()
        yield from last

    def receive(self, frame: pb.AlignFrame) -> Frames:
        with forgetting(self.forget):
            return self._receive(frame)

    def _receive(self, frame: pb.AlignFrame) -> Frames:
        body = frame.WhichOneof("body")
        if body != "hello":
            self._require_hello()
        match body:
            case "hello":
                self._receive_hello(frame.hello)
            case "points":
                self._answer_points(frame.points)
                return self._tags.commit()
            case "commitment":
                return self._tags.receive_commitment(frame.commitment)
            case "tags":
                return self._tags.receive(frame.tags)
            case "done":
                check_done(self._own_done, self._peer_done, frame.done)
                self._peer_done = frame.done
            case _:
                raise InvalidMessage("the alignment frame is empty")
        return Frames()

    def result(self) -> RowIndices:
        """Return the rows of the common ids, in the order that both parties share."""
        sizes = len(self._ids), self.peer_set_size
        return agreed_rows(
            self._common_rows, self._own_done, self._peer_done, sizes, self._min_aligned
        )

    def _receive_hello(self, peer: pb.AlignHello) -> None:
        if self._peer_hello is not None:
            raise OutOfStep("received a second alignment hello")
        check_hello(self._hello, peer, self._max_set_size)
        self._peer_hello = peer
        self._tags.num_peer = int(peer.set_size)
        if self._store is not None:
            self._resume_or_begin(self._store, peer)
        self._order = secret_order(len(self._ids), self._shuffle_seed, self._store)

    def _resume_or_begin(self, store: ExchangeStore, peer: pb.AlignHello) -> None:
        """Resume the stored exchange if the peer has it too, and store a new one otherwise."""
        point, tags = self._resume_point, self._tags
        if point is not None and peer.resume.exchange == point.state.exchange:
            tags.restore(point, peer.resume, store)
            self._exchange, self._scalar, self._shuffle_seed = point.state[:3]
            logger.info(
                "resuming an exchange of ids: %d of %d own points were sent, %d of %d answered",
                tags.num_sent,
                tags.num_own,
                len(tags.of_peer),
                tags.num_peer,
            )
            return
        self._exchange = number_of_exchange(self._hello, peer)
        state = ExchangeState(
            self._exchange,
            self._scalar,
            self._shuffle_seed,
            digest_of_ids(self._ids),
            tags.num_own,
            tags.num_peer,
            CHUNK_IDS,
        )
        store.begin(state)
        tags.store_in(store)

    def _answer_points(self, message: pb.MaskedPoints) -> None:
        received = len(self._tags.of_peer)
        expected = min(CHUNK_IDS, self._tags.num_peer - received)
        if not expected:
            raise TooLarge("received more points than the other party announced")
        check_chunk("points", message.chunk, received // CHUNK_IDS)
        check_length("points", message.points, expected * ristretto.POINT_BYTES)
        try:
            products = self._group.multiply(message.points, self._scalar)
        except ristretto.NotInGroupError as error:
            raise InvalidMessage(f"points of chunk {message.chunk}: {error}") from error
        self._tags.note_answered(message.points, _tags_of(products))

    def _intersect(self) -> pb.AlignDone:
        order = self._require_order()
        common = common_rows(self._tags.own, self._tags.of_peer, order, self._store)
        self._common_rows = common.rows
        self._own_done = pb.AlignDone(
            count=len(common.rows),
            digest=common.digest.digest(),
            split_digest=common.split_digest(self._splits),
        )
        return self._own_done

    def _require_order(self) -> SecretOrder:
        self._require_hello()
        if self._order is None:
            raise OutOfStep("the alignment hello was refused")
        return self._order

    def _require_hello(self) -> pb.AlignHello:
        if self._peer_hello is None:
            raise OutOfStep("expected an alignment hello before anything else")
        return self._peer_hello


def _tags_of(points: bytes) -> bytes:
    rows = np.frombuffer(points, np.uint8).reshape(-1, ristretto.POINT_BYTES)
    return rows[:, :TAG_BYTES].tobytes()

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

With several buckets (``buckets.py``) the messages after the hellos are exchanged for each of them,
with a scalar of its own, and the common tags of the earlier ones go into each bucket's digest.

A stored exchange (``store.py``) continues where it broke off, if both hellos name it: with the same
scalars, points and commitments, so that it reveals nothing but what it would have revealed.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.buckets import buckets_of, common_tags, padded_size, secret_order
from splitveil.common.alignment.ristretto import GroupOperations, WorkerPool
from splitveil.common.alignment.store import (
    ExchangeState,
    ExchangeStore,
    ResumePoint,
    digest_of_ids,
    forgetting,
)
from splitveil.common.alignment.turns import Frames, TagTurns, check_chunk, check_length, part_of
from splitveil.common.data.ids import NORMALISATION
from splitveil.common.errors import (
    AlignmentError,
    InvalidMessage,
    OutOfStep,
    SplitveilError,
    TooLarge,
)
from splitveil.common.run.sample_order import Positions, Splits
from splitveil.common.wire import limits
from splitveil.protos import split_learning_pb2 as pb

ENGINE = "ecdh-ristretto255"
VERSION = 2
TAG_BYTES = limits.TAG_BYTES
CHUNK_IDS = limits.CHUNK_IDS
_TAG = np.dtype(f"S{TAG_BYTES}")
_DOMAIN = b"splitveil alignment exchange 1\x00"
_DIGEST_BYTES = hashlib.sha256().digest_size


class _Rules(NamedTuple):
    min_aligned: int
    max_set_size: int
    buckets: int


class EcdhEngine:
    """Starts exchanges, and owns the worker threads that they share."""

    def __init__(
        self,
        *,
        min_aligned: int,
        max_set_size: int,
        workers: int = 1,
        group: GroupOperations | None = None,
        buckets: int = 1,
    ) -> None:
        self._rules = _Rules(min_aligned, max_set_size, buckets)
        try:
            self._library = ristretto.load()
        except ristretto.LibraryError as error:
            raise SplitveilError(f"ids cannot be aligned without libsodium:\n{error}") from error
        self._group = group or WorkerPool(workers, self._library)

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> "EcdhExchange":
        """Start one alignment; AlignmentError if there are no ids, or more than allowed."""
        _, most, buckets = self._rules
        return EcdhExchange(
            ids,
            hello=pb.AlignHello(
                engine=ENGINE,
                version=VERSION,
                normalisation=NORMALISATION,
                tag_bytes=TAG_BYTES,
                chunk_ids=CHUNK_IDS,
                set_size=padded_size(len(ids), buckets, most),
                nonce=nonce,
                run_id=run_id,
            ),
            random_scalar=self._library.random_scalar,
            group=self._group,
            rules=self._rules,
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
        random_scalar: Callable[[], bytes],
        group: GroupOperations,
        rules: _Rules,
        splits: Splits | None = None,
    ) -> None:
        self._ids = ids
        self._splits = splits
        self._hello = hello
        self._random_scalar = random_scalar
        self._group = group
        self._min_aligned, self._max_set_size, self._num_buckets = rules
        self._bucket_of = np.zeros(len(ids), np.uint16)
        self._peer_hello: pb.AlignHello | None = None
        self._store: ExchangeStore | None = None
        self._resume_point: ResumePoint | None = None
        self._ids_digest = self._exchange = b""
        self._found: list[Positions] = []  # rows of the common ids of each bucket
        self._digest = b""  # of their tags
        self._use_bucket(0, random_scalar(), os.urandom(32))

    def _use_bucket(self, bucket: int, scalar: bytes, shuffle_seed: bytes) -> None:
        self._bucket, self._scalar, self._shuffle_seed = bucket, scalar, shuffle_seed
        self._order: Positions | None = None
        num_own = int(self._hello.set_size) // self._num_buckets
        self._tags = TagTurns(num_own, CHUNK_IDS, lambda: pb.AlignFrame(done=self._intersect()))
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
        """The number of ids of both parties that have been processed, out of ``total_ids``."""
        tags = self._tags
        before = self._bucket * (tags.num_own + tags.num_peer)
        return before + tags.num_taken + tags.num_computed

    @property
    def total_ids(self) -> int:
        return self._num_buckets * (self._tags.num_own + self._tags.num_peer)

    @property
    def answered_ids(self) -> int:
        """The number of the peer's ids whose tags have been computed."""
        return self._bucket * self._tags.num_peer + self._tags.num_answered

    @property
    def number(self) -> str:
        """The number of a stored exchange, the same if it is resumed; empty if it is not stored."""
        return self._exchange.hex() if self._store is not None else ""

    @property
    def is_complete(self) -> bool:
        return self.is_bucket_complete and self._bucket == self._num_buckets - 1

    @property
    def is_bucket_complete(self) -> bool:
        return self._own_done is not None and self._peer_done is not None

    def store_in(self, store: ExchangeStore) -> None:
        """Store the exchange, and resume the one that is stored; call it first of all."""
        self._store = store
        self._ids_digest = digest_of_ids(self._ids)
        point = store.load(self._ids_digest, CHUNK_IDS, self._num_buckets, part_of(CHUNK_IDS))
        if point is not None:
            self._resume_point = point
            self._hello.resume.CopyFrom(
                pb.AlignResume(
                    exchange=point.state.exchange,
                    points=point.peer_points,
                    points_digest=store.points_digest("peer.points", point.peer_points).digest(),
                    tags=len(point.own_tags) // TAG_BYTES,
                    bucket=point.state.bucket,
                )
            )

    def forget(self) -> None:
        if self._store is not None:
            self._store.discard()

    def hello(self) -> pb.AlignFrame:
        return pb.AlignFrame(hello=self._hello)

    def own_frames(self) -> Iterator[pb.AlignFrame]:
        """Mask this party's ids, chunk by chunk. Call it after the peer's hello was received."""
        self._require_order()
        for first in range(self._tags.num_sent, self._tags.num_own, CHUNK_IDS):
            points = self._tags.stored_points() or self._masked(first)
            self._tags.note_sent(points)
            chunk = first // CHUNK_IDS
            yield pb.AlignFrame(points=pb.MaskedPoints(chunk=chunk, points=points))
        with forgetting(self.forget):
            last = self._tags.commit()
        yield from last

    def _masked(self, first: int) -> bytes:
        rows = self._require_order()[first : first + CHUNK_IDS].tolist()
        padding = self._shuffle_seed.hex()
        texts = (
            self._ids[row] if row >= 0 else f"{padding} {place}"
            for place, row in enumerate(rows, first)
        )
        return self._group.mask(ristretto.digest_ids(texts), self._scalar)

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
                self._receive_done(frame.done)
            case _:
                raise InvalidMessage("the alignment frame is empty")
        return iter(())

    def begin_next_bucket(self) -> None:
        """Go on to the next bucket, or raise AlignmentError."""
        self._check_agreed()
        self._begin(self._bucket + 1)

    def result(self) -> Positions:
        """Return the rows of the common ids in the common order, or raise AlignmentError."""
        self._check_agreed(self._min_aligned)
        return np.concatenate(self._found)

    def _check_agreed(self, least: int = 0) -> None:
        found = sum(map(len, self._found))
        counts = (
            f"{len(self._ids)} own ids, {'at most ' * (self._num_buckets > 1)}"
            f"{self.peer_set_size} ids of the other party, {found} in common"
        )
        own, peer = self._own_done, self._peer_done
        if own is None or peer is None:
            raise OutOfStep("the exchange of ids is not complete")
        if (peer.count, peer.digest) != (own.count, own.digest):
            raise AlignmentError(
                f"the parties disagree on the intersection: {counts}, "
                f"but the other party reports {peer.count}, or another order"
            )
        if found < least:
            raise AlignmentError(
                f"too few ids to train on: {counts}, expected at least {least}; if there "
                f"should be more, check --connect at both parties compares how they write them"
            )
        if peer.split_digest != own.split_digest:
            raise AlignmentError(
                f"the parties disagree on the split: {counts}, and the column named in "
                f"contract.split does not give each of them the same split in both tables"
            )

    def _receive_hello(self, peer: pb.AlignHello) -> None:
        if self._peer_hello is not None:
            raise OutOfStep("received a second alignment hello")
        own = self._hello
        _check_hello(own, peer, self._max_set_size, self._num_buckets)
        self._peer_hello = peer
        point, resume = self._resume_point, peer.resume
        if point is not None and resume.exchange == point.state.exchange:
            state = point.state
            self._exchange, self._found, self._digest = state.exchange, [point.rows], state.digest
            self._use_bucket(state.bucket, state.scalar, state.shuffle_seed)
            self._enter()
            if self._tags.restore(point, resume):
                self._intersect()
                self._begin(state.bucket + 1)
            return
        sides = sorted(one.nonce + int(one.set_size).to_bytes(8, "big") for one in (own, peer))
        identity = _DOMAIN + own.run_id.encode() + b"\x00" + b"".join(sides)
        self._exchange = hashlib.sha256(identity).digest()
        self._begin(0)

    def _receive_done(self, done: pb.AlignDone) -> None:
        if self._own_done is None or self._peer_done is not None:
            raise OutOfStep("the other party is done while points or tags are outstanding")
        if len(done.digest) != _DIGEST_BYTES:
            raise InvalidMessage(f"expected a digest of 32 bytes, got {len(done.digest)}")
        if (length := len(done.split_digest)) not in {0, _DIGEST_BYTES}:
            raise InvalidMessage(f"expected a split digest of 32 bytes or none, got {length}")
        self._peer_done = done

    def _begin(self, bucket: int) -> None:
        if bucket:
            self._use_bucket(bucket, self._random_scalar(), os.urandom(32))
        self._enter()
        if self._store is not None:
            rows = self._found[-1] if self._found else np.empty(0, np.int64)
            state = ExchangeState(
                self._exchange,
                self._scalar,
                self._shuffle_seed,
                self._ids_digest,
                self._tags.num_own,
                self._tags.num_peer,
                CHUNK_IDS,
                self._num_buckets,
                bucket,
                sum(map(len, self._found)),
                self._digest,
            )
            self._store.begin(state, rows)
            self._tags.store_in(self._store)

    def _enter(self) -> None:
        """Put the bucket's ids and its padding into the secret order."""
        self._tags.num_peer = self.peer_set_size // self._num_buckets
        if self._num_buckets > 1 and not self._bucket_of.any():
            self._bucket_of = buckets_of(self._ids, self._exchange, self._num_buckets)
        rows = np.flatnonzero(self._bucket_of == self._bucket)
        self._order = secret_order(rows, self._tags.num_own, self._shuffle_seed)

    def _answer_points(self, message: pb.MaskedPoints) -> None:
        received = self._tags.num_computed
        expected = min(CHUNK_IDS, self._tags.num_peer - received)
        if not expected:
            raise TooLarge("received more points than the other party announced")
        check_chunk("points", message.chunk, received // CHUNK_IDS)
        check_length("points", message.points, expected * ristretto.POINT_BYTES)
        try:
            products = self._group.multiply(message.points, self._scalar)
        except ristretto.NotInGroupError as error:
            raise InvalidMessage(f"points of chunk {message.chunk}: {error}") from error
        rows = np.frombuffer(products, np.uint8).reshape(-1, ristretto.POINT_BYTES)
        self._tags.note_answered(message.points, rows[:, :TAG_BYTES].tobytes())

    def _intersect(self) -> pb.AlignDone:
        own, of_peer = (np.frombuffer(tags, _TAG) for tags in (self._tags.own, self._tags.of_peer))
        tags, positions = common_tags(own, of_peer)
        rows = self._require_order()[positions]
        digest = hashlib.sha256(self._digest + tags.tobytes())
        self._found.append(rows)
        self._digest = digest.digest()
        self._own_done = pb.AlignDone(count=len(rows), digest=self._digest)
        if self._splits is not None:
            # After their tags, which differ in every alignment.
            digest.update(self._splits[rows].astype(np.int8).tobytes())
            self._own_done.split_digest = digest.digest()
        return self._own_done

    def _require_order(self) -> Positions:
        self._require_hello()
        if self._order is None:
            raise OutOfStep("the alignment hello was refused")
        return self._order

    def _require_hello(self) -> pb.AlignHello:
        if self._peer_hello is None:
            raise OutOfStep("expected an alignment hello before anything else")
        return self._peer_hello


def _check_hello(own: pb.AlignHello, peer: pb.AlignHello, max_set_size: int, buckets: int) -> None:
    """Refuse a peer that aligns differently, or with a set that is not allowed."""
    names = ("engine", "version", "normalisation", "tag_bytes", "chunk_ids")
    differing = [name for name in names if getattr(own, name) != getattr(peer, name)]
    if differing:
        raise AlignmentError(f"the parties align ids differently: {', '.join(differing)}")
    if peer.run_id != own.run_id:
        raise OutOfStep("the alignment hello is for another run")
    if len(peer.nonce) != len(own.nonce):
        raise InvalidMessage(f"expected a nonce of {len(own.nonce)} bytes, got {len(peer.nonce)}")
    if peer.set_size == 0:
        raise InvalidMessage("the other party announces an empty set of ids")
    if peer.set_size > max_set_size:
        raise TooLarge(f"expected at most {max_set_size} ids, got {peer.set_size}")
    if peer.set_size % buckets:
        raise InvalidMessage(f"expected {buckets} buckets of one size, got {peer.set_size} places")

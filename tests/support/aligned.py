"""Alignments of two parties in one process, for tests."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from splitveil.common.alignment.channel import AlignChannel, channel_pair
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.exchange import Alignment, align
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.ids import Allowed, IdReader, IdReport
from splitveil.common.errors import SplitveilError
from splitveil.protos import split_learning_pb2 as pb
from tests.support.waiting import HANGS_AFTER_S

NONCES = (b"a" * 32, b"p" * 32)
LONG_S = HANGS_AFTER_S
"""A deadline that no test comes to: an error that came at once does not say ``silent``."""


class OwnIds(NamedTuple):
    ids: list[str]
    rows: list[int]
    report: IdReport


def usable_ids(
    raw: Sequence[str],
    form: CanonicalForm,
    allowed: Allowed = Allowed(),  # noqa: B008
) -> OwnIds:
    reader = IdReader(form, "t", allowed)
    reader.add(raw)
    found = reader.finish()
    rows = list(range(len(raw))) if found.kept is None else found.kept.tolist()
    return OwnIds([found.ids[row] for row in rows], rows, found.report)


def engine(
    min_aligned: int = 1, max_set_size: int = 10_000, workers: int = 1, buckets: int = 1
) -> EcdhEngine:
    return EcdhEngine(
        min_aligned=min_aligned, max_set_size=max_set_size, workers=workers, buckets=buckets
    )


ENGINE = engine()


def names(numbers: Sequence[int]) -> list[str]:
    return [f"customer {number}" for number in numbers]


class Outcome:
    """The outcome of one party: its alignment or its error."""

    def __init__(self, work: Callable[[], Alignment]) -> None:
        self.error: Exception | None = None
        self._alignment: Alignment | None = None
        try:
            self._alignment = work()
        except SplitveilError as error:
            self.error = error

    @property
    def alignment(self) -> Alignment:
        if self._alignment is None:
            raise self.error or AssertionError
        return self._alignment


def align_both(
    ids: tuple[Sequence[str], Sequence[str]],
    engines: tuple[EcdhEngine, EcdhEngine] = (ENGINE, ENGINE),
    channels: tuple[AlignChannel, AlignChannel] | None = None,
) -> tuple[Outcome, Outcome]:
    ends = channels or channel_pair(deadline_s=LONG_S)

    def party(index: int) -> Outcome:
        return Outcome(
            lambda: align(
                engines[index], ids[index], ends[index], nonce=NONCES[index], run_id="run"
            )
        )

    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(party, (0, 1))
    return first, second


def common_ids(ids: Sequence[str], outcome: Outcome) -> list[str]:
    return [ids[row] for row in outcome.alignment.rows]


class Passing:
    def __init__(self, channel: AlignChannel) -> None:
        self._channel = channel
        self.receive = channel.receive
        self.close = channel.close

    def send(self, frame: pb.AlignFrame) -> None:
        self._channel.send(frame)


def peer_hello(set_size: int = 40) -> pb.AlignHello:
    return pb.AlignHello(
        engine="ecdh-ristretto255",
        version=2,
        normalisation="NFC, strip",
        tag_bytes=16,
        chunk_ids=16,
        set_size=set_size,
        nonce=NONCES[1],
        run_id="run",
    )


def started(ids: Sequence[str]) -> EcdhExchange:
    return ENGINE.start(ids, nonce=NONCES[0], run_id="run")


def greeted(ids: Sequence[str], peer_set_size: int = 40) -> EcdhExchange:
    session = started(ids)
    assert not list(session.receive(pb.AlignFrame(hello=peer_hello(peer_set_size))))
    return session


def digests(ids: Sequence[str]) -> bytes:
    domain = b"splitveil ecdh-ristretto255 id 1\x00"
    return b"".join(hashlib.sha512(domain + text.encode()).digest() for text in ids)


def points_of(session: EcdhExchange) -> Iterator[bytes]:
    return (frame.points.points for frame in session.own_frames())


def split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def points(count: int, first: int = 0) -> bytes:
    return ENGINE._library.hash_to_group(digests(names(range(first, first + count))))


def points_frame(chunk: int, data: bytes) -> pb.AlignFrame:
    return pb.AlignFrame(points=pb.MaskedPoints(chunk=chunk, points=data))


def commitment_frame(peer_points: bytes, tags: bytes) -> pb.AlignFrame:
    bound = hashlib.sha256(peer_points).digest()
    digest = hashlib.sha256(b"splitveil alignment tags 2\x00" + bound + tags).digest()
    return pb.AlignFrame(commitment=pb.AlignCommitment(digest=digest))


def committed(num_ids: int, tags: bytes, peer_points: bytes) -> EcdhExchange:
    """Bring an exchange to the moment at which the peer, committed to these tags, shows them."""
    session = greeted(names(range(num_ids)), peer_set_size=len(peer_points) // 32)
    list(session.own_frames())
    for chunk, first in enumerate(range(0, len(peer_points), 512)):
        session.receive(points_frame(chunk, peer_points[first : first + 512]))
    session.receive(commitment_frame(peer_points, tags))
    return session


def tags_frame(chunk: int, data: bytes) -> pb.AlignFrame:
    return pb.AlignFrame(tags=pb.Tags(chunk=chunk, tags=data))


def done_frame(count: int = 0, digest: bytes = bytes(32)) -> pb.AlignFrame:
    return pb.AlignFrame(done=pb.AlignDone(count=count, digest=digest))

"""An exchange of ids that broke off: it continues where it was, and reveals nothing more."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from splitveil.common.alignment.ecdh import EcdhExchange
from splitveil.common.alignment.store import ExchangeStore, StoredName
from splitveil.common.errors import InvalidMessage, OutOfStep, PeerUnreachable, StorageError
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    ENGINE,
    commitment_frame,
    common_ids,
    names,
    peer_hello,
    points,
    points_frame,
    tags_frame,
)
from tests.support.exchanging import OWN, PEER, Pair

pytestmark = pytest.mark.usefixtures("small_chunks")

CHUNK = 16
"""Points in a message, with the small chunks of these tests."""
COMMON = set(OWN) & set(PEER)


def test_what_the_peer_has_is_neither_computed_nor_sent_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    # A hello and five chunks of points leave the active party; the sixth does not.
    first, second = pair.attempt(breaks_at=(6, None))
    assert isinstance(first.error, PeerUnreachable)
    assert isinstance(second.error, PeerUnreachable)
    assert all(pair.is_kept())
    files = pair.files[0]
    files._bucket = files._folder / "0"
    with pytest.raises(StorageError, match=r"own\.points: is damaged"):
        files.part("own.points", 0, len(OWN) + 1)
    masked, multiplied = pair.groups[0].masked, pair.groups[1].multiplied
    assert multiplied == 5 * CHUNK
    first, second = pair.attempt()
    assert set(common_ids(OWN, first)) == COMMON
    assert pair.groups[0].masked == len(OWN)  # the chunk that was lost is read, and sent again
    assert pair.groups[0].masked - masked <= len(OWN) - 5 * CHUNK
    assert pair.groups[1].multiplied == len(OWN)
    assert pair.groups[0].multiplied == len(PEER)
    whole = Pair(tmp_path / "whole")
    whole.attempt()
    assert pair.groups[1].multiplied == whole.groups[1].multiplied


def without_files(pair: Pair) -> None:
    pair.kept[1].discard()


def with_other_ids(pair: Pair) -> None:
    pair.ids = (OWN, names(range(60, 191)))


def with_damaged_states(pair: Pair) -> None:
    for files, text in zip(pair.files, ("{", '{"exchange": "zz"}'), strict=True):
        (files._folder / "state").write_text(text)


@pytest.mark.parametrize("change", [without_files, with_other_ids, with_damaged_states])
def test_what_cannot_be_resumed_begins_afresh(
    tmp_path: Path, change: Callable[[Pair], None]
) -> None:
    pair = Pair(tmp_path)
    pair.attempt(breaks_at=(6, None))
    change(pair)
    first, second = pair.attempt()
    assert set(common_ids(OWN, first)) == COMMON
    assert common_ids(OWN, first) == common_ids(pair.ids[1], second)
    assert pair.groups[1].multiplied == 5 * CHUNK + len(OWN)


def test_only_the_owner_can_read_what_is_kept(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.attempt(breaks_at=(6, None))
    paths = [path for path in tmp_path.rglob("*") if ".exchanges" in str(path)]
    assert {path.name for path in paths} >= {
        "state",
        "rows",
        "own.points",
        "peer.points",
        "peer.tags",
    }
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert all(b"customer" not in path.read_bytes() for path in paths if path.is_file())


@pytest.mark.parametrize("seed", range(5))
def test_files_that_a_crash_left_in_part_are_used_as_far_as_they_are_whole(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    pair = Pair(tmp_path)
    pair.attempt(breaks_at=(draw.randrange(2, 30), None))
    names_of_files: list[StoredName] = ["own.points", "peer.points", "peer.tags", "own.tags"]
    path = pair.files[draw.randrange(2)]._folder / "0" / draw.choice(names_of_files)
    if path.exists():
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])
    for _ in range(3):
        first, second = pair.attempt()
        if first.error is None and second.error is None:
            break
    assert set(common_ids(OWN, first)) == COMMON
    assert common_ids(OWN, first) == common_ids(PEER, second)


def test_a_resumed_exchange_is_charged_once_and_a_fresh_one_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)

    def charged() -> int:
        return pair.tried[0].of("peer").ids

    for frames in (6, 2):  # a hello and five chunks of points, a hello and one chunk
        pair.attempt(breaks_at=(frames, None))
    assert charged() == 0  # no tag was shown
    pair.attempt(breaks_at=(23, None))  # a hello, a chunk, the commitment, and some of the tags
    some = charged()
    assert 20 * 3 <= some < len(PEER)
    pair.attempt(breaks_at=(3, None))
    assert some <= charged() < len(PEER)  # what was shown stays charged, and only once
    pair.attempt()
    assert charged() == len(PEER)
    pair.attempt()
    assert charged() == 2 * len(PEER)


# ---- a peer that uses a broken exchange to learn more ----


class Victim:
    def __init__(self, folder: Path) -> None:
        self.files = ExchangeStore(folder / "kept")
        self.peer_points = points(40)
        self.exchange = self.start()

    def start(self, resume: pb.AlignResume | None = None) -> EcdhExchange:
        exchange = ENGINE.start(OWN, nonce=b"a" * 32, run_id="run")
        exchange.store_in(self.files)
        self.held = exchange.hello().hello.resume
        hello = peer_hello(40)
        if resume is not None:
            hello.resume.CopyFrom(resume)
        exchange.receive(pb.AlignFrame(hello=hello))
        self.exchange = exchange
        return exchange

    def send_points(self, given: bytes, first: int = 0) -> None:
        for chunk, at in enumerate(range(0, len(given), 32 * CHUNK), first):
            self.exchange.receive(points_frame(chunk, given[at : at + 32 * CHUNK]))

    def own_points(self) -> bytes:
        return b"".join(frame.points.points for frame in self.exchange.own_frames())

    def resume(self, **changed: object) -> pb.AlignResume:
        """Return what an honest peer that has received nothing would say, with changes."""
        number = bytes.fromhex(self.exchange.number)
        empty = pb.AlignResume(exchange=number, points_digest=EMPTY)
        empty.MergeFrom(pb.AlignResume(**changed))  # type: ignore[arg-type]
        return empty


EMPTY = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
"""SHA-256 of nothing."""


def test_a_peer_that_claims_to_have_nothing_gets_the_same_bytes(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    sent = victim.own_points()
    victim.send_points(victim.peer_points[: 32 * CHUNK])
    victim.start(victim.resume())
    assert (victim.held.points, victim.held.tags) == (CHUNK, 0)
    assert victim.own_points() == sent
    # Its own points are those that it has sent: others begin after them.
    with pytest.raises(OutOfStep, match="chunk 1"):
        victim.exchange.receive(points_frame(0, points(CHUNK, first=500)))


@pytest.mark.parametrize(
    "lie",
    [
        {"points": 16},  # with the digest of none
        {"points": 7},
        {"points": 101},
        {"points": 2**31},
        {"tags": 41},
        {"tags": 2**31},
    ],
)
def test_a_peer_that_claims_what_it_cannot_have_is_refused_and_the_exchange_forgotten(
    tmp_path: Path, lie: dict[str, int]
) -> None:
    victim = Victim(tmp_path)
    victim.own_points()
    with pytest.raises(InvalidMessage, match="has kept other"):
        victim.start(victim.resume(**lie))
    victim.start()
    assert not victim.held.exchange


def test_a_peer_cannot_announce_another_size_when_it_resumes(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    exchange = ENGINE.start(OWN, nonce=b"a" * 32, run_id="run")
    exchange.store_in(victim.files)
    hello = peer_hello(41)
    hello.resume.CopyFrom(victim.resume())
    with pytest.raises(InvalidMessage, match="another number of ids"):
        exchange.receive(pb.AlignFrame(hello=hello))


def test_a_peer_cannot_commit_to_other_tags_when_it_resumes(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    victim.own_points()
    victim.send_points(victim.peer_points)
    tags = bytes(range(100)) * 16
    victim.exchange.receive(commitment_frame(victim.peer_points, tags))
    victim.exchange.receive(tags_frame(0, tags[: 2 * 16]))
    victim.start(victim.resume())
    assert victim.held.tags == 2
    victim.own_points()
    with pytest.raises(InvalidMessage, match="commits to other tags than before"):
        victim.exchange.receive(commitment_frame(victim.peer_points, tags[::-1]))


def test_what_is_refused_while_own_points_are_sent_is_forgotten_too(tmp_path: Path) -> None:
    """Kept, damaged tags would otherwise be refused again at every start."""
    victim = Victim(tmp_path)
    victim.own_points()
    victim.send_points(victim.peer_points)
    tags = b"".join(hashlib.sha256(bytes([one])).digest()[:16] for one in range(100))
    commitment = commitment_frame(victim.peer_points, tags)
    victim.exchange.receive(commitment)
    for chunk, at in enumerate(range(0, len(tags), 2 * 16)):
        victim.exchange.receive(tags_frame(chunk, tags[at : at + 2 * 16]))
    path = victim.files._folder / "0" / "own.tags"
    path.write_bytes(bytes(16) + tags[16:])
    victim.start(victim.resume())
    assert victim.held.tags == 100
    victim.exchange.receive(commitment)  # before the last own points are sent
    with pytest.raises(InvalidMessage, match="not those that it committed to"):
        victim.own_points()
    assert not victim.files._folder.exists()


def test_tags_are_shown_only_after_what_they_follow_from_is_on_disk(tmp_path: Path) -> None:
    events: list[str] = []

    class Watched(ExchangeStore):
        def append(self, name: StoredName, data: bytes) -> None:
            events.append(name)
            super().append(name, data)

        def sync(self) -> None:
            events.append("sync")
            super().sync()

    exchange = ENGINE.start(OWN, nonce=b"a" * 32, run_id="run")
    exchange.store_in(Watched(tmp_path / "kept"))
    exchange.receive(pb.AlignFrame(hello=peer_hello(40)))
    list(exchange.own_frames())
    given = points(40)
    shown: list[pb.AlignFrame] = []
    for chunk, at in enumerate(range(0, len(given), 32 * CHUNK)):
        shown += exchange.receive(points_frame(chunk, given[at : at + 32 * CHUNK]))
    assert [frame.WhichOneof("body") for frame in shown] == ["commitment"]
    assert "sync" not in events
    shown = list(exchange.receive(commitment_frame(given, bytes(1600))))
    assert [frame.WhichOneof("body") for frame in shown] == ["tags"]
    assert events.index("sync") == len(events) - 1
    assert set(events[:-1]) == {"own.points", "peer.points", "peer.tags", "peer.commitment"}

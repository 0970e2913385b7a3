"""An alignment in buckets: the outcome of a single exchange, and no more for a peer to learn."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from splitveil.common.alignment import ecdh
from splitveil.common.alignment.buckets import buckets_of, places_of
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.tried_ids import TriedIds
from splitveil.common.errors import (
    AlignmentError,
    InvalidMessage,
    PeerUnreachable,
    StorageError,
    TooLarge,
)
from splitveil.common.run.sample_order import CommonOrder
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    NONCES,
    align_both,
    common_ids,
    engine,
    names,
    peer_hello,
    points,
    points_frame,
)
from tests.support.exchanging import OWN, PEER, Pair

pytestmark = pytest.mark.usefixtures("small_chunks")

COMMON = {*OWN} & {*PEER}
KEY = b"k" * 32
BUCKETS = 3


# ---- the outcome ----


@pytest.mark.parametrize("own", [OWN, OWN[70:73], ["customer 77"]])
def test_any_number_of_buckets_has_the_rows_and_the_order_of_a_single_exchange(
    own: list[str],
) -> None:
    """Also with buckets that are empty, and that have other numbers of ids at the two parties."""
    found = []
    for number in (1, 2, 4, 7):
        first, second = align_both((own, PEER), (engine(buckets=number), engine(buckets=number)))
        assert common_ids(own, first) == common_ids(PEER, second)
        orders = [
            CommonOrder.of("run", ids, outcome.alignment.rows, KEY)
            for ids, outcome in ((own, first), (PEER, second))
        ]
        assert orders[0].fingerprint == orders[1].fingerprint
        found.append([order.file_rows.tolist() for order in orders])
    assert {own[row] for row in found[0][0]} == {*own} & {*PEER}
    assert all(one == found[0] for one in found)


def test_too_few_common_ids_are_those_of_all_buckets() -> None:
    for least, is_enough in ((len(COMMON), True), (len(COMMON) + 1, False)):
        both = engine(min_aligned=least, buckets=BUCKETS)
        for outcome in align_both((OWN, PEER), (both, both)):
            assert (outcome.error is None) == is_enough
            assert is_enough or f"{len(COMMON)} in common" in str(outcome.error)


def test_the_memory_of_an_exchange_is_that_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on what Python and numpy allocate for both parties, which are one process."""
    monkeypatch.setattr(ecdh, "CHUNK_IDS", 256)

    class Fast:
        """Operations that commute as those of the group do, take no time, and hide nothing."""

        def mask(self, digests: bytes, scalar: bytes) -> bytes:
            first_half = np.frombuffer(digests, np.uint8).reshape(-1, 64)[:, :32]
            return self.multiply(first_half.tobytes(), scalar)

        def multiply(self, points: bytes, scalar: bytes) -> bytes:
            elements = np.frombuffer(points, np.uint8).reshape(-1, 32)
            return (elements ^ np.frombuffer(scalar, np.uint8)).tobytes()

    def peak(buckets: int) -> int:
        both = EcdhEngine(min_aligned=1, max_set_size=10**6, group=Fast(), buckets=buckets)
        tracemalloc.start()
        try:
            first, _ = align_both(ids, (both, both))
            used = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(first.alignment.rows) == 30_000
        return used

    ids = names(range(60_000)), names(range(30_000, 90_000))
    assert peak(16) < peak(1) / 2


# ---- what a peer can learn ----


def test_ids_are_spread_by_the_key_and_places_are_enough_whatever_it_is() -> None:
    ids = names(range(20_000))
    first, again, other = (buckets_of(ids, key, 8) for key in (KEY, KEY, b"l" * 32))
    counts = np.bincount(first, minlength=8)
    assert np.array_equal(first, again)
    assert abs(float((first == other).mean()) - 1 / 8) < 0.01
    # Chi-squared, 7 degrees of freedom: below 29.9 but for one key in 10,000.
    assert ((counts - 2500) ** 2 / 2500).sum() < 29.9
    assert counts.max() < places_of(20_000, 8) == 2916
    assert (places_of(1_000_000, 4), places_of(1000, 1), places_of(3, 7)) == (254_016, 1000, 3)


def greeted_in_buckets(ids: list[str], peer_places: int = 48) -> EcdhExchange:
    exchange = engine(buckets=BUCKETS).start(ids, nonce=NONCES[0], run_id="run")
    exchange.receive(pb.AlignFrame(hello=peer_hello(peer_places)))
    return exchange


def test_every_bucket_sends_as_many_points_whichever_ids_are_in_it() -> None:
    sent = [
        [len(frame.points.points) for frame in greeted_in_buckets(ids).own_frames()]
        for ids in (names(range(40)), names(range(500, 540)))
    ]
    assert sent[0] == sent[1]
    assert sum(sent[0]) == 32 * places_of(40, BUCKETS)


def test_a_peer_cannot_put_more_ids_into_a_bucket_than_its_share_of_those_it_announced() -> None:
    with pytest.raises(InvalidMessage, match="3 buckets of one size"):
        greeted_in_buckets(OWN, 49)
    exchange = greeted_in_buckets(OWN)
    exchange.receive(points_frame(0, points(16)))
    with pytest.raises(TooLarge, match="more points than the other party announced"):
        exchange.receive(points_frame(1, points(16)))


def test_padding_counts_for_the_largest_set() -> None:
    small = engine(max_set_size=150, buckets=BUCKETS)
    with pytest.raises(AlignmentError, match="got 100, which are 288 with the padding of buckets"):
        small.start(OWN, nonce=NONCES[0], run_id="run")


def test_a_peer_that_spreads_its_tries_over_buckets_has_no_more_of_them(tmp_path: Path) -> None:
    """It breaks off in whichever bucket, and begins anew with other ids."""
    draw, pair = random.Random(4), Pair(tmp_path, buckets=BUCKETS)
    places, answered = places_of(len(PEER), BUCKETS), [0]
    most = 2 * BUCKETS * places
    pair.tried[0] = TriedIds(BUCKETS * places, attempts=2)
    error: Exception | None = None
    for _ in range(40):
        before = pair.groups[0].multiplied
        error = pair.attempt(breaks_at=(draw.randrange(60, 300), None))[0].error
        answered.append(pair.groups[0].multiplied - before)
        for kept in pair.kept:
            kept.discard()
        if isinstance(error, AlignmentError):
            break
        assert pair.tried[0].of("peer").ids <= most
        assert places < sum(answered)  # it came to a second bucket
    assert isinstance(error, AlignmentError), "it may go on for ever"
    assert "has tried" in str(error)
    assert pair.tried[0].of("peer").ids > most - BUCKETS * places


# ---- exchanges that broke off ----


@pytest.mark.parametrize("buckets", [1, BUCKETS])
@pytest.mark.parametrize("seed", range(4))
def test_a_broken_line_costs_no_id_and_finished_buckets_are_not_exchanged_again(
    tmp_path: Path, seed: int, buckets: int
) -> None:
    draw, pair = random.Random(seed), Pair(tmp_path, buckets=buckets)
    errors = 0
    for _ in range(60):
        frames = draw.randrange(10, 60)
        first, second = pair.attempt(breaks_at=draw.choice([(frames, None), (None, frames)]))
        if first.error is None and second.error is None:
            break
        assert any(isinstance(one.error, PeerUnreachable) for one in (first, second))
        errors += 1
    assert errors > 1 or buckets == 1
    assert set(common_ids(OWN, first)) == COMMON
    assert common_ids(OWN, first) == common_ids(PEER, second)
    sizes = [buckets * places_of(len(ids), buckets) for ids in (OWN, PEER)]
    assert [group.multiplied for group in pair.groups] == sizes[::-1]
    assert [tried.of("peer").ids for tried in pair.tried] == sizes[::-1]
    assert pair.is_kept() == [False, False]


@pytest.mark.parametrize("buckets", [1, BUCKETS])
@pytest.mark.parametrize("loser", [0, 1])
def test_a_bucket_s_last_message_that_is_lost_costs_neither_party_an_id(
    tmp_path: Path, loser: int, buckets: int
) -> None:
    """One party has the outcome of a bucket, and the other cannot know it."""
    pair = Pair(tmp_path, buckets=buckets)
    for _ in range(buckets):
        pair.loses_last_frame_of = 1 - loser
        outcomes = pair.attempt()
        assert isinstance(outcomes[loser].error, PeerUnreachable)
        assert pair.is_kept() == [True, True]
    pair.loses_last_frame_of = None
    outcomes = pair.attempt()
    assert set(common_ids(OWN, outcomes[0])) == COMMON
    assert common_ids(OWN, outcomes[0]) == common_ids(PEER, outcomes[1])
    sizes = [buckets * places_of(len(ids), buckets) for ids in (OWN, PEER)]
    assert [group.masked for group in pair.groups] == sizes
    assert [group.multiplied for group in pair.groups] == sizes[::-1]
    assert [tried.of("peer").ids for tried in pair.tried] == sizes[::-1]
    assert pair.is_kept() == [False, False]


@pytest.mark.parametrize(("bucket", "message"), [(1, "has not shown"), (2, "another bucket")])
def test_a_peer_that_claims_to_be_in_a_later_bucket_is_refused_and_the_exchange_forgotten(
    tmp_path: Path, bucket: int, message: str
) -> None:
    pair = Pair(tmp_path, buckets=BUCKETS)
    pair.attempt(breaks_at=(12, None))
    exchange = pair.engines[0].start(OWN, nonce=NONCES[0], run_id="run")
    exchange.store_in(pair.files[0])
    hello = peer_hello(BUCKETS * places_of(len(PEER), BUCKETS))
    hello.resume.CopyFrom(exchange.hello().hello.resume)
    hello.resume.bucket = bucket
    with pytest.raises(InvalidMessage, match=message):
        exchange.receive(pb.AlignFrame(hello=hello))
    assert not pair.is_kept()[0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "folder")
    (tmp_path / "folder").write_text("a file in the place of the folder")
    first, _ = pair.attempt()
    assert isinstance(first.error, StorageError)
    assert ".active.exchanges" in str(first.error)

"""Alignment: both parties find exactly the common ids, in one order, and refuse what is wrong."""

import hashlib
import random
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.common.alignment import (
    AlignChannel,
    Alignment,
    AlignmentResources,
    Splits,
    StreamChannel,
    align,
    build_engine,
    channel_pair,
    ecdh,
)
from splitveil.common.alignment.ecdh import CHUNK_IDS, EcdhEngine, EcdhExchange
from splitveil.common.alignment.workers import WorkerPool
from splitveil.common.data.ids import canonical_ids
from splitveil.common.errors import (
    AlignmentError,
    DataError,
    InvalidMessage,
    OutOfStep,
    PeerUnreachable,
    SplitveilError,
    TooLarge,
)
from splitveil.common.run.contract import EcdhAlignment
from splitveil.common.settings import validate
from splitveil.protos.split_learning_pb2 import (
    AlignDone,
    AlignFrame,
    AlignHello,
    MaskedPoints,
    Tags,
)
from tests.waiting import HANGS_AFTER_S

NONCES = (b"a" * 32, b"p" * 32)
LONG_S = HANGS_AFTER_S
"""A deadline that no test comes to: an error that came at once does not say ``silent``."""

NUM_TWO_CHUNKS = CHUNK_IDS + 100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several chunks from a few ids."""
    monkeypatch.setattr(ecdh, "CHUNK_IDS", 16)


def engine(min_aligned: int = 1, max_set_size: int = 10_000, workers: int = 0) -> EcdhEngine:
    return EcdhEngine(min_aligned=min_aligned, max_set_size=max_set_size, workers=workers)


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
    run_ids: tuple[str, str] = ("run", "run"),
) -> tuple[Outcome, Outcome]:
    ends = channels or channel_pair(deadline_s=LONG_S)

    def party(index: int) -> Outcome:
        return Outcome(
            lambda: align(
                engines[index],
                ids[index],
                ends[index],
                nonce=NONCES[index],
                run_id=run_ids[index],
            )
        )

    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(party, (0, 1))
    return first, second


def common_ids(ids: Sequence[str], outcome: Outcome) -> list[str]:
    return [ids[row] for row in outcome.alignment.rows]


# ---- what it promises ----


def test_both_find_exactly_the_common_ids_in_one_order() -> None:
    own, peer = names(range(100)), names(range(60, 190))
    random.Random(1).shuffle(peer)

    first, second = align_both((own, peer))

    assert first.alignment.rows.dtype == np.int64
    assert set(common_ids(own, first)) == set(own) & set(peer)
    assert len(first.alignment.rows) == 40
    assert common_ids(own, first) == common_ids(peer, second)


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(0, 60), min_size=1, max_size=40),
    st.sets(st.integers(0, 60), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_two_sets_align(own: set[int], peer: set[int], order: random.Random) -> None:
    sets = names(sorted(own)), names(sorted(peer))
    for ids in sets:
        order.shuffle(ids)

    outcomes = align_both(sets)

    if own & peer:
        orders = [common_ids(ids, outcome) for ids, outcome in zip(sets, outcomes, strict=True)]
        assert orders[0] == orders[1]
        assert sorted(orders[0]) == sorted(set(sets[0]) & set(sets[1]))
    else:
        assert [type(outcome.error) for outcome in outcomes] == [AlignmentError] * 2


def test_the_common_order_is_new_in_every_run_and_not_the_order_of_a_file() -> None:
    ids = names(range(100))

    orders = [common_ids(ids, align_both((ids, ids))[0]) for _ in range(2)]

    assert sorted(orders[0]) == sorted(orders[1]) == sorted(ids)
    assert orders[0] != orders[1]
    assert ids not in orders


def test_each_learns_the_nonce_and_the_set_size_of_the_other() -> None:
    first, second = align_both((names(range(7)), names(range(9))))

    assert (first.alignment.peer_nonce, first.alignment.peer_set_size) == (NONCES[1], 9)
    assert (second.alignment.peer_nonce, second.alignment.peer_set_size) == (NONCES[0], 7)


def test_whole_chunks_and_worker_processes_give_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ecdh, "CHUNK_IDS", CHUNK_IDS)
    own, peer = names(range(NUM_TWO_CHUNKS)), names(range(4000, 4000 + CHUNK_IDS))
    with_workers = engine(workers=2)
    try:
        first, second = align_both((own, peer), (with_workers, ENGINE))
    finally:
        with_workers.close()

    assert set(common_ids(own, first)) == set(own) & set(peer)
    assert common_ids(own, first) == common_ids(peer, second)


def test_progress_rises_to_the_number_of_all_ids() -> None:
    seen: list[tuple[int, int]] = []
    ends = channel_pair(deadline_s=LONG_S)
    ids = names(range(40)), names(range(30))

    with ThreadPoolExecutor(2) as executor:
        peer = executor.submit(align, ENGINE, ids[1], ends[1], nonce=b"", run_id="")
        align(
            ENGINE,
            ids[0],
            ends[0],
            nonce=b"",
            run_id="",
            progress=lambda done, total: seen.append((done, total)),
        )
        peer.result()

    assert seen[-1] == (70, 70)
    assert all(before <= after for before, after in pairwise(seen))
    assert len(set(seen)) > 3


# ---- what it hides ----


def test_every_session_has_a_key_of_its_own() -> None:
    transcripts = []
    for _ in range(2):
        session = greeted(names(range(30)))
        transcripts.append(set(split(b"".join(points_of(session)), 32)))

    assert transcripts[0].isdisjoint(transcripts[1])


def test_points_leave_in_shuffled_order() -> None:
    ids = names(range(40))
    session = greeted(ids)

    sent = split(b"".join(points_of(session)), 32)

    in_file_order = split(ENGINE._library.mask(digests(ids), session._scalar), 32)
    assert sorted(sent) == sorted(in_file_order)
    assert sent != in_file_order


def test_a_permutation_puts_every_row_everywhere_equally_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chi-squared over 4 x 4 cells, 9 degrees of freedom: below 33.7 but for one seed in 10,000.

    The same bound rejects permutations of which every twentieth is the identity.
    """
    monkeypatch.setattr("os.urandom", random.Random(1).randbytes)

    def chi_squared(permutations: list[np.ndarray]) -> float:
        counts = np.zeros((4, 4))
        for permutation in permutations:
            counts[np.arange(4), permutation] += 1
        expected = len(permutations) / 4
        # A row has one place, so the cells of a permutation vary less by (n - 1) / n.
        return float(((counts - expected) ** 2 / expected).sum() * 3 / 4)

    drawn = [ecdh._secret_permutation(4) for _ in range(8000)]
    lazy = [np.arange(4) if i % 20 == 0 else drawn[i] for i in range(8000)]

    assert chi_squared(drawn) < 33.7
    assert chi_squared(lazy) > 33.7


def test_what_is_sent_is_neither_the_id_nor_its_unmasked_point() -> None:
    ids = names(range(20))
    session = greeted(ids)

    sent = b"".join([session.hello().SerializeToString(), *points_of(session)])

    unmasked = split(ENGINE._library.hash_to_group(digests(ids)), 32)
    assert not any(text.encode() in sent for text in ids)
    assert not any(point in sent for point in unmasked)


# ---- ids that cannot be used ----


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (["ab", "cd", "ab"], "1 duplicate ids: data rows 3 (as 1)"),
        (["ab", "", "cd", " \t"], "2 missing or empty ids: data rows 2, 4"),
        (["ab", None], "1 missing or empty ids: data rows 2"),
        (["ab", "ab "], "data rows 2 (as 1, differs in white space)"),
        (["Zo\u00eb", "Zoe\u0308"], "data rows 2 (as 1, differs in Unicode form)"),
        (["Zo\u00eb", "Zoe\u0308 "], "differs in white space and Unicode form"),
        (["ab", "\ud800"], "1 ids that are not valid Unicode: data rows 2"),
        (
            ["ab"] * 9,
            "8 duplicate ids: data rows 2 (as 1), 3 (as 1), 4 (as 1), 5 (as 1), 6 (as 1), ",
        ),
        ([], "there are no ids"),
    ],
)
def test_unusable_ids_are_named_by_row_and_never_by_text(
    raw: list[str | None], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        canonical_ids(raw, "rows.csv, column k")

    assert message in str(caught.value)
    assert str(caught.value).startswith("rows.csv, column k: ")
    assert not any(text.strip() in str(caught.value) for text in raw if text and text.strip())


def test_every_kind_of_problem_is_reported_at_once() -> None:
    with pytest.raises(DataError) as caught:
        canonical_ids(["x1", "", "x1", " x1"], "rows.csv")

    assert len(str(caught.value).splitlines()) == 3


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=8))
def test_ids_come_out_in_canonical_form_or_not_at_all(raw: list[str]) -> None:
    expected = [unicodedata.normalize("NFC", text).strip() for text in raw]

    if len(set(expected)) == len(expected) and all(expected):
        assert canonical_ids(raw, "rows.csv") == expected
        assert canonical_ids(expected, "rows.csv") == expected
    else:
        with pytest.raises(DataError):
            canonical_ids(raw, "rows.csv")


def test_canonical_ids_of_both_parties_meet() -> None:
    own = canonical_ids(["Zo\u00eb", " Max"], "own.csv")
    peer = canonical_ids(["Max", "Zoe\u0308\n", "Ida"], "peer.csv")

    first, _ = align_both((own, peer))

    assert set(common_ids(own, first)) == {"Zo\u00eb", "Max"}


@pytest.mark.parametrize("size", [0, 11])
def test_an_empty_or_too_large_own_set_is_refused_before_anything_is_sent(size: int) -> None:
    here, there = channel_pair(deadline_s=0.05)

    with pytest.raises(AlignmentError, match=f"expected 1 to 10 own ids, got {size}"):
        align(engine(max_set_size=10), names(range(size)), here, nonce=b"", run_id="")
    with pytest.raises(PeerUnreachable):
        there.receive()


# ---- both parties refuse the same intersection ----


def test_a_tiny_intersection_is_an_error_on_both_sides_with_the_counts() -> None:
    strict = engine(min_aligned=5)

    outcomes = align_both((names(range(20)), names(range(16, 46))), (strict, strict))

    assert [type(outcome.error) for outcome in outcomes] == [AlignmentError] * 2
    counts = "20 own ids, 30 ids of the other party, 4 in common, expected at least 5"
    assert counts in str(outcomes[0].error)
    assert "30 own ids, 20 ids of the other party, 4 in common" in str(outcomes[1].error)


def test_an_intersection_of_the_smallest_size_is_accepted() -> None:
    strict = engine(min_aligned=4)

    first, second = align_both((names(range(20)), names(range(16, 46))), (strict, strict))

    assert len(first.alignment.rows) == len(second.alignment.rows) == 4


def test_another_result_of_the_peer_stops_both() -> None:
    """A channel that flips a bit of one tag on its way: the parties no longer agree."""

    class Flipping:
        def __init__(self, channel: AlignChannel) -> None:
            self._channel = channel

        def send(self, frame: AlignFrame) -> None:
            if frame.HasField("tags"):
                tags = bytes([frame.tags.tags[0] ^ 4]) + frame.tags.tags[1:]
                frame = AlignFrame(tags=Tags(chunk=frame.tags.chunk, tags=tags))
            self._channel.send(frame)

        def receive(self) -> AlignFrame:
            return self._channel.receive()

        def close(self) -> None:
            self._channel.close()

    here, there = channel_pair(deadline_s=LONG_S)
    ids = names(range(10))

    outcomes = align_both((ids, ids), channels=(Flipping(here), there))

    assert [type(outcome.error) for outcome in outcomes] == [AlignmentError] * 2
    assert all("disagree on the intersection" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "rr22"),
        ("version", 2),
        ("normalisation", "none"),
        ("tag_bytes", 10),
        ("chunk_ids", 1),
    ],
)
def test_a_peer_with_other_rules_is_named_and_refused(field: str, value: str | int) -> None:
    hello = peer_hello()
    setattr(hello, field, value)

    with pytest.raises(AlignmentError, match=f"differently: {field}"):
        started(names(range(3))).receive(AlignFrame(hello=hello))


def test_parties_with_different_versions_both_see_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherEngine(EcdhEngine):
        def start(
            self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
        ) -> EcdhExchange:
            session = super().start(ids, nonce=nonce, run_id=run_id, splits=splits)
            session._hello.version = 7
            return session

    other = OtherEngine(min_aligned=1, max_set_size=100, workers=0)

    outcomes = align_both((names(range(3)), names(range(3))), (ENGINE, other))

    assert [type(outcome.error) for outcome in outcomes] == [AlignmentError] * 2


# ---- a peer that breaks the rules ----


def peer_hello(set_size: int = 40) -> AlignHello:
    return AlignHello(
        engine="ecdh-ristretto255",
        version=1,
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
    assert session.receive(AlignFrame(hello=peer_hello(peer_set_size))) == []
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


def points_frame(chunk: int, data: bytes) -> AlignFrame:
    return AlignFrame(points=MaskedPoints(chunk=chunk, points=data))


def tags_frame(chunk: int, data: bytes) -> AlignFrame:
    return AlignFrame(tags=Tags(chunk=chunk, tags=data))


def done_frame(count: int = 0, digest: bytes = bytes(32)) -> AlignFrame:
    return AlignFrame(done=AlignDone(count=count, digest=digest))


NOT_CANONICAL = bytes.fromhex("ed" + "ff" * 30 + "7f")
IDENTITY = bytes(32)


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        pytest.param(points_frame(0, points(17)), TooLarge, id="more points than a chunk"),
        pytest.param(points_frame(0, points(15)), InvalidMessage, id="fewer points"),
        pytest.param(points_frame(0, b""), InvalidMessage, id="no points"),
        pytest.param(points_frame(0, points(16)[:-1]), InvalidMessage, id="half a point"),
        pytest.param(points_frame(0, points(15) + IDENTITY), InvalidMessage, id="identity"),
        pytest.param(points_frame(0, NOT_CANONICAL + points(15)), InvalidMessage, id="no point"),
        pytest.param(points_frame(1, points(16)), OutOfStep, id="wrong chunk of points"),
        pytest.param(tags_frame(0, bytes(256)), OutOfStep, id="tags for nothing"),
        pytest.param(done_frame(), OutOfStep, id="done too early"),
        pytest.param(AlignFrame(hello=peer_hello()), OutOfStep, id="second hello"),
        pytest.param(AlignFrame(), InvalidMessage, id="empty frame"),
    ],
)
def test_a_bad_frame_after_the_hello_is_rejected(
    frame: AlignFrame, error: type[SplitveilError]
) -> None:
    session = greeted(names(range(20)))

    with pytest.raises(error):
        session.receive(frame)
    assert session.done_ids == 0
    assert len(session.receive(points_frame(0, points(16)))) == 1


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        pytest.param(tags_frame(0, bytes(17 * 16)), TooLarge, id="too many tags"),
        pytest.param(tags_frame(0, bytes(15 * 16)), InvalidMessage, id="too few tags"),
        pytest.param(tags_frame(1, bytes(16 * 16)), OutOfStep, id="wrong chunk of tags"),
    ],
)
def test_bad_tags_are_rejected(frame: AlignFrame, error: type[SplitveilError]) -> None:
    session = greeted(names(range(40)))
    next(session.own_frames())

    with pytest.raises(error):
        session.receive(frame)
    assert session.receive(tags_frame(0, bytes(256))) == []


def test_tags_are_accepted_only_for_chunks_that_were_sent() -> None:
    session = greeted(names(range(40)))
    frames = session.own_frames()
    next(frames)
    session.receive(tags_frame(0, bytes(256)))

    with pytest.raises(OutOfStep, match="not sent"):
        session.receive(tags_frame(1, bytes(256)))
    next(frames)
    assert session.receive(tags_frame(1, bytes(256))) == []


def test_tags_after_the_last_one_are_rejected() -> None:
    session = greeted(names(range(16)))
    list(session.own_frames())
    session.receive(tags_frame(0, bytes(256)))

    with pytest.raises(OutOfStep):
        session.receive(tags_frame(1, bytes(16)))


def test_points_beyond_the_announced_set_are_rejected() -> None:
    session = greeted(names(range(16)), peer_set_size=18)
    session.receive(points_frame(0, points(16)))

    with pytest.raises(TooLarge):
        session.receive(points_frame(1, points(3)))
    session.receive(points_frame(1, points(2, first=16)))
    with pytest.raises(TooLarge, match="announced"):
        session.receive(points_frame(2, points(1)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"set_size": 0}, InvalidMessage),
        ({"set_size": 10_001}, TooLarge),
        ({"nonce": b"short"}, InvalidMessage),
        ({"run_id": "another"}, OutOfStep),
    ],
)
def test_a_bad_hello_is_rejected(
    changes: dict[str, int | bytes | str], error: type[SplitveilError]
) -> None:
    hello = peer_hello()
    for name, value in changes.items():
        setattr(hello, name, value)

    with pytest.raises(error):
        started(names(range(3))).receive(AlignFrame(hello=hello))


@pytest.mark.parametrize(
    "frame", [points_frame(0, points(16)), tags_frame(0, bytes(256)), done_frame()]
)
def test_nothing_is_answered_or_sent_before_the_hello(frame: AlignFrame) -> None:
    session = started(names(range(16)))

    with pytest.raises(OutOfStep):
        session.receive(frame)
    with pytest.raises(OutOfStep, match="hello"):
        next(session.own_frames())


def complete(own: list[str], peer: list[str]) -> tuple[EcdhExchange, AlignFrame]:
    """Bring two sessions to the point where each has its done frame to send; returns the peer's."""
    sessions = started(own), ENGINE.start(peer, nonce=NONCES[1], run_id="run")
    sessions[0].receive(sessions[1].hello())
    sessions[1].receive(sessions[0].hello())
    under_way = [(1, frame) for frame in sessions[0].own_frames()]
    under_way += [(0, frame) for frame in sessions[1].own_frames()]
    done: dict[int, AlignFrame] = {}
    while under_way:
        receiver, frame = under_way.pop(0)
        for reply in sessions[receiver].receive(frame):
            if reply.HasField("done"):
                done[1 - receiver] = reply
            else:
                under_way.append((1 - receiver, reply))
    return sessions[0], done[0]


def test_the_honest_done_is_accepted() -> None:
    session, done = complete(names(range(20)), names(range(10, 30)))

    session.receive(done)

    assert session.is_complete
    assert {f"customer {row}" for row in session.result()} == set(names(range(10, 20)))


@pytest.mark.parametrize("field", ["count", "digest"])
def test_a_tampered_done_is_an_alignment_error(field: str) -> None:
    session, done = complete(names(range(20)), names(range(10, 30)))
    if field == "count":
        done.done.count += 1
    else:
        done.done.digest = bytes(32)
    session.receive(done)

    with pytest.raises(AlignmentError, match="disagree"):
        session.result()


def test_a_done_with_a_short_digest_or_twice_is_rejected() -> None:
    session, done = complete(names(range(20)), names(range(10, 30)))

    with pytest.raises(InvalidMessage, match="digest"):
        session.receive(done_frame(10, b"short"))
    session.receive(done)
    with pytest.raises(OutOfStep):
        session.receive(done)


def test_there_is_no_result_before_the_peers_done() -> None:
    session, _ = complete(names(range(20)), names(range(10, 30)))

    with pytest.raises(OutOfStep, match="not complete"):
        session.result()


@pytest.mark.parametrize("what", ["point", "tag"])
def test_a_point_or_a_tag_that_comes_twice_is_rejected(what: str) -> None:
    """Otherwise one id of a party could be counted as two common ones."""
    session = greeted(names(range(2)), peer_set_size=2)
    list(session.own_frames())
    session.receive(points_frame(0, points(1) * 2 if what == "point" else points(2)))

    with pytest.raises(InvalidMessage, match="same tag"):
        session.receive(tags_frame(0, bytes(32) if what == "tag" else bytes(16) + b"1" * 16))


def test_a_rule_broken_in_mid_stream_ends_both_parties_at_once() -> None:
    class Repeating(EcdhEngine):
        def start(
            self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
        ) -> EcdhExchange:
            session = super().start(ids, nonce=nonce, run_id=run_id, splits=splits)
            own = session.own_frames
            session.own_frames = lambda: (  # type: ignore[method-assign]
                points_frame(0, frame.points.points) for frame in own()
            )
            return session

    liar = Repeating(min_aligned=1, max_set_size=100, workers=0)

    outcomes = align_both((names(range(50)), names(range(50))), (ENGINE, liar))

    assert type(outcomes[0].error) is OutOfStep
    assert type(outcomes[1].error) is PeerUnreachable
    assert "silent" not in str(outcomes[1].error)


def test_a_failure_of_the_sending_side_is_raised_at_once_and_as_it_is() -> None:
    workers = engine(workers=1)
    pool = workers._group
    assert isinstance(pool, WorkerPool)
    process = pool._workers[0]._process
    process.kill()
    process.wait()

    outcomes = align_both((names(range(50)), names(range(50))), (workers, ENGINE))
    workers.close()

    assert "worker process ended" in str(outcomes[0].error)
    assert type(outcomes[1].error) is PeerUnreachable
    assert "silent" not in str(outcomes[1].error)


def test_a_sender_that_cannot_send_wakes_the_receiver() -> None:
    class Mute:
        """Sends the hello and nothing else."""

        def __init__(self, channel: AlignChannel) -> None:
            self._channel = channel

        def send(self, frame: AlignFrame) -> None:
            if not frame.HasField("hello"):
                raise PeerUnreachable("mute")
            self._channel.send(frame)

        def receive(self) -> AlignFrame:
            return self._channel.receive()

        def close(self) -> None:
            self._channel.close()

    here, there = channel_pair(deadline_s=LONG_S)
    there.send(AlignFrame(hello=peer_hello()))

    with pytest.raises(PeerUnreachable, match="mute"):
        align(ENGINE, names(range(50)), Mute(here), nonce=NONCES[0], run_id="run")


# ---- channels ----


def test_queues_of_one_frame_do_not_deadlock() -> None:
    ids = names(range(200)), names(range(100, 350))

    first, second = align_both(ids, channels=channel_pair(deadline_s=LONG_S, queue_frames=1))

    assert common_ids(ids[0], first) == common_ids(ids[1], second)
    assert len(first.alignment.rows) == 100


def stream_pair(deadline_s: float, queue_frames: int) -> tuple[StreamChannel, StreamChannel]:
    """Two ends of one stream, as a client and a server see it: each reads the other's frames."""
    ends: list[StreamChannel] = []
    ready = threading.Event()

    def frames_of_server() -> Iterator[AlignFrame]:
        assert ready.wait(LONG_S)
        yield from ends[1].outgoing

    client = StreamChannel(
        lambda _outgoing: frames_of_server(), deadline_s=deadline_s, queue_frames=queue_frames
    )
    server = StreamChannel(
        lambda _outgoing: client.outgoing, deadline_s=deadline_s, queue_frames=queue_frames
    )
    ends += [client, server]
    ready.set()
    return client, server


def test_streams_with_the_smallest_buffers_give_the_same_result() -> None:
    ids = names(range(200)), names(range(100, 350))

    first, second = align_both(ids, channels=stream_pair(deadline_s=LONG_S, queue_frames=1))

    assert common_ids(ids[0], first) == common_ids(ids[1], second)
    assert len(first.alignment.rows) == 100


def test_a_silent_peer_is_unreachable_after_the_deadline() -> None:
    here, _there = channel_pair(deadline_s=0.05)

    with pytest.raises(PeerUnreachable, match=r"silent for 0\.05 s"):
        align(ENGINE, names(range(3)), here, nonce=b"", run_id="")


def test_a_peer_that_takes_nothing_more_is_unreachable_after_the_deadline() -> None:
    here, there = channel_pair(deadline_s=0.3, queue_frames=1)
    there.send(AlignFrame(hello=peer_hello()))

    with pytest.raises(PeerUnreachable, match="silent"):
        align(ENGINE, names(range(100)), here, nonce=NONCES[0], run_id="run")


def test_a_stream_that_ends_early_or_breaks_is_unreachable() -> None:
    def broken() -> Iterator[AlignFrame]:
        yield AlignFrame(hello=peer_hello())
        raise ConnectionResetError

    for incoming in (iter(()), iter([AlignFrame(hello=peer_hello())]), broken()):
        channel = StreamChannel(lambda _outgoing, frames=incoming: frames, deadline_s=LONG_S)  # type: ignore[misc]
        with pytest.raises(PeerUnreachable, match=r"closed|broke off"):
            align(ENGINE, names(range(20)), channel, nonce=NONCES[0], run_id="run")
        # Both ends of the stream end: what iterates over the frames to send is not left waiting.
        assert next(channel.outgoing).HasField("hello")
        assert all(frame.HasField("points") for frame in channel.outgoing)


def test_an_error_of_the_stream_can_be_translated() -> None:
    def refused() -> Iterator[AlignFrame]:
        raise ConnectionRefusedError
        yield

    channel = StreamChannel(
        lambda _outgoing: refused(),
        deadline_s=LONG_S,
        translate=lambda _: AlignmentError("told so"),
    )

    with pytest.raises(AlignmentError, match="told so"):
        channel.receive()


def test_closing_lets_sent_frames_through_and_ends_the_stream() -> None:
    channel = StreamChannel(lambda _outgoing: iter(()), deadline_s=LONG_S)
    channel.send(done_frame(1))
    channel.send(done_frame(2))

    channel.close()

    assert [frame.done.count for frame in channel.outgoing] == [1, 2]
    with pytest.raises(PeerUnreachable):
        channel.send(done_frame(3))


# ---- settings ----


def test_settings_build_the_default_engine() -> None:
    section = validate(EcdhAlignment, {"engine": "ecdh", "min_aligned": 2}, "contract.yaml")
    built = build_engine(section, AlignmentResources(workers=1))
    try:
        ids = names(range(2)), names(range(1, 3))
        with ThreadPoolExecutor(2) as executor:
            ends = channel_pair(deadline_s=LONG_S)
            runs = [
                executor.submit(align, built, ids[i], ends[i], nonce=b"", run_id="") for i in (0, 1)
            ]
            assert all(isinstance(run.exception(), AlignmentError) for run in runs)
    finally:
        built.close()
    assert (EcdhAlignment().min_aligned, EcdhAlignment().max_set_size) == (100, 10_000_000)

"""Alignment: both parties find exactly the common ids, in one order, and refuse what is wrong."""

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest

from splitveil.common.alignment.buckets import secret_permutation
from splitveil.common.alignment.channel import channel_pair
from splitveil.common.alignment.exchange import _send_all, align
from splitveil.common.data.ids import canonical_ids
from splitveil.common.errors import AlignmentError, DataError, InvalidMessage, PeerUnreachable
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    ENGINE,
    LONG_S,
    NONCES,
    Passing,
    align_both,
    commitment_frame,
    common_ids,
    digests,
    engine,
    greeted,
    names,
    peer_hello,
    points_of,
    split,
    started,
    tags_frame,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


# ---- what it promises ----


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


def test_a_permutation_puts_every_row_everywhere_equally_often() -> None:
    """Chi-squared over 4 x 4 cells, 9 degrees of freedom: below 33.7 but for one seed in 10,000.

    The same bound rejects permutations of which every twentieth is the identity.
    """

    def chi_squared(permutations: list[np.ndarray]) -> float:
        counts = np.zeros((4, 4))
        for permutation in permutations:
            counts[np.arange(4), permutation] += 1
        expected = len(permutations) / 4
        # A row has one place, so the cells of a permutation vary less by (n - 1) / n.
        return float(((counts - expected) ** 2 / expected).sum() * 3 / 4)

    draw = random.Random(1).randbytes
    drawn = [secret_permutation(4, draw(32)) for _ in range(8000)]
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
        (["3.4E+15", "ab", "3.4E+15"], "1 duplicate ids, some shortened by a spreadsheet"),
        (["ab", "", "cd", " \t"], "2 missing or empty ids: data rows 2, 4"),
        (["ab", ""], "1 missing or empty ids: data rows 2"),
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
def test_unusable_ids_are_named_by_row_and_never_by_text(raw: list[str], message: str) -> None:
    with pytest.raises(DataError) as caught:
        canonical_ids(raw, "rows.csv, column k")
    assert message in str(caught.value)
    assert str(caught.value).startswith("rows.csv, column k: ")
    assert not any(text.strip() in str(caught.value) for text in raw if text and text.strip())


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
    assert "check --connect at both parties compares how they write" in str(outcomes[0].error)
    assert "30 own ids, 20 ids of the other party, 4 in common" in str(outcomes[1].error)


def test_another_result_of_the_peer_stops_both() -> None:
    """A channel that flips a bit of one tag on its way: the other party committed to another."""

    class Flipping(Passing):
        def send(self, frame: pb.AlignFrame) -> None:
            if frame.HasField("tags"):
                tags = bytes([frame.tags.tags[0] ^ 4]) + frame.tags.tags[1:]
                frame = pb.AlignFrame(tags=pb.Tags(chunk=frame.tags.chunk, tags=tags))
            super().send(frame)

    here, there = channel_pair(deadline_s=LONG_S)
    ids = names(range(10))
    outcomes = align_both((ids, ids), channels=(Flipping(here), there))
    assert type(outcomes[0].error) is PeerUnreachable
    assert type(outcomes[1].error) is InvalidMessage
    assert "not those that it committed to" in str(outcomes[1].error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "another"),
        ("version", 3),
        ("normalisation", "none"),
        ("tag_bytes", 10),
        ("chunk_ids", 1),
    ],
)
def test_a_peer_with_other_rules_is_named_and_refused(field: str, value: str | int) -> None:
    hello = peer_hello()
    setattr(hello, field, value)
    with pytest.raises(AlignmentError, match=f"differently: {field}"):
        started(names(range(3))).receive(pb.AlignFrame(hello=hello))


class _Noting:
    """A channel that notes what is sent, and lets something happen with the first frame."""

    def __init__(self, first: Callable[[], None]) -> None:
        self.sent: list[str] = []
        self._first = first

    def send(self, frame: pb.AlignFrame) -> None:
        if not self.sent:
            self._first()
        self.sent.append(f"{frame.WhichOneof('body')} {frame.tags.chunk}")

    def receive(self) -> pb.AlignFrame:
        raise NotImplementedError

    def close(self) -> None:
        """Close nothing."""


def test_a_reply_never_overtakes_tags_that_were_made_before_it() -> None:
    """The peer may answer the commitment before the first tags after it have left."""
    replies: SimpleQueue[Iterable[pb.AlignFrame] | None] = SimpleQueue()

    def peer_is_fast() -> None:
        replies.put([tags_frame(1, b"")])
        replies.put(None)

    channel = _Noting(peer_is_fast)
    _send_all(channel, iter([commitment_frame(b"", b""), tags_frame(0, b"")]), replies)
    assert channel.sent == ["commitment 0", "tags 0", "tags 1"]

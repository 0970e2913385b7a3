"""Ids and peers as bad as they come: each has the outcome that the threat model's table says."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from splitveil.common.alignment import AlignChannel, Alignment, QueueChannel, align, channel_pair
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.ids import Allowed, canonical_ids
from splitveil.common.errors import DataError, InvalidMessage, OutOfStep, SplitveilError, TooLarge
from splitveil.common.party.aligned_table import aligning, read_own_ids
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    ENGINE,
    LONG_S,
    NONCES,
    Outcome,
    Passing,
    align_both,
    common_ids,
    names,
    peer_hello,
    points,
    points_frame,
    usable_ids,
)
from tests.support.runs import write_example

pytestmark = pytest.mark.usefixtures("small_chunks")

LONG = 64 * 1024


# ---- ids ----


def test_a_table_without_rows_ends_before_anything_is_sent(tmp_path: Path) -> None:
    write_example(tmp_path, rows=40)
    (tmp_path / "passive.csv").write_text("id,x1,x2,x3,x4,x5\n")
    own = aligning(load_party_settings(PassiveSettings, tmp_path / "passive.yaml"))
    with pytest.raises(DataError, match="there are no rows"):
        read_own_ids(own)


def test_ids_that_are_all_equal_are_an_error_or_a_single_id() -> None:
    raw = ["the same"] * 1000
    with pytest.raises(DataError, match="999 duplicate ids"):
        canonical_ids(raw, "here")
    first = usable_ids(raw, CanonicalForm(), Allowed(duplicates=True))
    assert first.ids == ["the same"]
    assert first.report.left_out == 999
    outcomes = align_both((first.ids, ["another", *first.ids]))
    assert [len(outcome.alignment.rows) for outcome in outcomes] == [1, 1]
    assert first.rows == outcomes[0].alignment.rows.tolist() == [0]


def test_ids_of_one_byte_of_64_kib_and_in_any_unicode_align_exactly() -> None:
    short = [chr(code) for code in (*range(33, 127), 0xEB, 0x202E, 0x6F22, 0x10300, 0x10FFFD)]
    long = [character * (LONG - 1) + last for character in "ab" for last in "xyz"]
    mine, theirs = [*short[:60], *long[:4]], [*long[2:], *reversed(short[30:])]
    outcomes = align_both((mine, theirs))
    found = [common_ids(ids, one) for ids, one in zip((mine, theirs), outcomes, strict=True)]
    assert found[0] == found[1]
    assert sorted(found[0]) == sorted({*short[30:60], *long[2:4]})


# ---- peers ----


def align_here(channel: AlignChannel, ids: Sequence[str]) -> Alignment:
    return align(ENGINE, ids, channel, nonce=NONCES[0], run_id="run")


Tampering = Callable[[list[pb.AlignFrame]], list[pb.AlignFrame]]
"""What becomes of all chunks of a peer's points."""


def identity_last(frames: list[pb.AlignFrame]) -> list[pb.AlignFrame]:
    last = frames[-1].points
    return [*frames[:-1], points_frame(last.chunk, last.points[:-32] + bytes(32))]


def no_point_first(frames: list[pb.AlignFrame]) -> list[pb.AlignFrame]:
    first = frames[0].points
    return [points_frame(0, b"\xff" * 32 + first.points[32:]), *frames[1:]]


class Tampers(Passing):
    """Holds a peer's chunks of points back, and sends what the tampering makes of them."""

    def __init__(self, channel: QueueChannel, num_chunks: int, tampering: Tampering) -> None:
        super().__init__(channel)
        self._num_chunks = num_chunks
        self._tampering = tampering
        self._held: list[pb.AlignFrame] = []

    def send(self, frame: pb.AlignFrame) -> None:
        if frame.WhichOneof("body") != "points":
            super().send(frame)
            return
        self._held.append(frame)
        if len(self._held) == self._num_chunks:
            for one in self._tampering(self._held):
                super().send(one)


@pytest.mark.parametrize(
    ("tampering", "error"),
    [
        pytest.param(lambda all_: [all_[0], *all_], OutOfStep, id="repeats a chunk"),
        pytest.param(lambda all_: [all_[1], all_[0], *all_[2:]], OutOfStep, id="swaps two chunks"),
        pytest.param(lambda all_: [all_[0], *all_[2:]], OutOfStep, id="leaves one out"),
        pytest.param(lambda all_: [*all_, all_[-1]], TooLarge, id="sends more than it announced"),
        pytest.param(identity_last, InvalidMessage, id="sends the identity"),
        pytest.param(no_point_first, InvalidMessage, id="sends no point"),
    ],
)
def test_a_peer_that_tampers_with_its_chunks_is_refused_at_once(
    tampering: Tampering, error: type[SplitveilError]
) -> None:
    ids = names(range(70))  # five chunks of 16, the last of which has 6
    here, there = channel_pair(deadline_s=LONG_S)
    honest, dishonest = align_both((ids, ids), channels=(here, Tampers(there, 5, tampering)))
    assert type(honest.error) is error
    assert isinstance(dishonest.error, SplitveilError), "it learns nothing either"


class Endless(Passing):
    """Hands out one frame again and again, and counts how often."""

    def __init__(self, channel: QueueChannel, frames: Sequence[pb.AlignFrame]) -> None:
        super().__init__(channel)
        self.taken = 0

        def receive() -> pb.AlignFrame:
            self.taken += 1
            return frames[min(self.taken, len(frames)) - 1]

        self.receive = receive

    def send(self, frame: pb.AlignFrame) -> None:
        """Take everything."""


HELLO = pb.AlignFrame(hello=peer_hello(set_size=40))


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        pytest.param([HELLO], OutOfStep, id="greetings"),
        pytest.param([HELLO, points_frame(0, points(16))], OutOfStep, id="one chunk"),
        pytest.param(
            [HELLO, *(points_frame(n, points(16, first=16 * n)) for n in range(9))],
            TooLarge,
            id="new chunks",
        ),
        pytest.param([HELLO, pb.AlignFrame()], InvalidMessage, id="empty frames"),
    ],
)
def test_a_peer_that_sends_for_ever_is_refused_after_what_it_announced(
    frames: Sequence[pb.AlignFrame], error: type[SplitveilError]
) -> None:
    here, _ = channel_pair(deadline_s=LONG_S)
    endless = Endless(here, frames)
    outcome = Outcome(lambda: align_here(endless, names(range(20))))
    assert type(outcome.error) is error
    assert endless.taken <= 5


def test_what_a_peer_sends_after_the_end_is_not_waited_for() -> None:
    class GoesOn(Passing):
        def send(self, frame: pb.AlignFrame) -> None:
            super().send(frame)
            if frame.WhichOneof("body") == "done":
                for _ in range(3):
                    super().send(frame)

    here, there = channel_pair(deadline_s=LONG_S)
    ids = names(range(20))
    honest, _ = align_both((ids, ids), channels=(here, GoesOn(there)))
    assert sorted(common_ids(ids, honest)) == sorted(ids)

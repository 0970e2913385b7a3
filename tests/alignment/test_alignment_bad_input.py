"""Ids and peers as bad as they come: each has the outcome that the threat model's table says."""

from pathlib import Path

import pytest

from splitveil.common.alignment import channel_pair
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.ids import Allowed, canonical_ids
from splitveil.common.errors import DataError
from splitveil.common.party.aligned_table import aligning, read_own_ids
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import LONG_S, Passing, align_both, common_ids, names, usable_ids
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


"""What becomes of all chunks of a peer's points."""


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

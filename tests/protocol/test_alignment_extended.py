"""New ids are added to a finished alignment at their own cost, if both parties keep the key."""

import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from splitveil.common.alignment import TriedIds
from splitveil.common.alignment import partitions as partitions_module
from splitveil.common.alignment.known import KeptKeys, KeyFiles
from splitveil.common.errors import PeerUnreachable
from tests.aligned import Outcome, common_ids, names
from tests.exchanging import Pair

pytestmark = pytest.mark.usefixtures("small_chunks")

SOME, OTHERS = range(100), range(60, 190)


def pair_of(folder: Path, own: Sequence[int] = SOME, peer: Sequence[int] = OTHERS) -> Pair:
    return Pair(folder, (names(own), names(peer)), keeps_keys=True)


def aligned(folder: Path, own: Sequence[int] = SOME, peer: Sequence[int] = OTHERS) -> Pair:
    """Return a pair that has aligned once, with its work reset."""
    pair = pair_of(folder, own, peer)
    check(pair, pair.attempt())
    work(pair)
    return pair


def check(pair: Pair, outcomes: Sequence[Outcome]) -> None:
    """Compare the outcomes with Python sets."""
    found = [common_ids(ids, one) for ids, one in zip(pair.ids, outcomes, strict=True)]
    assert found[0] == found[1]
    assert len(found[0]) == len(set(found[0]))
    assert set(found[0]) == set(pair.ids[0]) & set(pair.ids[1])


def work(pair: Pair) -> list[int]:
    """Return how many ids each party has masked and multiplied since the last call."""
    done = [number for group in pair.groups for number in (group.masked, group.multiplied)]
    for group in pair.groups:
        group.masked = group.multiplied = 0
    return done


def key_of(pair: Pair, index: int) -> KeyFiles:
    key = pair.files[index].key
    assert key is not None
    return key


def change(sets: list[set[int]], draw: random.Random) -> None:
    for one in sets:
        for number in draw.sample(range(150), draw.choice([0, 0, 1, 40])):
            one ^= {number}
        one |= {200}  # so that something is common


# ---- the result, and its cost ----


@pytest.mark.parametrize("seed", range(30))
def test_any_additions_and_removals_give_the_common_ids_at_the_cost_of_the_new_ones(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    pair = pair_of(tmp_path)
    sets = [{200, *draw.sample(range(150), draw.randrange(150))} for _ in range(2)]
    known: list[set[int]] = [set(), set()]
    for _ in range(6):
        own, peer = (names(draw.sample(sorted(one), len(one))) for one in sets)
        pair.ids = own, peer
        pair.limits = draw.choices([None, 2**15], k=2)
        check(pair, pair.attempt())
        new = [len(one - before) for one, before in zip(sets, known, strict=True)]
        assert work(pair) == [new[0], new[1], new[1], new[0]]
        known = [set(one) for one in sets]
        change(sets, draw)


@pytest.mark.parametrize("seed", range(20))
def test_rounds_that_break_off_lead_to_the_exact_result_however_ids_change_meanwhile(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    pair = pair_of(tmp_path)
    pair.tried = [TriedIds(10_000) for _ in range(2)]
    sets = [{200, *draw.sample(range(150), 90)} for _ in range(2)]
    broken = 0
    for _ in range(12):
        pair.ids = names(sorted(sets[0])), names(sorted(sets[1]))
        pair.limits = draw.choices([None, 2**15], k=2)
        frames = draw.choice([None, 1, 3, 8, 15, draw.randrange(1, 30)])
        breaks = draw.choice([(frames, None), (None, frames)])
        pair.settles = draw.random() < 0.7
        outcomes = pair.attempt(breaks_at=breaks)
        if all(outcome.error is None for outcome in outcomes):
            check(pair, outcomes)
            if not pair.settles:
                pair.files[draw.randrange(2)].settle()  # one of them has heard from the other
        else:
            assert any(isinstance(one.error, PeerUnreachable) for one in outcomes)
            broken += 1
        if draw.random() < 0.6:
            change(sets, draw)
    assert broken
    pair.ids = names(sorted(sets[0])), names(sorted(sets[1]))
    check(pair, pair.attempt())


@pytest.mark.parametrize(("added", "also"), [(0, 0), (5, 0), (0, 5), (3, 40)])
def test_the_bytes_are_those_of_the_new_ids(tmp_path: Path, added: int, also: int) -> None:
    pair = aligned(tmp_path, range(180), range(90, 240))
    pair.ids = names(range(180 + added)), names(range(90, 240 + also))
    check(pair, pair.attempt())
    assert work(pair) == [added, also, also, added]
    for sent, own, other in zip(pair.sent_bytes, (added, also), (also, added), strict=True):
        ids = 32 * own + 16 * other
        # A hello, a commitment, what was found and the proof; and what each frame has besides.
        assert ids < sent < ids + 700 + 8 * (own + other)


def test_ids_that_leave_cost_their_tags_and_come_back_as_new_ones(tmp_path: Path) -> None:
    pair = aligned(tmp_path)
    pair.ids = names(range(10, 100)), names(range(60, 190))
    check(pair, pair.attempt())
    assert work(pair) == [0, 0, 0, 0]
    assert 160 < pair.sent_bytes[0] < 900
    pair.ids = names(range(100)), names(range(60, 190))
    check(pair, pair.attempt())
    assert work(pair) == [10, 0, 0, 10]


def test_a_resumed_round_repeats_no_work(tmp_path: Path) -> None:
    pair = aligned(tmp_path)
    pair.ids = names(range(180)), names(range(60, 260))  # 80 and 70 new ones
    first, second = pair.attempt(breaks_at=(5, None))  # a hello and four chunks of points
    assert isinstance(first.error, PeerUnreachable)
    assert isinstance(second.error, PeerUnreachable)
    check(pair, pair.attempt())
    masked, multiplied, _, multiplied_there = work(pair)
    assert masked <= 80 + 16  # the chunk that was lost
    assert (multiplied, multiplied_there) == (70, 80)


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("last", ["done", "list_proof"])
def test_a_last_message_that_is_lost_costs_neither_party_an_id(
    tmp_path: Path, loser: int, last: str
) -> None:
    pair = aligned(tmp_path)
    pair.ids = names(range(110)), names(range(60, 195))
    pair.loses_last_frame_of, pair.last_frame = 1 - loser, last
    outcomes = pair.attempt()
    assert isinstance(outcomes[loser].error, PeerUnreachable)
    pair.loses_last_frame_of = None
    check(pair, pair.attempt())
    assert work(pair) == [10, 5, 5, 10]


@pytest.mark.parametrize("settled", [0, 1])
def test_a_party_that_does_not_know_whether_the_other_has_the_outcome_goes_on_from_either(
    tmp_path: Path, settled: int
) -> None:
    """One of them was killed before the next message of the other, and the ids have changed."""
    pair = aligned(tmp_path)
    pair.ids, pair.settles = (names(range(110)), names(range(60, 195))), False
    check(pair, pair.attempt())
    work(pair)
    assert [len(key_of(pair, index).load()) for index in (0, 1)] == [2, 2]
    pair.files[settled].settle()
    pair.ids, pair.settles = (names(range(112)), names(range(60, 198))), True
    check(pair, pair.attempt())
    assert work(pair) == [2, 3, 3, 2]
    assert [len(key_of(pair, index).load()) for index in (0, 1)] == [1, 1]


def test_a_memory_limit_holds_for_what_is_known_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    first_ranges = partitions_module._first_ranges

    def noted(weights: np.ndarray, most_bytes: int) -> np.ndarray:
        found = first_ranges(weights, most_bytes)
        numbers.append(len(found))
        assert all(
            part.sum() <= most_bytes for part in np.split(weights, np.asarray(found[1:], int))
        )
        return found

    monkeypatch.setattr(partitions_module, "_first_ranges", noted)
    small = aligned(tmp_path)
    small.limits = [2**14, 2**14]
    small.ids = names(range(20, 120)), names(range(50, 200))
    numbers.clear()
    check(small, small.attempt())
    # Known ids, gone ones, the secret order, the common ids, and the lists that are kept.
    assert len(numbers) >= 8
    assert max(numbers) > 3


# ---- without a key in common ----


def whole(pair: Pair) -> list[int]:
    own, peer = map(len, pair.ids)
    return [own, peer, peer, own]


def test_a_first_alignment_and_one_without_keys_exchange_all_ids(tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    check(pair, pair.attempt())
    assert work(pair) == whole(pair)
    without = Pair(tmp_path / "without", pair.ids)
    for _ in range(2):
        check(without, without.attempt())
        assert work(without) == whole(without)
    assert not list((tmp_path / "without").rglob("state"))


@pytest.mark.parametrize("loser", [0, 1])
def test_a_party_that_has_lost_its_key_makes_both_exchange_all_ids(
    tmp_path: Path, loser: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = aligned(tmp_path)
    key_of(pair, loser).discard()
    with caplog.at_level(logging.INFO):
        check(pair, pair.attempt())
    assert work(pair) == whole(pair)
    said = [r.getMessage() for r in caplog.records if "all ids are exchanged" in r.getMessage()]
    assert sorted(said) == [
        "all ids are exchanged: the other party has kept no key",
        "all ids are exchanged: this party has kept no key",
    ]
    check(pair, pair.attempt())
    assert work(pair) == [0, 0, 0, 0]


def test_a_party_that_is_set_back_to_an_older_state_makes_both_exchange_all_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = aligned(tmp_path)
    shutil.copytree(tmp_path / "keys" / "passive", tmp_path / "backup")
    pair.ids = names(range(110)), names(range(60, 195))
    check(pair, pair.attempt())
    shutil.rmtree(tmp_path / "keys" / "passive")
    shutil.copytree(tmp_path / "backup", tmp_path / "keys" / "passive")
    work(pair)
    with caplog.at_level(logging.INFO):
        check(pair, pair.attempt())
    assert work(pair) == whole(pair)
    assert "the parties have kept the keys of different alignments" in caplog.text


@pytest.mark.parametrize("ending", ["own", "peer"])
@pytest.mark.parametrize("at", [0, -1, None])
def test_damaged_tags_are_not_used(
    tmp_path: Path, ending: str, at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    pair = aligned(tmp_path)
    (path,) = (tmp_path / "keys" / "active").rglob(f"*.{ending}")
    data = bytearray(path.read_bytes())
    if at is None:
        del data[-16:]
    else:
        data[at] ^= 1
    path.write_bytes(data)
    check(pair, pair.attempt())
    assert work(pair) == whole(pair)
    assert "is damaged, and not used" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"rules": "zz"}', '{"rules": 1, "alignments": 2}'])
def test_a_damaged_state_is_not_used(tmp_path: Path, text: str) -> None:
    pair = aligned(tmp_path)
    (path,) = (tmp_path / "keys" / "passive").rglob("state")
    path.write_text(text)
    check(pair, pair.attempt())
    assert work(pair) == whole(pair)


def test_other_rules_for_ids_begin_with_a_new_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = aligned(tmp_path)
    scalar = key_of(pair, 0).load()[0].scalar
    for index, name in enumerate(("active", "passive")):
        keys = KeptKeys(tmp_path / "keys" / name, {"peer": "peer.test"}, b"other rules")
        pair.files[index].key = keys.of("peer")
    with caplog.at_level(logging.INFO):
        check(pair, pair.attempt())
    assert work(pair) == whole(pair)
    assert "under other rules" in caplog.text
    assert key_of(pair, 0).load()[0].scalar != scalar
    check(pair, pair.attempt())
    assert work(pair) == [0, 0, 0, 0]


# ---- the files ----


def test_only_the_owner_can_read_the_key_and_no_id_is_in_its_files(tmp_path: Path) -> None:
    pair = aligned(tmp_path)
    pair.settles = False
    pair.ids = names(range(5, 110)), names(range(60, 195))
    check(pair, pair.attempt())
    paths = [
        path for name in ("active", "passive") for path in (tmp_path / "keys" / name).rglob("*")
    ]
    assert {path.suffix for path in paths} >= {".own", ".peer"}
    assert {path.name for path in paths} >= {"state", "work", "ids"}
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert path.is_dir() or b"customer" not in path.read_bytes()


def test_nothing_but_the_newest_lists_is_left(tmp_path: Path) -> None:
    pair = aligned(tmp_path)
    for last in (105, 110, 115):
        pair.ids = names(range(last)), names(range(60, 190))
        check(pair, pair.attempt())
    for name in ("active", "passive"):
        files = [path.name for path in (tmp_path / "keys" / name / "peer.test").iterdir()]
        assert sorted(name.rpartition(".")[2] for name in files) == ["own", "peer", "state"]


def test_the_same_scalar_is_used_for_new_ids_and_a_fresh_one_for_all(tmp_path: Path) -> None:
    pair = aligned(tmp_path)
    first = key_of(pair, 0).load()[0].scalar
    pair.ids = names(range(110)), names(range(60, 190))
    pair.attempt()
    assert key_of(pair, 0).load()[0].scalar == first
    key_of(pair, 1).discard()
    pair.attempt()
    assert key_of(pair, 0).load()[0].scalar != first

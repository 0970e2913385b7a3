"""The sample order: what it promises, known answers, and Philox written a second time."""

import hashlib
import struct

import numpy as np
import pytest

from splitveil.common.run.sample_order import (
    SPLITS,
    SampleOrder,
    in_common_order,
    joint_seed,
    keyed_id_digests,
    split_rows,
    stable_order,
)

_SEED = bytes(range(32))


def _philox_words(key: tuple[int, ...], count: int) -> list[int]:
    """Philox-4x64-10 from the paper, in plain integers."""
    mask, counter = 2**64 - 1, 0
    words: list[int] = []
    while len(words) < count:
        counter += 1
        block, keys = [counter, 0, 0, 0], list(key)
        for _ in range(10):
            first = 0xD2E7470EE14C6C93 * block[0]
            second = 0xCA5A826395121157 * block[2]
            block = [
                (second >> 64) ^ block[1] ^ keys[0],
                second & mask,
                (first >> 64) ^ block[3] ^ keys[1],
                first & mask,
            ]
            keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
        words += block
    return words[:count]


def test_the_order_is_philox_sorted() -> None:
    positions = np.arange(100, 137)
    digest = hashlib.sha256(b"splitveil sample order v1" + struct.pack("<Q", 5) + _SEED).digest()
    words = _philox_words(struct.unpack("<QQ", digest[:16]), 37)
    expected = positions[sorted(range(37), key=words.__getitem__)]
    order = SampleOrder(_SEED, positions, batch_size=37)
    assert order.batch(5, 0).tolist() == expected.tolist()


def test_the_order_is_the_same_on_every_machine() -> None:
    order = SampleOrder(_SEED, np.arange(10), batch_size=4)
    assert [batch.tolist() for batch in order.epoch(0)] == [[1, 9, 2, 7], [8, 0, 5, 6], [3, 4]]


def test_an_epoch_has_each_position_once_and_epochs_differ() -> None:
    positions = np.arange(1000) * 3
    order = SampleOrder(_SEED, positions, batch_size=64)
    epochs = [np.concatenate(list(order.epoch(epoch))) for epoch in range(3)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), positions)
        assert epoch.dtype == np.int64
    assert (epochs[0] != epochs[1]).mean() > 0.9
    assert (epochs[1] != epochs[2]).mean() > 0.9
    other = SampleOrder(bytes(32), positions, batch_size=64)
    assert (np.concatenate(list(other.epoch(0))) != epochs[0]).mean() > 0.9


@pytest.mark.parametrize(
    ("drop_last", "lengths"), [(False, [4, 4, 2]), (True, [4, 4])], ids=["kept", "dropped"]
)
def test_the_short_last_batch(drop_last: bool, lengths: list[int]) -> None:
    order = SampleOrder(_SEED, np.arange(10), batch_size=4, drop_last=drop_last)
    assert order.steps_per_epoch == len(lengths)
    assert [len(batch) for batch in order.epoch(1)] == lengths
    assert order.batch_sizes == tuple(dict.fromkeys(lengths))
    with pytest.raises(IndexError):
        order.batch(1, len(lengths))
    with pytest.raises(IndexError):
        order.batch(1, -1)


def test_a_batch_cannot_be_changed_by_its_reader() -> None:
    order = SampleOrder(_SEED, np.arange(10), batch_size=4)
    with pytest.raises(ValueError, match="read-only"):
        order.batch(0, 0)[0] = 1


@pytest.mark.parametrize(
    ("positions", "batch_size", "drop_last"),
    [([], 4, False), ([1, 2], 4, True), ([1, 2, 1], 1, False), ([1, 2], 0, False)],
    ids=["empty", "no whole batch", "twice", "batch size"],
)
def test_impossible_orders_are_refused(
    positions: list[int], batch_size: int, drop_last: bool
) -> None:
    with pytest.raises(ValueError, match=r"batch|at most once"):
        SampleOrder(_SEED, np.array(positions, dtype=np.int64), batch_size, drop_last=drop_last)


def test_the_joint_seed_depends_on_every_nonce_and_on_their_borders() -> None:
    seeds = {joint_seed(b"ab", b"c"), joint_seed(b"a", b"bc"), joint_seed(b"c", b"ab")}
    assert len(seeds) == 3
    assert joint_seed(b"ab", b"c") == joint_seed(b"ab", b"c")
    packed = b"splitveil joint seed v1" + struct.pack("<Q", 2) + b"ab" + struct.pack("<Q", 1) + b"c"
    assert joint_seed(b"ab", b"c") == hashlib.sha256(packed).digest()


def test_id_digests_are_keyed_blake2b() -> None:
    ids = ["a", "ä", "客户-7", "a" * 200]
    digests = keyed_id_digests(ids, _SEED)
    expected = [
        hashlib.blake2b(name.encode(), digest_size=16, key=_SEED, person=b"splitveil id v1")
        for name in ids
    ]
    assert [bytes(row) for row in digests] == [digest.digest() for digest in expected]
    assert not np.array_equal(digests, keyed_id_digests(ids, bytes(32)))
    assert keyed_id_digests([], _SEED).shape == (0, 16)


def test_both_parties_come_to_one_order_from_their_own() -> None:
    ids = [f"id-{number}" for number in range(500)]
    theirs = [ids[row] for row in np.random.default_rng(1).permutation(500)]
    common = np.arange(0, 500, 3)
    own, digests = in_common_order(ids, common[::-1], _SEED)
    their_rows = np.array([theirs.index(ids[row]) for row in common])
    others, _ = in_common_order(theirs, their_rows, _SEED)
    in_order = [ids[row] for row in own]
    assert in_order == [theirs[row] for row in others]
    assert np.array_equal(digests, keyed_id_digests(in_order, _SEED))
    assert [bytes(row) for row in digests] == sorted(bytes(row) for row in digests)


def test_the_split_takes_the_fractions_that_are_given() -> None:
    """Five standard errors of a binomial count; fractions 2 % off are distinguished."""
    digests = keyed_id_digests([str(number) for number in range(100_000)], _SEED)
    split = split_rows(digests, 0.7, 0.1, 0.2)
    for name, fraction in zip(SPLITS, (0.7, 0.1, 0.2), strict=True):
        error = 5 * np.sqrt(fraction * (1 - fraction) / 100_000)
        assert abs(len(split[name]) / 100_000 - fraction) < error
        assert abs(len(split[name]) / 100_000 - (fraction + 0.02)) > error
    together = np.concatenate(list(split.values()))
    assert np.array_equal(np.sort(together), np.arange(100_000))
    assert {positions.dtype for positions in split.values()} == {np.dtype(np.int64)}


def test_an_example_keeps_its_split_among_any_others() -> None:
    digests = keyed_id_digests([str(number) for number in range(1000)], _SEED)
    half = digests[::2]
    whole_split, half_split = (split_rows(rows, 0.6, 0.2, 0.2) for rows in (digests, half))
    for name, positions in half_split.items():
        expected = whole_split[name]
        assert np.array_equal(positions * 2, expected[expected % 2 == 0])


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_a_split_of_one_takes_all_and_of_zero_nothing(name: str) -> None:
    digests = np.stack([np.zeros(16, np.uint8), np.full(16, 255, np.uint8)])
    fractions = {"train": 0.0, "validation": 0.0, "test": 0.0} | {name: 1.0}
    split = split_rows(digests, **fractions)
    assert {key: len(rows) for key, rows in split.items()} == {
        key: 2 * int(fraction) for key, fraction in fractions.items()
    }


@pytest.mark.parametrize("fractions", [(0.5, 0.2, 0.2), (1.2, -0.2, 0.0), (0.9, 0.2, 0.1)])
def test_fractions_that_do_not_add_up_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        split_rows(keyed_id_digests(["a"], _SEED), *fractions)


@pytest.mark.parametrize("values", [2, 100, 2**62])
def test_numbers_are_sorted_with_equal_ones_in_their_order(values: int) -> None:
    drawn, ties = np.random.default_rng(4).integers(0, values, (2, 1000), dtype=np.uint64)
    expected = sorted(range(len(drawn)), key=lambda at: (drawn[at], at))
    assert stable_order(drawn).tolist() == expected
    expected = sorted(range(len(drawn)), key=lambda at: (drawn[at], ties[at], at))
    assert stable_order(drawn, ties).tolist() == expected

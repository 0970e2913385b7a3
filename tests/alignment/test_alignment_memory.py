"""An alignment within a memory limit: the same result from tags in files, part by part."""

import errno
import hashlib
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from splitveil.common.alignment import Alignment, ExchangeStore, ExchangeStores, align, channel_pair
from splitveil.common.alignment import partitions as partitions_module
from splitveil.common.alignment.common_tags import common_rows
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.partitions import Records, UnevenError, partitions
from splitveil.common.alignment.tag_lists import SecretOrder, TagList
from splitveil.common.errors import AlignmentError, InvalidMessage, SettingsError, StorageError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    LONG_S,
    NONCES,
    Outcome,
    commitment_frame,
    common_ids,
    names,
    peer_hello,
    points,
    points_frame,
    tags_frame,
)
from tests.support.runs import write_example

SMALL = 2**16
"""A limit at which some thousand ids make many parts."""

OWN, PEER = names(range(5000)), names(range(2000, 9000))
COMMON = set(OWN) & set(PEER)


class Fast:
    """Operations that commute as those of the group do, take no time, and hide nothing."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        first_half = np.frombuffer(digests, np.uint8).reshape(-1, 64)[:, :32]
        return self.multiply(first_half.tobytes(), scalar)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        elements = np.frombuffer(points, np.uint8).reshape(-1, 32)
        return (elements ^ np.frombuffer(scalar, np.uint8)).tobytes()


class Party(NamedTuple):
    ids: list[str]
    files: ExchangeStore


def aligned(parties: tuple[Party, Party], min_aligned: int = 1) -> tuple[Outcome, Outcome]:
    engine = EcdhEngine(min_aligned=min_aligned, max_set_size=10**6, group=Fast())
    ends = channel_pair(deadline_s=LONG_S)

    def work(index: int) -> Alignment:
        own = parties[index]
        return align(
            engine, own.ids, ends[index], nonce=NONCES[index], run_id="run", store=own.files
        )

    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(lambda index: Outcome(partial(work, index)), (0, 1))
    if first.error is None and second.error is None:
        for party in parties:
            party.files.discard()
    return first, second


def parties(
    folder: Path,
    limits: tuple[int | None, int | None],
    ids: tuple[list[str], list[str]] = (OWN, PEER),
) -> tuple[Party, Party]:
    first, second = (
        Party(own, ExchangeStores(folder / name / "run", limit).of("peer"))
        for own, limit, name in zip(ids, limits, ("active", "passive"), strict=True)
    )
    return first, second


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def num_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of parts into which each set of records is sorted."""
    numbers: list[int] = []
    first_ranges = partitions_module._first_ranges

    def noted(*arguments: Any) -> Any:
        found = first_ranges(*arguments)
        numbers.append(len(found))
        return found

    monkeypatch.setattr(partitions_module, "_first_ranges", noted)
    return numbers


@pytest.mark.parametrize("limits", [(SMALL, None), (None, SMALL), (SMALL, SMALL), (None, None)])
def test_the_result_is_the_same_with_a_limit_at_either_party(
    tmp_path: Path, limits: tuple[int | None, int | None], num_parts: list[int]
) -> None:
    first, second = aligned(parties(tmp_path, limits))
    assert set(common_ids(OWN, first)) == COMMON
    assert common_ids(OWN, first) == common_ids(PEER, second)
    assert len(num_parts) == 2 * sum(limit is not None for limit in limits)
    assert all(number > 10 for number in num_parts)
    assert not files_in(tmp_path)


@pytest.mark.parametrize(
    ("own", "peer"),
    [([7], [7]), ([7], range(3000)), (range(3000), [7])],
)
def test_sets_of_any_size_align_within_a_limit(
    tmp_path: Path, own: list[int], peer: list[int]
) -> None:
    ids = names(own), names(peer)
    first, second = aligned(parties(tmp_path, (SMALL, SMALL), ids))
    assert set(common_ids(ids[0], first)) == set(ids[0]) & set(ids[1])
    assert common_ids(ids[0], first) == common_ids(ids[1], second)


def test_too_few_common_ids_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    ids = names(range(300)), names(range(300, 600))
    for outcome in aligned(parties(tmp_path, (SMALL, SMALL), ids)):
        assert isinstance(outcome.error, AlignmentError)
        assert "0 in common" in str(outcome.error)
    assert not files_in(tmp_path)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_ends_the_exchange_and_it_continues_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    both = parties(tmp_path, (SMALL, None))
    write, calls = os.pwrite, [0]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls[0] += 1
        if calls[0] > 100:
            raise OSError(fault, os.strerror(fault))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    first, second = aligned(both)
    assert isinstance(first.error, StorageError)
    assert str(first.error).endswith(f"parts: {os.strerror(fault)}")
    assert second.error is not None
    left = files_in(tmp_path / "active")
    assert not [path for path in left if path.name.endswith("parts")]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in left)
    monkeypatch.setattr(os, "pwrite", write)
    first, second = aligned(both)
    assert common_ids(OWN, first) == common_ids(PEER, second)
    assert not files_in(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    both = parties(tmp_path, (SMALL, None))
    (tmp_path / "active").write_text("a file in the place of the folder")
    first, _ = aligned(both)
    assert isinstance(first.error, StorageError)
    assert ".run.exchanges" in str(first.error)


@pytest.mark.usefixtures("small_chunks")
def test_tags_that_begin_alike_are_refused_and_the_files_removed(tmp_path: Path) -> None:
    """A peer could otherwise make one part as large as it likes."""
    num_ids, files = 1000, ExchangeStore(tmp_path / "kept", SMALL)
    engine = EcdhEngine(min_aligned=1, max_set_size=10_000, group=Fast())
    exchange = engine.start(names(range(num_ids)), nonce=NONCES[0], run_id="run")
    exchange.store_in(files)
    exchange.receive(pb.AlignFrame(hello=peer_hello(16)))
    list(exchange.own_frames())
    given = points(16)
    exchange.receive(points_frame(0, given))
    tags = b"".join(bytes(8) + one.to_bytes(8, "big") for one in range(num_ids))
    exchange.receive(commitment_frame(given, tags))
    assert (tmp_path / "kept" / "order").stat().st_mode & 0o777 == 0o600
    *others, last = (tags_frame(at // 256, tags[at : at + 256]) for at in range(0, 16_000, 256))
    for frame in others:
        exchange.receive(frame)
    with pytest.raises(InvalidMessage, match="begin alike"):
        exchange.receive(last)
    assert not (tmp_path / "kept").exists()


@pytest.mark.usefixtures("small_chunks")
def test_the_tags_that_follow_one_are_read_when_they_are_sent(tmp_path: Path) -> None:
    """They are those of a whole set, to a party that has a single id."""
    num_peer = 640
    engine = EcdhEngine(min_aligned=1, max_set_size=10_000, group=Fast())
    exchange = engine.start(["one"], nonce=NONCES[0], run_id="run")
    exchange.store_in(ExchangeStore(tmp_path / "kept", SMALL))
    exchange.receive(pb.AlignFrame(hello=peer_hello(num_peer)))
    list(exchange.own_frames())
    given = points(num_peer)
    for chunk in range(num_peer // 16):
        exchange.receive(points_frame(chunk, given[chunk * 512 : (chunk + 1) * 512]))
    exchange.receive(commitment_frame(given, bytes(16)))
    tags = exchange._tags.of_peer
    read, places = tags.read, list[int]()

    def noted(first: int, count: int) -> bytes:
        places.append(first)
        return read(first, count)

    tags.read = noted  # type: ignore[method-assign]
    frames = exchange.receive(tags_frame(0, bytes(16)))
    compared = len(places)
    assert len(frames) >= 60
    sent = [frame.WhichOneof("body") for frame in frames]
    assert sent == ["tags"] * (len(frames) - 1) + ["done"]
    assert len(places) - compared == len(frames) - 1
    assert compared <= 2  # to find the common ones: the set is read twice, in one piece


def test_the_secret_order_is_the_same_in_a_file_and_in_memory(tmp_path: Path) -> None:
    size, seed = 20_000, b"s" * 32
    held = SecretOrder(size, seed)
    filed = SecretOrder(size, seed, tmp_path / "order", 2**16)
    assert sorted(held.rows(0, size).tolist()) == list(range(size))
    assert np.array_equal(held.rows(0, size), filed.rows(0, size))
    assert np.array_equal(held.rows(777, 16), filed.rows(777, 16))
    assert np.array_equal(held.rows(size - 3, 16), filed.rows(size - 3, 16))
    assert [path.name for path in tmp_path.iterdir()] == ["order"]


@pytest.mark.parametrize("seed", range(2))
def test_common_rows_found_by_parts_are_those_found_at_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tags = [draw.randbytes(16) for _ in range(6000)]
    own, peer = draw.sample(tags, 4000), draw.sample(tags, 3000)
    lists = TagList(b"".join(own)), TagList(b"".join(peer))
    order = SecretOrder(len(own), bytes([seed]) * 32)
    whole = common_rows(*lists, order)
    by_parts = common_rows(*lists, order, ExchangeStore(tmp_path, SMALL))
    rows = order.rows(0, len(own)).tolist()
    expected = sorted({*own} & {*peer})
    place = dict(zip(own, rows, strict=True))
    assert whole.rows.tolist() == by_parts.rows.tolist() == [place[tag] for tag in expected]
    assert whole.digest.digest() == by_parts.digest.digest()
    assert whole.digest.digest() == hashlib.sha256(b"".join(expected)).digest()
    splits = np.arange(len(own)).astype(np.int8)
    assert whole.split_digest(splits) == by_parts.split_digest(splits) != b""


def test_a_tag_that_is_twice_is_refused_in_any_part(tmp_path: Path) -> None:
    draw = random.Random(1)
    tags = [draw.randbytes(16) for _ in range(2000)]
    once, twice = TagList(b"".join(tags)), TagList(b"".join([*tags, tags[1234]]))
    for own, peer in ((once, twice), (twice, once)):
        order = SecretOrder(len(own), bytes(32))
        with pytest.raises(InvalidMessage, match="same tag"):
            common_rows(own, peer, order, ExchangeStore(tmp_path, SMALL))
    assert not files_in(tmp_path)


def test_parts_hold_all_records_in_order_and_fit_into_the_memory(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    data = draw.integers(0, 256, (5000, 4), np.uint8)
    most, each = 1000, 4
    kind = Records(
        np.dtype("S4"), lambda: (block.view("S4").ravel() for block in np.split(data, 10)), each
    )
    parts = [part for (part,) in partitions([kind], tmp_path / "parts", most)]
    assert len(parts) >= 5000 * each / most
    assert all(len(part) * each <= most for part in parts)
    found = np.concatenate(parts).view(np.uint8).reshape(-1, 4)
    assert np.array_equal(np.sort(found.view("S4").ravel()), np.sort(data.view("S4").ravel()))
    leading = [part.view(np.uint8).reshape(-1, 4)[:, :2].copy().view(">u2") for part in parts]
    for before, after in pairwise(leading):
        assert before.max() < after.min()
    with pytest.raises(UnevenError):
        list(partitions([kind], tmp_path / "parts", each - 1))


@pytest.mark.parametrize(("limit", "is_within"), [(8_000_000, True), (None, False)])
def test_an_exchange_stays_within_its_limit(
    tmp_path: Path, limit: int | None, is_within: bool
) -> None:
    """Measured on what Python and numpy allocate for both parties, which are one process."""
    num_ids = 240_000
    ids = names(range(num_ids)), names(range(num_ids // 2, num_ids + num_ids // 2))
    both = parties(tmp_path, (limit, limit), ids)
    tracemalloc.start()
    try:
        first, second = aligned(both)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(first.alignment.rows) == len(second.alignment.rows) == num_ids // 2
    result = first.alignment.rows.nbytes + second.alignment.rows.nbytes
    assert (peak - result < 2 * 8_000_000) == is_within


def test_a_limit_has_a_unit_and_is_not_too_small_for_the_chunks_under_way(tmp_path: Path) -> None:
    write_example(tmp_path, rows=40)

    def limit(text: str) -> int | None:
        override = f"alignment_memory_limit={text}"
        path = tmp_path / "passive.yaml"
        return load_party_settings(PassiveSettings, path, [override]).alignment_memory_limit

    found = [limit(text) for text in ("128MB", "128MiB", "1.5 GB", "32000000", "null")]
    assert found == [128_000_000, 2**27, 1_500_000_000, 32_000_000, None]
    for text in ("31MB", "0", "-1GB", "much"):
        with pytest.raises(SettingsError, match="alignment_memory_limit"):
            limit(text)

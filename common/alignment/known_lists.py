"""Compares a party's ids with those of an earlier alignment, and writes the lists for a later one.

All of this goes through files, part by part (``partitions.py``), so that the memory is bounded.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.known import ID_HASH_BYTES, Lists
from splitveil.common.alignment.partitions import Block, Records, UnevenError, partitions
from splitveil.common.alignment.sorted_tags import SortedTags
from splitveil.common.alignment.storing import private, storing
from splitveil.common.alignment.tag_lists import (
    ROW,
    TAG,
    TAGGED_ROW,
    SecretOrder,
    TagList,
    read_part,
    tag_blocks,
    tagged_rows,
)
from splitveil.common.errors import InvalidMessage, StorageError

_HASH = np.dtype(f"S{ID_HASH_BYTES}")
_OWN = np.dtype([("tag", TAG), ("id", _HASH)])
_HASHED_ROW = np.dtype([("id", _HASH), ("row", ROW)])
_HASHED_TAG = np.dtype([("id", _HASH), ("tag", TAG)])

_EACH_BYTES = 144
"""Memory for each record of a part: the record, its copies in order, and what is found."""

_IDS_AT_ONCE = 2**13


class Found(NamedTuple):
    """The files that say which ids of a party are known from an alignment."""

    tags: Path
    """Tags of those that it has still."""
    rows: Path
    """Their rows, in the same order."""
    new: Path
    """Rows of ids that are not known."""
    gone: Path
    """Tags of those that it has no longer."""

    @classmethod
    def within(cls, folder: Path) -> "Found":
        """Name the files in a folder."""
        return cls(*(folder / name for name in cls._fields))


def hash_ids(ids: Iterable[str], key: bytes, path: Path) -> None:
    """Write a keyed hash of each id, 16 bytes, in the order of the rows.

    Raises:
        StorageError: the file cannot be written.
    """
    hashed = hashlib.blake2b(digest_size=ID_HASH_BYTES, key=key)
    with storing(path), open(path, "wb", opener=private) as file:
        for one in ids:
            state = hashed.copy()
            state.update(one.encode("utf-8", "surrogatepass"))
            file.write(state.digest())


def find_known(hashes: Path, own: Path, found: Found, most_bytes: int) -> None:
    """Write which ids are known from an alignment, which are new, and which are gone.

    Args:
        hashes: of all ids of this party, from ``hash_ids``.
        own: the file with this party's tags of the alignment.
        found: the files to write.
        most_bytes: memory for it.

    Raises:
        StorageError: a file cannot be read or written.
    """

    def id_blocks() -> Iterator[npt.NDArray[np.void]]:
        first = 0
        for some in _blocks(hashes, _HASH):
            block = np.empty(len(some), _HASHED_ROW)
            block["id"], block["row"] = some, np.arange(first, first + len(some))
            first += len(some)
            yield block

    def known_blocks() -> Iterator[npt.NDArray[np.void]]:
        for some in _blocks(own, _OWN):
            block = np.empty(len(some), _HASHED_TAG)
            block["id"], block["tag"] = some["id"], some["tag"]
            yield block

    kinds = (
        Records(_HASHED_ROW, id_blocks, _EACH_BYTES),
        Records(_HASHED_TAG, known_blocks, _EACH_BYTES),
    )
    with ExitStack() as files:
        tags, rows, new, gone = (files.enter_context(_written(path)) for path in found)
        for unsorted, tagged in _parts(kinds, found.tags.with_name("parts"), most_bytes):
            # So that their order depends on nothing else.
            ids = unsorted[SortedTags(unsorted["id"]).order]
            _, in_ids, in_tagged = np.intersect1d(
                ids["id"], tagged["id"], assume_unique=True, return_indices=True
            )
            tags.write(tagged["tag"][in_tagged].tobytes())
            rows.write(ids["row"][in_ids].tobytes())
            new.write(np.delete(ids["row"], in_ids).tobytes())
            gone.write(np.delete(tagged["tag"], in_tagged).tobytes())


def write_without(tags: Path, gone: Path, left: Path, most_bytes: int) -> None:
    """Write the tags that are left without those that are gone.

    Raises:
        InvalidMessage: one that is gone is not among the tags, or twice.
        StorageError: a file cannot be read or written.
    """
    kinds = [
        Records(TAG, lambda path=path: _blocks(path, TAG), _EACH_BYTES)  # type: ignore[misc]
        for path in (tags, gone)
    ]
    with _written(left) as file:
        try:
            for all_tags, leaving in partitions(kinds, left.with_name("parts"), most_bytes):
                is_left = np.isin(all_tags, leaving, invert=True)
                if np.count_nonzero(~is_left) != len(leaving):
                    raise InvalidMessage("the other party leaves out ids that it did not have")
                file.write(all_tags[is_left].tobytes())
        except UnevenError as error:
            raise InvalidMessage("the other party leaves out ids that it did not have") from error


class Written(NamedTuple):
    """What the files of an alignment hold."""

    own_tags: bytes
    """SHA-256 over the sorted tags of this party, and below over those of the peer."""
    peer_tags: bytes
    own_file: bytes
    """SHA-256 over the file with this party's tags and hashed ids."""


def write_lists(
    own: TagList,
    of_peer: TagList,
    order: SecretOrder,
    hashes: Path,
    lists: Lists,
    scratch: Path,
    most_bytes: int,
) -> Written:
    """Write the sorted tags of both parties, for the exchange that extends this one.

    Args:
        own: the tags of this party's ids.
        of_peer: the tags of the peer's ids.
        order: the rows of this party's tags.
        hashes: of all ids of this party, from ``hash_ids``.
        lists: the files to write.
        scratch: path of a file, which is replaced, and deleted in the end.
        most_bytes: memory for it.

    Raises:
        StorageError: a file cannot be read or written.
    """
    with storing(hashes):
        hash_of_row = np.memmap(hashes, _HASH, "r")
    own_tags, peer_tags, own_file = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    kinds = (
        Records(TAGGED_ROW, lambda: tagged_rows(own, order), _EACH_BYTES),
        Records(TAG, lambda: tag_blocks(of_peer), _EACH_BYTES),
    )
    with _written(lists.own) as own_out, _written(lists.peer) as peer_out:
        for unsorted, tags in _parts(kinds, scratch, most_bytes):
            tagged = unsorted[SortedTags(unsorted["tag"]).order]
            block = np.empty(len(tagged), _OWN)
            block["tag"], block["id"] = tagged["tag"], hash_of_row[tagged["row"]]
            own_tags.update(block["tag"].tobytes())
            for file, digest, data in (
                (own_out, own_file, block.tobytes()),
                (peer_out, peer_tags, SortedTags(tags).tags.tobytes()),
            ):
                digest.update(data)
                file.write(data)
    return Written(own_tags.digest(), peer_tags.digest(), own_file.digest())


def _parts(
    kinds: tuple[Records, ...], scratch: Path, most_bytes: int
) -> Iterator[tuple[Block, ...]]:
    try:
        yield from partitions(kinds, scratch, most_bytes)
    except UnevenError as error:  # they were read as hashes or tags of distinct ids before
        raise StorageError(f"{scratch.parent}: is damaged") from error


def _blocks(path: Path, dtype: np.dtype[np.void] | np.dtype[np.bytes_]) -> Iterator[Block]:
    with storing(path):
        size = path.stat().st_size // dtype.itemsize
    for first in range(0, size, _IDS_AT_ONCE):
        count = min(_IDS_AT_ONCE, size - first)
        data = read_part(path, first * dtype.itemsize, count * dtype.itemsize)
        yield np.frombuffer(data, dtype)


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    with storing(path), open(path, "wb", opener=private) as file:
        yield file

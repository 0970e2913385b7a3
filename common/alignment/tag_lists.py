"""Holds the tags and the secret order of one exchange, in memory or in files.

The tags of a stored exchange are in its files (``store.py``). With a memory limit the secret order
is in a file beside them; it is the same in memory, so that an exchange that broke off may be
resumed with another limit or with none.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.partitions import Records, partitions, private, storing
from splitveil.common.errors import StorageError
from splitveil.common.wire.limits import TAG_BYTES

Rows = npt.NDArray[np.int64]

_SHUFFLE = b"splitveil alignment shuffle 2\x00"
_KEYS_AT_ONCE = 2**13
_PIECE_TAGS = 2**14  # tags that are read from a list at a time
ROW = np.dtype("<i8")  # a row number in a file
TAG = np.dtype(f"S{TAG_BYTES}")
TAGGED_ROW = np.dtype([("tag", TAG), ("row", ROW)])
_KEYED_ROW = np.dtype([("key", ">u8"), ("row", ROW)])
_SORTED_BYTES = 64
"""Bytes that sorting takes for each key: the record, its key in native order, and the positions."""


class TagList:
    """Tags in the order in which they were added, in memory or in a file.

    The exchange's store appends tags to the file before they are added here.
    """

    def __init__(self, tags: bytes = b"", file: Path | None = None, count: int = 0) -> None:
        self._held = bytearray(tags)
        self._file = file
        self._count = len(tags) // TAG_BYTES if file is None else count

    def __len__(self) -> int:
        return self._count

    def append(self, tags: bytes) -> None:
        self._count += len(tags) // TAG_BYTES
        if self._file is None:
            self._held += tags

    def read(self, first: int, count: int) -> bytes:
        """Return at most ``count`` tags, or raise StorageError."""
        start, length = first * TAG_BYTES, max(min(count, self._count - first), 0) * TAG_BYTES
        if self._file is not None:
            return _read_part(self._file, start, length) if length else b""
        with memoryview(self._held) as tags:
            return bytes(tags[start : start + length])

    def all(self) -> npt.NDArray[np.bytes_]:
        return np.frombuffer(self._held if self._file is None else self.read(0, len(self)), TAG)


def tag_blocks(tags: TagList) -> Iterator[npt.NDArray[np.bytes_]]:
    """Yield all tags in their order, in small arrays."""
    return (np.frombuffer(piece, TAG) for piece in pieces(tags))


def tagged_rows(tags: TagList, order: "SecretOrder") -> Iterator[npt.NDArray[np.void]]:
    """Yield a party's own tags, which are in the secret order, with their rows, in small arrays."""
    first = 0
    for some in tag_blocks(tags):
        block = np.empty(len(some), TAGGED_ROW)
        block["tag"], block["row"] = some, order.rows(first, len(some))
        first += len(some)
        yield block


def pieces(tags: TagList) -> Iterator[bytes]:
    """Yield all tags in their order, in pieces of at most 256 KiB."""
    return (tags.read(first, _PIECE_TAGS) for first in range(0, len(tags), _PIECE_TAGS))


class SecretOrder:
    """The secret order in which a party sends its ids: a ``secret_permutation``.

    It is in memory or in a file, which is sorted within ``most_bytes``.
    """

    def __init__(
        self, size: int, seed: bytes, file: Path | None = None, most_bytes: int = 0
    ) -> None:
        self._size, self._file = size, file
        if file is None:
            self._rows = secret_permutation(size, seed)
        else:
            _write_permutation(size, seed, file, most_bytes)

    def rows(self, first: int, count: int) -> Rows:
        """Return the rows of at most ``count`` ids, or raise StorageError."""
        if self._file is None:
            return self._rows[first : first + count]
        length = max(min(count, self._size - first), 0) * ROW.itemsize
        data = _read_part(self._file, first * ROW.itemsize, length)
        return np.frombuffer(data, ROW).astype(np.int64, copy=False)


def secret_permutation(size: int, seed: bytes) -> Rows:
    """Permute 0..size-1 by a secret seed, which gives the same permutation again.

    Sorting by pseudo-random 64-bit keys is uniform unless two keys are equal, which has a
    probability below 2^-18 for 10 million keys.
    """
    keys = np.empty(size, np.uint64)
    for first, some in _keys(size, seed):
        keys[first : first + len(some)] = some
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _write_permutation(size: int, seed: bytes, path: Path, most_bytes: int) -> None:
    def blocks() -> Iterator[npt.NDArray[np.void]]:
        for first, keys in _keys(size, seed):
            block = np.empty(len(keys), _KEYED_ROW)
            block["key"], block["row"] = keys, np.arange(first, first + len(keys))
            yield block

    records = Records(_KEYED_ROW, blocks, _SORTED_BYTES)
    scratch = path.with_name(f"{path.name}.parts")
    with storing(path), open(path, "wb", opener=private) as file:
        for (part,) in partitions([records], scratch, most_bytes):
            order = np.argsort(part["key"].astype(np.uint64), kind="stable")
            file.write(part["row"][order].tobytes())


def _keys(size: int, seed: bytes) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yield the keys by which elements are sorted, in pieces, each after its first element."""
    for first in range(0, size, _KEYS_AT_ONCE):
        count = min(_KEYS_AT_ONCE, size - first)
        digest = hashlib.shake_256(_SHUFFLE + seed + first.to_bytes(8, "big"))
        yield first, np.frombuffer(digest.digest(8 * count), np.uint64)


def _read_part(path: Path, offset: int, length: int) -> bytes:
    with storing(path), path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) < length:
        raise StorageError(f"{path}: is damaged")
    return data

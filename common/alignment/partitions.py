"""Sorts more records than fit into memory into parts by their first bytes, by way of a file.

The first two bytes of a record say into which of 65,536 ranges it belongs. A first pass over the
records counts those of each range; as many neighbouring ranges make a part as fit into the memory,
so that the place of every part in the file is known before a second pass writes the records there.
Keys and tags are pseudo-random, so that all ranges are about equally full; records of which one
range alone does not fit are no keys or tags.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.errors import StorageError

_NUM_RANGES = 2**16

Block = npt.NDArray[Any]
_Counts = npt.NDArray[np.int64]


class UnevenError(ValueError):
    """So many records begin with the same bytes that they do not fit into the memory."""


class Records(NamedTuple):
    """Records of one kind, which are read twice."""

    dtype: np.dtype[Any]
    """Of a record; its first two bytes are the highest of the key by which records are sorted."""

    blocks: Callable[[], Iterator[Block]]  # yields all records, in small blocks
    bytes_each: int  # memory that the caller takes for each record of a part


def partitions(
    kinds: Sequence[Records], scratch: Path, most_bytes: int
) -> Iterator[tuple[Block, ...]]:
    """Yield the records of each kind, part by part, in the order in which they were read.

    The parts are in the order of their ranges. The file ``scratch`` is deleted in the end.
    """
    counts = [_count(kind) for kind in kinds]
    weights = [count * kind.bytes_each for count, kind in zip(counts, kinds, strict=True)]
    firsts = _first_ranges(np.sum(weights, axis=0), most_bytes)
    part_of = np.zeros(_NUM_RANGES, np.int64)
    part_of[firsts[1:]] = 1
    part_of = np.cumsum(part_of)
    file = _Scratch(scratch)
    try:
        places = []
        for kind, count in zip(kinds, counts, strict=True):
            lengths = np.add.reduceat(count, firsts) * kind.dtype.itemsize
            places.append(file.reserve(lengths))
            file.write(kind, part_of, places[-1])
        for part in range(len(firsts)):
            yield tuple(
                np.frombuffer(file.read(place, part), kind.dtype)
                for kind, place in zip(kinds, places, strict=True)
            )
    finally:
        file.delete()


def _count(kind: Records) -> _Counts:
    counts = np.zeros(_NUM_RANGES, np.int64)
    for block in kind.blocks():
        counts += np.bincount(_ranges(block), minlength=_NUM_RANGES)
    return counts


def _ranges(block: Block) -> npt.NDArray[np.int64]:
    raw = block.view(np.uint8).reshape(len(block), block.dtype.itemsize)
    return raw[:, 0].astype(np.int64) << 8 | raw[:, 1]


def _first_ranges(weights: _Counts, most_bytes: int) -> _Counts:
    largest = int(weights.max())
    if largest > most_bytes:
        raise UnevenError(f"{largest} bytes for one range of records, of {most_bytes}")
    until = np.concatenate([[0], np.cumsum(weights)])
    firsts = [0]
    while until[-1] - until[firsts[-1]] > most_bytes:
        # As many ranges as fit; one always does.
        firsts.append(int(np.searchsorted(until, until[firsts[-1]] + most_bytes, "right")) - 1)
    return np.array(firsts)


def private(path: str, flags: int) -> int:
    """Open a file for its owner only; an opener for ``open``."""
    # Nobody else can write to the folder; a link there would be a fault.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Convert errors of the operating system to StorageError, which names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


class _Scratch:
    def __init__(self, path: Path) -> None:
        self._path, self._end = path, 0
        with storing(path):
            self._descriptor = private(str(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def reserve(self, lengths: _Counts) -> _Counts:
        """Return the places of parts of these lengths, and the end of the last."""
        places = self._end + np.concatenate([[0], np.cumsum(lengths)])
        self._end = int(places[-1])
        return places

    def write(self, kind: Records, part_of: _Counts, places: _Counts) -> None:
        free = places[:-1].tolist()
        for block in kind.blocks():
            parts = part_of[_ranges(block)]
            order = np.argsort(parts, kind="stable")
            present, starts = np.unique(parts[order], return_index=True)
            for part, records in zip(present, np.split(block[order], starts[1:]), strict=True):
                data = memoryview(records.tobytes())
                while data:
                    with storing(self._path):
                        written = os.pwrite(self._descriptor, data, free[part])
                    free[part] += written
                    data = data[written:]

    def read(self, places: _Counts, part: int) -> bytearray:
        start, length = int(places[part]), int(places[part + 1] - places[part])
        data = bytearray(length)
        with memoryview(data) as rest:
            done = 0
            while done < length:
                with storing(self._path):
                    count = os.preadv(self._descriptor, [rest[done:]], start + done)
                if not count:
                    raise StorageError(f"{self._path}: is damaged")
                done += count
        return data

    def delete(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

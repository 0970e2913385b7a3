"""Ids that are known to be canonical and distinct, and an index of hashes that finds their rows."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_CHUNK = 64 * 1024

IDS, ID_OFFSETS = "ids.bin", "id_offsets.bin"


class GrowingArrays:
    """Arrays that grow by appended rows: in memory, or in the files of a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._parts: dict[str, IO[bytes]] = {}

    def append(self, name: str, array: NDArray[Any]) -> None:
        if name not in self._parts:
            self._parts[name] = (
                io.BytesIO() if self._folder is None else (self._folder / name).open("wb")
            )
        self._parts[name].write(np.ascontiguousarray(array).data)

    def array(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """Return everything that was appended, one-dimensional; nothing can be appended then."""
        parts = self._parts[name]
        if isinstance(parts, io.BytesIO):
            return np.frombuffer(parts.getbuffer(), dtype)
        parts.flush()
        return np.memmap(parts.name, dtype, "r") if parts.tell() else np.empty(0, dtype)

    def discard(self, name: str) -> None:
        parts = self._parts.pop(name)
        if not isinstance(parts, io.BytesIO):
            parts.close()
            Path(parts.name).unlink()

    def close(self) -> None:
        for parts in self._parts.values():
            if not isinstance(parts, io.BytesIO):  # arrays in memory stay in use
                parts.close()


class RowNumbers(Sequence[str]):
    """The row numbers, from 1, as ids."""

    def __init__(self, num_rows: int) -> None:
        self._rows = range(1, num_rows + 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index]
        return str(rows) if isinstance(rows, int) else list(map(str, rows))


class StoredIds(Sequence[str]):
    """Ids as one text, UTF-8, in a mapped file or in memory.

    ``offsets``, (rows + 1,), says where each id begins and the last one ends.
    """

    def __init__(self, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self.text, self.offsets = text, offsets
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text)]
        self._array = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)

    @classmethod
    def open(cls, folder: Path, num_rows: int) -> "StoredIds":
        """Map the ids of a folder; ValueError if its files are shorter than when written."""
        offsets = np.memmap(folder / ID_OFFSETS, np.int64, "r", shape=(num_rows + 1,))
        return cls(np.memmap(folder / IDS, np.uint8, "r", shape=(int(offsets[-1]),)), offsets)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        found = self._array[index]
        return found.to_pylist() if isinstance(index, slice) else found.as_py()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _CHUNK):
            yield from self[first : first + _CHUNK]

    def take(self, rows: NDArray[np.int64]) -> "StoredIds":
        """Return the ids of some rows in memory."""
        _, offsets, text = self._array.take(pa.array(rows)).buffers()
        return StoredIds(np.frombuffer(text, np.uint8), np.frombuffer(offsets, np.int64))

    def holds(self, rows: NDArray[np.int64], texts: Sequence[str]) -> bool:
        """Return whether some rows have these ids, comparing the text of all rows at once."""
        found: bool = self._array.take(pa.array(rows)).equals(pa.array(texts, pa.large_string()))
        return found


def ids_at(ids: Sequence[str], rows: NDArray[np.int64]) -> Sequence[str]:
    """Return the ids of some rows, at once: one by one, a million take two seconds."""
    return ids.take(rows) if isinstance(ids, StoredIds) else [ids[row] for row in rows.tolist()]


def repeated_rows(ids: Sequence[str], hashes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the rows whose id an earlier row has, with the first such row, both from 0.

    Rows without an id, the empty text, repeat nothing. Equal ids have equal hashes, (rows,). Takes
    8 bytes of memory per row.
    """
    ordered = np.sort(hashes)
    shared = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(shared):
        return []
    first_row: dict[str, int] = {}
    repeated = []
    for row in np.flatnonzero(np.isin(hashes, shared)).tolist():
        text = ids[row]
        if text and (first := first_row.setdefault(text, row)) != row:
            repeated.append((row, first))
    return repeated


ABSENT = -1
"""The row of an id that the table does not have."""


class IdIndex:
    """The rows of a table's distinct, canonical ids.

    Python's own hash of a text has a random key in every process, so that nobody who chooses ids
    can choose collisions; the text itself is compared in the end.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        hashes = np.concatenate(
            [_hashes(ids[at : at + _CHUNK]) for at in range(0, len(ids), _CHUNK)]
        )
        self._rows = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._rows]

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the row of each id, in any order and possibly repeated; ``ABSENT`` without one."""
        hashes = _hashes(ids)
        places = np.searchsorted(self._hashes, hashes)
        places[places == len(self._hashes)] = 0
        rows = np.where(self._hashes[places] == hashes, self._rows[places], ABSENT)
        candidates = np.flatnonzero(rows != ABSENT)
        wanted = [ids[at] for at in candidates.tolist()] if len(candidates) < len(ids) else ids
        if isinstance(self._ids, StoredIds):
            are_equal = self._ids.holds(rows[candidates], wanted)
        else:
            are_equal = [self._ids[row] for row in rows[candidates].tolist()] == list(wanted)
        if not are_equal:
            for at, text in zip(candidates.tolist(), wanted, strict=True):
                rows[at] = self._among_equal_hashes(int(places[at]), text)
        return rows

    def _among_equal_hashes(self, place: int, wanted: str) -> int:
        first = self._hashes[place]
        while place < len(self._hashes) and self._hashes[place] == first:
            row = int(self._rows[place])
            if self._ids[row] == wanted:
                return row
            place += 1
        return ABSENT


def _hashes(ids: Sequence[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, ids), np.int64, len(ids))

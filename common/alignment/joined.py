"""Puts the tags and rows that are known from an earlier exchange before those of this one."""

from pathlib import Path

import numpy as np

from splitveil.common.alignment.storing import storing
from splitveil.common.alignment.tag_lists import ROW, Rows, SecretOrder, TagList, read_part


class JoinedTags:
    """The tags of one list, and then those of another that may still grow."""

    def __init__(self, first: TagList, then: TagList) -> None:
        self._first, self._then = first, then

    def __len__(self) -> int:
        """Return the number of tags."""
        return len(self._first) + len(self._then)

    def append(self, tags: bytes) -> None:
        """Add tags to the second list."""
        self._then.append(tags)

    def read(self, first: int, count: int) -> bytes:
        """Return at most ``count`` tags."""
        found = self._first.read(first, count) if first < len(self._first) else b""
        left = count - max(min(count, len(self._first) - first), 0)
        return found + self._then.read(max(first - len(self._first), 0), left)


class RowsInFile:
    """Rows in a file, in its order."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size

    def rows(self, first: int, count: int) -> Rows:
        """Return at most ``count`` rows, from the given place on."""
        wanted = max(min(count, self._size - first), 0) * ROW.itemsize
        data = read_part(self._path, first * ROW.itemsize, wanted) if wanted else b""
        return np.frombuffer(data, ROW).astype(np.int64, copy=False)


class PickedRows:
    """Some rows of a table, which are in a file, in a secret order.

    Args:
        path: the file with the rows.
        size: the number of rows in it.
        order: the secret order of that many.
    """

    def __init__(self, path: Path, size: int, order: SecretOrder) -> None:
        with storing(path):
            # Mapped, because a secret order reads it from end to end.
            self._rows = np.memmap(path, ROW, "r", shape=(size,)) if size else np.empty(0, ROW)
        self._order = order

    def rows(self, first: int, count: int) -> Rows:
        """Return the rows of at most ``count`` ids, from the given place in the order on."""
        return self._rows[self._order.rows(first, count)].astype(np.int64)


class JoinedRows:
    """The rows of one order, which has ``size`` of them, and then those of another."""

    def __init__(self, first: SecretOrder, size: int, then: SecretOrder) -> None:
        self._first, self._size, self._then = first, size, then

    def rows(self, first: int, count: int) -> Rows:
        """Return the rows of at most ``count`` ids, from the given place on."""
        from_first = max(min(count, self._size - first), 0)
        found = [self._first.rows(first, from_first)] if from_first else []
        if from_first < count:
            found.append(self._then.rows(max(first - self._size, 0), count - from_first))
        return np.concatenate(found) if found else np.empty(0, np.int64)

"""Finds the rows of ids: an index of hashes, 16 bytes of memory per row, for many ids at a time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.stored_ids import StoredIds

_AT_ONCE = 2**16

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
            [_hashes(ids[at : at + _AT_ONCE]) for at in range(0, len(ids), _AT_ONCE)]
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
        if not self._holds(rows[candidates], wanted):
            for at, text in zip(candidates.tolist(), wanted, strict=True):
                rows[at] = self._among_equal_hashes(int(places[at]), text)
        return rows

    def _holds(self, rows: NDArray[np.int64], wanted: Sequence[str]) -> bool:
        if isinstance(self._ids, StoredIds):
            return self._ids.holds(rows, wanted)
        return list(map(self._ids.__getitem__, rows.tolist())) == list(wanted)

    def _among_equal_hashes(self, place: int, wanted: str) -> int:
        """Look through the rows with the same hash, of which there is hardly ever a second."""
        first = self._hashes[place]
        while place < len(self._hashes) and self._hashes[place] == first:
            row = int(self._rows[place])
            if self._ids[row] == wanted:
                return row
            place += 1
        return ABSENT


def _hashes(ids: Sequence[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, ids), np.int64, len(ids))

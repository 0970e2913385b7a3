"""Reads a table's ids part by part, so that their texts are never all in memory as objects."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import CanonicalForm, Effects
from splitveil.common.data.csv_file import CsvFile
from splitveil.common.data.id_forms import ColumnForms
from splitveil.common.data.ids import (
    Allowed,
    IdReport,
    Odd,
    changes_in_words,
    check_allowed,
    check_rules,
    odd_rows,
    part_ids,
)
from splitveil.common.data.image_folder import ImageFolder
from splitveil.common.data.npz_file import NpzFile
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import TableSource
from splitveil.common.data.stored_ids import StoredIds, repeated_rows
from splitveil.common.data.table import part_labels, part_splits, select_columns
from splitveil.common.errors import DataError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule

_ResultT = TypeVar("_ResultT")

_SMALL_BYTES = 1024 * 1024
_ROWS_AT_ONCE = 16 * 1024


class IdArrays(NamedTuple):
    """The canonical ids of some rows, and what tells which of them are equal."""

    text: NDArray[np.uint8]
    """All ids one after another, UTF-8; an id that cannot be used is empty."""

    ends: NDArray[np.int64]
    """The end of each id, counted from the first row of all, (rows,)."""

    hashes: NDArray[np.int64]
    """A hash of each id, equal for equal ids, (rows,)."""

    raw_hashes: NDArray[np.int64]
    """The same of the ids as they are written, (rows,)."""


class IdParts:
    """Brings ids into canonical form part by part, and finds the rows that are left out."""

    def __init__(self, settings: DataSettings, source: str, form: CanonicalForm) -> None:
        self.forms = ColumnForms(settings.id_columns)
        self._settings = settings
        self._source = source
        self._form = form
        self._allowed = Allowed.by(settings)
        self._effects = Effects()
        self._num_bytes = 0
        self._unlabelled = 0

    @property
    def _where(self) -> str:
        return f"{self._source}: {self._settings.place_of_ids}"

    def add(
        self, columns: Mapping[str, Any], first_row: int, labels: NDArray[np.float32] | None
    ) -> IdArrays:
        """Return the ids of the next rows, of which those with a label of NaN are left out.

        DataError if some cannot be used, and the settings do not say that rows may be left out.
        """
        offset = "" if first_row == 1 else f" (data rows counted after row {first_row - 1})"
        raw = part_ids(self._settings, self._form.rules, columns, self._source, first_row)
        ids = self._form.of(raw, self._effects)
        odd = odd_rows(raw, ids, self._form, labels)
        check_allowed(odd, self._allowed, f"{self._where}{offset}", raw)
        for row in (*odd.unusable, *odd.unlabelled):
            ids[row] = ""
        self._unlabelled += len(odd.unlabelled)
        self.forms.add(self._form.columns_of([text for text in ids if text]))
        encoded = [text.encode() for text in ids]
        ends = self._num_bytes + np.cumsum([len(text) for text in encoded], dtype=np.int64)
        self._num_bytes = int(ends[-1]) if len(ends) else self._num_bytes
        return IdArrays(
            np.frombuffer(b"".join(encoded), np.uint8),
            ends,
            np.fromiter(map(hash, ids), np.int64, len(ids)),
            np.fromiter(map(hash, raw), np.int64, len(raw)),
        )

    def finish(
        self, ids: StoredIds, hashes: NDArray[np.int64], raw_hashes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64] | None, IdReport]:
        """Return the rows that are kept, None for all, and what became of the ids.

        DataError as ``add``.
        """
        num_rows = len(ids)
        twins = repeated_rows(ids, hashes)
        same = [(row, first) for row, first in twins if raw_hashes[row] == raw_hashes[first]]
        alike = [(row, first) for row, first in twins if raw_hashes[row] != raw_hashes[first]]
        check_allowed(Odd(duplicates=same, alike=alike), self._allowed, self._where)
        is_kept = np.diff(ids.ends, prepend=0) > 0
        unusable = num_rows - int(np.count_nonzero(is_kept)) - self._unlabelled
        is_kept[[row for row, _ in twins]] = False
        if not is_kept.any():
            raise DataError(f"{self._where}: none of the {num_rows} rows has a usable id")
        changes = changes_in_words(self._effects, self._settings.id_columns)
        report = IdReport(num_rows, changes, unusable, len(same), len(alike), self._unlabelled)
        return (np.flatnonzero(is_kept) if report.left_out else None), report


class CompactIds(NamedTuple):
    """The usable ids of a table, with the splits of their rows, and nothing else of it."""

    ids: StoredIds
    """Canonical and distinct, in the order of the rows."""

    kept: NDArray[np.int64] | None
    """The rows that they belong to; None for all rows."""

    splits: NDArray[np.int8] | None
    """The split of each id, if the contract splits by a column."""

    report: IdReport
    doubts: Sequence[str]
    """A sentence for each doubtful form of the ids."""


def read_compact_ids(
    settings: DataSettings,
    source: TableSource,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> CompactIds:
    """Read the ids of a table, and the column by which the contract splits rows.

    Memory holds the bytes of the ids and 8 more for each row; 16 more while they are read. The
    settings name no other columns but that of labels if rows without one are left out.
    """
    return in_small_blocks(source, lambda some: _read(settings, some, split_column, id_rules))


def _read(
    settings: DataSettings,
    source: TableSource,
    split_column: str | None,
    id_rules: Sequence[IdRule],
) -> CompactIds:
    check_rules(settings, id_rules)
    needed = select_columns(settings, source, split_column).needed
    parts = IdParts(settings, source.name, CanonicalForm(id_rules))
    text, splits = bytearray(), list[NDArray[np.int8]]()
    ends, hashes, raw_hashes = _Growing(), _Growing(), _Growing()
    first_row = 1
    for columns, num_rows in _small_parts(source, needed):
        labels = part_labels(settings, columns, source.name, first_row)
        arrays = parts.add(columns, first_row, labels)
        text += arrays.text.data
        ends.add(arrays.ends)
        hashes.add(arrays.hashes)
        raw_hashes.add(arrays.raw_hashes)
        split = part_splits(split_column, columns, source.name, first_row)
        splits += [] if split is None else [split]
        first_row += num_rows
    if first_row == 1:
        raise DataError(f"{source.name}: there are no rows")
    ids = StoredIds(np.frombuffer(text, np.uint8), ends.all())
    kept, report = parts.finish(ids, hashes.all(), raw_hashes.all())
    all_splits = np.concatenate(splits) if splits else None
    if kept is not None:
        ids = ids.take(kept)
        all_splits = None if all_splits is None else all_splits[kept]
    pa.default_memory_pool().release_unused()
    return CompactIds(ids, kept, all_splits, report, parts.forms.doubts())


def in_small_blocks(source: TableSource, read: Callable[[TableSource], _ResultT]) -> _ResultT:
    """Read a table in little memory, or again in larger parts if ``read`` raises DataError."""
    if not isinstance(source, CsvFile):
        return read(source)
    try:
        return read(source.in_blocks_of(_SMALL_BYTES))
    except DataError:
        # A row may be longer than a small block; whatever else it was is said again.
        return read(source)


def columns_in_parts(source: TableSource, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the named columns of a table, in parts where images need not be read for it."""
    if isinstance(source, ImageFolder | NpzFile):
        yield source.read(names)
    else:
        for part in source.parts(names):
            yield part.columns


class _Growing:
    """Numbers that are added piece by piece, without a copy of all of them."""

    def __init__(self) -> None:
        self._numbers = bytearray()

    def add(self, numbers: NDArray[np.int64]) -> None:
        self._numbers += np.ascontiguousarray(numbers).data.cast("B")

    def all(self) -> NDArray[np.int64]:
        return np.frombuffer(self._numbers, np.int64)


def _small_parts(
    source: TableSource, needed: Sequence[str]
) -> Iterator[tuple[dict[str, Any], int]]:
    for part in columns_in_parts(source, needed):
        num_rows = len(next(iter(part.values())))
        for first in range(0, num_rows, _ROWS_AT_ONCE):
            columns = {name: column.slice(first, _ROWS_AT_ONCE) for name, column in part.items()}
            yield columns, min(_ROWS_AT_ONCE, num_rows - first)

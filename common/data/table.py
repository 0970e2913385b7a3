"""Reads a party's own table and checks the columns it needs before anything is sent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import (
    CategoricalColumn,
    Numbers,
    Selection,
    WrittenColumn,
    part_name,
    read_categories,
    read_numeric,
    read_splits,
    read_weights,
    select_columns,
)
from splitveil.common.data.ids import (
    NOTHING_DONE,
    Allowed,
    IdReader,
    IdReport,
    UsableIds,
    check_rules,
    part_ids,
)
from splitveil.common.data.kinds import ImageFolder, columns_in_parts, in_small_blocks, open_source
from splitveil.common.data.label_columns import check_classes, read_labels
from splitveil.common.data.sequences import read_lists, read_tokens
from splitveil.common.data.settings import DataSettings, Gaps
from splitveil.common.data.source_settings import CsvSource
from splitveil.common.data.sources import RowSource, TableSource, joined
from splitveil.common.data.stored_ids import GrowingArrays, RowNumbers, StoredIds
from splitveil.common.data.timestamps import read_timestamps
from splitveil.common.errors import DataError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule

_ROWS_AT_ONCE = 16 * 1024


@dataclass(frozen=True, eq=False)
class Table:
    """The needed columns of a party's data, row by row as in the file, in memory or on disk.

    Rows that the settings leave out because of their ids or labels are not among them.
    """

    source: str
    ids: Sequence[str]
    """Each row's id, in canonical form and distinct."""

    labels: NDArray[np.float32] | None = None
    """0 or 1 per row; the class index of the row if there are more than two classes; or its share
    of the range if the label is a number."""

    numeric: Mapping[str, Numbers] = field(default_factory=dict)
    """Finite numbers by column, and NaN for gaps if ``gaps`` says so; a timestamp has a column for
    each of its parts."""

    categorical: Mapping[str, CategoricalColumn] = field(default_factory=dict)
    image: NDArray[Any] | None = None
    """(rows, channels, height, width), uint8 or float32."""

    splits: NDArray[np.int8] | None = None
    """The split of each row as an index into ``SPLITS``, if the contract splits by a column."""

    lists: Mapping[str, CategoricalColumn] = field(default_factory=dict)
    """Sets of categories by column, as ``sequences`` writes them."""

    sequences: Mapping[str, CategoricalColumn] = field(default_factory=dict)
    """Texts by column, or sequences of whole numbers as ``sequences`` writes them."""

    timestamps: tuple[str, ...] = ()
    """The columns of times whose parts are in ``numeric``."""

    weights: NDArray[np.float64] | None = None
    """Positive weight of each row in the loss; None if all count the same."""

    gaps: Gaps = "refused"

    kept: NDArray[np.int64] | None = None
    """The rows of the file; None for all."""

    id_report: IdReport = NOTHING_DONE
    id_doubts: Sequence[str] = ()
    """Findings of ``IdForms`` about the ids."""

    numeric_rows: NDArray[np.float64] | None = None
    """On disk, all numbers of a row are together: (rows, numeric columns), as in ``numeric``."""

    code_rows: NDArray[np.int32] | None = None
    """(rows, columns with codes), in the order of ``coded``."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_on_disk(self) -> bool:
        return self.numeric_rows is not None

    @property
    def coded(self) -> dict[str, CategoricalColumn]:
        """All columns of codes."""
        return {**self.categorical, **self.lists, **self.sequences}

    def numbers_at(self, rows: NDArray[np.int64]) -> Callable[[str], Numbers]:
        """Return a function that gives a column's numbers in some rows."""
        if self.numeric_rows is None:
            return lambda name: self.numeric[name][rows]
        return _by_column(self.numeric_rows, rows, self.numeric)

    def codes_at(self, rows: NDArray[np.int64]) -> Callable[[str], NDArray[np.int32]]:
        """Return a function that gives a column's codes in some rows."""
        if self.code_rows is None:
            coded = self.coded
            return lambda name: coded[name].codes[rows]
        return _by_column(self.code_rows, rows, self.coded)

    def with_ids(self, found: UsableIds) -> "Table":
        """Return a table in memory with ids, and without the rows that are left out."""
        rows = found.kept
        table = replace(self, ids=found.ids, id_report=found.report, id_doubts=found.doubts)
        if rows is None:
            return table

        def taken(value: Any) -> Any:
            match value:
                case np.ndarray():
                    return value[rows]
                case StoredIds():
                    return value.take(rows)
                case CategoricalColumn():
                    return value._replace(codes=value.codes[rows])
                case Mapping():
                    return {name: taken(one) for name, one in value.items()}
            return value

        cells = {one.name: taken(getattr(table, one.name)) for one in fields(table)}
        return replace(table, **cells | {"kept": rows})


def _by_column(
    stored: NDArray[Any], rows: NDArray[np.int64], names: Iterable[str]
) -> Callable[[str], NDArray[Any]]:
    columns = np.ascontiguousarray(stored[rows].T)  # all columns of a row are read at once
    return dict(zip(names, columns, strict=True)).__getitem__


def read_table(
    settings: DataSettings,
    base_dir: Path,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> Table:
    """Read and check the columns that the settings name; no other column is read.

    DataError names the file, columns and rows (counted from 1, without the header line).
    """
    return table_of(open_source(settings.source, base_dir), settings, split_column, id_rules)


def table_of(
    source: RowSource,
    settings: DataSettings,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> Table:
    """Read and check the columns of an open source that the settings name, as ``read_table``."""
    features = settings.features
    reader = TableReader(settings, source, split_column, id_rules)
    needed, has_image = reader.selection.needed, features is not None and features.image is not None
    image = None
    if has_image:
        if not isinstance(source, ImageFolder):
            raise TypeError("images are allowed only in image folders")
        parts = list(source.parts(needed))
        columns: Mapping[str, Any] = joined(parts, needed)
        image = np.concatenate([part.image for part in parts if part.image is not None])
    else:
        columns = source.read(needed)
    if not num_rows_of(columns, image, source.name):
        raise DataError(f"{source.name}: there are no rows")
    table = reader.add(columns, image)
    del columns
    pa.default_memory_pool().release_unused()  # what was decoded: as much as the table again
    return reader.finish(table)


def table_of_ids(
    settings: DataSettings,
    source: TableSource,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> Table:
    """Read the ids of a table, and the contract's split column.

    Memory holds the bytes of the ids and 8 more for each row; 16 more while they are read. The
    settings name no other column except the labels' if rows without a label are left out.
    """

    def read(some: TableSource) -> Table:
        reader, splits = TableReader(settings, some, split_column, id_rules), []
        for part in columns_in_parts(some, reader.selection.needed):
            for first in range(0, num_rows_of(part, None, some.name), _ROWS_AT_ONCE):
                rows = {name: column.slice(first, _ROWS_AT_ONCE) for name, column in part.items()}
                splits.append(reader.add(rows).splits)
        joined = [split for split in splits if split is not None]
        found = reader.finish(
            Table(some.name, (), splits=np.concatenate(joined) if joined else None)
        )
        pa.default_memory_pool().release_unused()
        return found

    return in_small_blocks(source, read)


class TableReader:
    """Reads the columns that the settings name part by part; DataError as ``read_table``."""

    def __init__(
        self,
        settings: DataSettings,
        source: RowSource,
        split_column: str | None,
        id_rules: Sequence[IdRule],
        arrays: GrowingArrays | None = None,
    ) -> None:
        check_rules(settings, id_rules)
        self.selection = select_columns(settings, source, split_column)
        self.num_rows = 0
        self._settings, self._source, self._rows = settings, source.name, source
        self._split_column, self._id_rules = split_column, id_rules
        self._ids = IdReader(
            CanonicalForm(id_rules),
            f"{source.name}: {settings.place_of_ids}",
            Allowed.by(settings),
            settings.id_columns,
            arrays,
        )

    def add(self, columns: Mapping[str, Any], image: NDArray[Any] | None = None) -> Table:
        """Return the next rows, without their ids, which ``finish`` needs."""
        settings, selection, first_row = self._settings, self.selection, self.num_rows + 1
        self.num_rows += num_rows_of(columns, image, self._source)
        features = settings.features
        rows = _WrittenRows(settings, self._source, columns, first_row)
        labels, coded = rows.labels(), rows.coded(selection)
        split, weight = self._split_column, settings.weight_column
        if features is None or features.image is None:
            image = None
        elif image is not None:
            image = image.transpose(0, 3, 1, 2)
        table = Table(
            source=self._source,
            ids=(),
            labels=labels,
            numeric=rows.numeric(selection),
            categorical={name: coded[name] for name in selection.chosen.categorical},
            image=image,
            splits=None if split is None else read_splits(rows.texts_of(split, ())),
            lists={name: coded[name] for name in selection.chosen.lists},
            sequences={name: coded[name] for name in selection.chosen.sequences},
            timestamps=tuple(selection.chosen.timestamps),
            weights=None if weight is None else read_weights(rows.numbers_of(weight)),
            gaps=features.gaps if features else "refused",
        )
        if settings.id_column is not None:
            raw = part_ids(settings, self._id_rules, columns, self._source, first_row)
            self._ids.add(raw, labels)
        return table

    def finish(self, table: Table) -> Table:
        """Return the whole table with its ids, without the rows that are left out."""
        return table.with_ids(self.usable_ids(table.labels))

    def usable_ids(self, labels: NDArray[np.float32] | None) -> UsableIds:
        """Check what only the whole table shows, and return its usable ids."""
        if not self.num_rows:
            raise DataError(f"{self._source}: there are no rows")
        if labels is not None:
            check_classes(self._settings, labels, self._rows)
        if self._settings.id_column is None:
            return UsableIds(RowNumbers(self.num_rows), None, IdReport(self.num_rows), ())
        return self._ids.finish(labels)


class _WrittenRows(NamedTuple):
    settings: DataSettings
    source: str
    columns: Mapping[str, Any]
    first_row: int

    def labels(self) -> NDArray[np.float32] | None:
        """Return the labels, possibly all of one class; None without a label column.

        They are NaN in the rows that ``unlabelled_rows: leave_out`` leaves out.
        """
        settings = self.settings
        if settings.label_column is None:
            return None
        column = self.numbers_of(settings.label_column)
        labels = read_labels(column, settings)
        is_missing = np.isnan(labels)
        if settings.unlabelled_rows == "error" and is_missing.any():
            raise DataError(
                f"{column.where}: expected a label in {column.list_rows(is_missing)}; with "
                f"data.unlabelled_rows: leave_out, rows without one take no part"
            )
        return labels

    def numeric(self, selection: Selection) -> dict[str, Numbers]:
        features, chosen = self.settings.features, selection.chosen
        if features is None:
            return {}
        plain = {name: self.numbers_of(name) for name in chosen.numeric}
        for name in chosen.timestamps:
            written = self.numbers_of(name)
            parts = read_timestamps(
                written, features.timestamp_parts, features.timestamp_format, features.first_year
            )
            for part, numbers in parts.items():
                plain[part_name(name, part)] = written._replace(cells=pa.array(numbers))
        return read_numeric(plain, features.gaps)

    def coded(self, selection: Selection) -> dict[str, CategoricalColumn]:
        """Return codes by column: categories, then sets of categories, then sequences."""
        features = self.settings.features
        if features is None:
            return {}
        chosen, separator = selection.chosen, features.list_separator
        found = {n: read_categories(self.texts_of(n)) for n in chosen.categorical}
        for name in chosen.lists:
            found[name] = read_lists(self.texts_of(name), separator)
        for name in chosen.sequences:
            size = features.sequences[name].num_tokens
            found[name] = read_tokens(self.texts_of(name), separator, size)
        return found

    def texts_of(self, name: str, gaps: Sequence[str] | None = None) -> WrittenColumn:
        where = f"{self.source}: column {name!r}"
        gaps = self.settings.missing_texts(name) if gaps is None else gaps
        return WrittenColumn(self.columns[name], where, gaps, self.first_row)

    def numbers_of(self, name: str) -> WrittenColumn:
        written = self.texts_of(name)._replace(units=self.settings.units.get(name, ()))
        if isinstance(self.settings.source, CsvSource):
            return written._replace(decimal=self.settings.source.decimal)
        return written


def num_rows_of(columns: Mapping[str, Any], image: NDArray[Any] | None, source: str) -> int:
    lengths = {len(column) for column in columns.values()}
    if image is not None:
        lengths.update(image.shape[:1])
    if len(lengths) > 1:
        raise DataError(f"{source}: images and columns have different numbers of rows: {lengths}")
    return lengths.pop() if lengths else 0

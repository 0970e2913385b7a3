"""Reads a party's own table and checks the columns it needs before anything is sent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data.category_lists import read_lists
from splitveil.common.data.columns import (
    CategoricalColumn,
    ChosenColumns,
    Numbers,
    WrittenColumn,
    check_columns_exist,
    read_categories,
    read_numeric,
    read_splits,
    read_weights,
    select_features,
)
from splitveil.common.data.ids import check_rules, part_ids
from splitveil.common.data.image_folder import ImageFolder
from splitveil.common.data.kinds import open_source
from splitveil.common.data.label_columns import (
    check_classes,
    read_classes,
    read_labels,
    read_number_labels,
)
from splitveil.common.data.npz_file import NpzFile
from splitveil.common.data.settings import DataSettings, Gaps, ImageSettings
from splitveil.common.data.source_settings import CsvSource
from splitveil.common.data.sources import RowSource, TableSource, list_rows
from splitveil.common.data.timestamps import read_timestamps
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule


@dataclass(frozen=True, eq=False)
class Table:
    """The needed columns of a party's data, row by row as in the file."""

    source: str
    """The file, for messages."""

    ids: Sequence[str]
    """Each row's id as written in the file, or an empty text if the row has none; of several
    columns, as ``compose`` puts them together. ``usable_ids`` brings them into canonical form and
    checks that they are distinct and not empty."""

    labels: NDArray[np.float32] | None
    """0 or 1 per row; the class index of the row if there are more than two classes; or its share
    of the range if the label is a number."""

    numeric: Mapping[str, Numbers]
    """Finite numbers by column, and NaN for gaps if ``gaps`` says so; a timestamp has a column for
    each of its parts."""

    categorical: Mapping[str, CategoricalColumn]
    """Categories by column."""

    image: NDArray[Any] | None
    """(rows, channels, height, width), uint8 or float32."""

    splits: NDArray[np.int8] | None = None
    """The split of each row as an index into ``SPLITS``, if the contract splits by a column."""

    lists: Mapping[str, CategoricalColumn] = field(default_factory=dict)
    """Sets of categories by column, as ``category_lists`` writes them."""

    timestamps: tuple[str, ...] = ()
    """The columns of times whose parts are in ``numeric``."""

    weights: NDArray[np.float64] | None = None
    """What each row counts in the loss, positive; None if all count the same."""

    gaps: Gaps = "refused"
    """What stands in place of missing numbers."""

    def __len__(self) -> int:
        return len(self.ids)

    def numbers_at(self, rows: NDArray[np.int64]) -> Callable[[str], Numbers]:
        """Return a function that gives a column's numbers in some rows."""
        return lambda name: self.numeric[name][rows]

    def codes_at(self, rows: NDArray[np.int64]) -> Callable[[str], NDArray[np.int32]]:
        """Return a function that gives a column's codes in some rows."""
        return lambda name: (self.categorical.get(name) or self.lists[name]).codes[rows]

    def take(self, rows: NDArray[np.int64]) -> "Table":

        def taken(array: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if array is None else array[rows]

        def coded(columns: Mapping[str, CategoricalColumn]) -> dict[str, CategoricalColumn]:
            return {name: c._replace(codes=c.codes[rows]) for name, c in columns.items()}

        return replace(
            self,
            ids=[self.ids[row] for row in rows.tolist()],
            labels=taken(self.labels),
            numeric={name: numbers[rows] for name, numbers in self.numeric.items()},
            categorical=coded(self.categorical),
            image=taken(self.image),
            splits=taken(self.splits),
            lists=coded(self.lists),
            weights=taken(self.weights),
        )


class Selection(NamedTuple):
    """The columns of a source that the settings select."""

    chosen: ChosenColumns
    numeric: list[str]  # the columns of numbers that they become: parts of timestamps come last
    needed: list[str]  # all selected columns; id, label and split first

    @property
    def coded(self) -> list[str]:
        """The columns that become codes: categorical ones, then lists."""
        return [*self.chosen.categorical, *self.chosen.lists]


def select_columns(
    settings: DataSettings, source: RowSource, split_column: str | None = None
) -> Selection:
    """Find the columns that the settings name and the column by which the contract splits rows.

    DataError if one is missing, SettingsError if one is requested for two purposes.
    """
    features = settings.features
    names = source.column_names()
    own = (*settings.id_columns, settings.label_column, settings.weight_column)
    if split_column is not None and split_column in own:
        raise SettingsError(f"contract.split.column: {split_column!r} is the id, label or weight")
    reserved = [name for name in (*own, split_column) if name is not None]
    chosen = ChosenColumns([], [], [], [])
    if features:
        chosen = select_features(features, names, reserved, source.name)
    needed = list(dict.fromkeys([*reserved, *(name for way in chosen for name in way)]))
    check_columns_exist(needed, names, source.name)
    parts = features.timestamp_parts if features else ()
    numeric = [*chosen.numeric, *(part_name(n, p) for n in chosen.timestamps for p in parts)]
    if twice := [name for name in chosen.numeric if numeric.count(name) > 1]:
        raise SettingsError(
            f"data.features: {', '.join(map(repr, twice))}: parts of a timestamp have this name"
        )
    return Selection(chosen, numeric, needed)


def part_name(column: str, part: str) -> str:
    return f"{column}.{part}"


def open_table_source(settings: DataSettings, base_dir: Path) -> TableSource:
    features = settings.features
    image_array = features.image.array if features and features.image else None
    return open_source(settings.source, base_dir, image_array)


def read_table(
    settings: DataSettings,
    base_dir: Path,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> Table:
    """Read and check the columns that the settings name; no other column is read.

    DataError names the file, columns and rows (counted from 1, without the header line).
    """
    return table_of(open_table_source(settings, base_dir), settings, split_column, id_rules)


def table_of(
    source: RowSource,
    settings: DataSettings,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> Table:
    """Read and check the columns of an open source that the settings name, as ``read_table``."""
    features = settings.features
    check_rules(settings, id_rules)
    selection = select_columns(settings, source, split_column)
    columns = source.read(selection.needed)
    image = _read_image(source, features.image) if features and features.image else None
    num_rows = _common_length(columns, image, source.name)
    labels = part_labels(settings, columns, source.name)
    if labels is not None:
        check_classes(settings, labels, source.name)
    coded = part_categories(settings, selection, columns, source.name)
    return Table(
        source=source.name,
        ids=[str(row + 1) for row in range(num_rows)]
        if settings.id_column is None
        else part_ids(settings, id_rules, columns, source.name),
        labels=labels,
        numeric=part_numeric(settings, selection, columns, source.name),
        categorical={name: coded[name] for name in selection.chosen.categorical},
        image=image,
        splits=part_splits(split_column, columns, source.name),
        lists={name: coded[name] for name in selection.chosen.lists},
        timestamps=tuple(selection.chosen.timestamps),
        weights=part_weights(settings, columns, source.name),
        gaps=features.gaps if features else "refused",
    )


def part_labels(
    settings: DataSettings, columns: Mapping[str, Any], source: str, first_row: int = 1
) -> NDArray[np.float32] | None:
    """Return the labels of some rows, possibly all of one class; None without a label column.

    They are NaN in the rows that ``unlabelled_rows: leave_out`` leaves out.
    """
    name = settings.label_column
    if name is None:
        return None
    column = _written_numbers(settings, columns, name, source, first_row)
    if settings.classes is not None:
        are_numbers = isinstance(settings.classes, int)
        labels = read_classes(column, settings.class_names, are_numbers=are_numbers)
    elif settings.label_range is not None:
        labels = read_number_labels(column, settings.label_range)
    else:
        labels = read_labels(column, settings.positive_labels)
    is_missing = np.isnan(labels)
    if settings.unlabelled_rows == "error" and is_missing.any():
        raise DataError(
            f"{column.where}: expected a label in {column.list_rows(is_missing)}; with "
            f"data.unlabelled_rows: leave_out, rows without one take no part"
        )
    return labels


def part_weights(
    settings: DataSettings, columns: Mapping[str, Any], source: str, first_row: int = 1
) -> NDArray[np.float64] | None:
    if settings.weight_column is None:
        return None
    name = settings.weight_column
    return read_weights(_written_numbers(settings, columns, name, source, first_row))


def part_splits(
    split_column: str | None, columns: Mapping[str, Any], source: str, first_row: int = 1
) -> NDArray[np.int8] | None:
    if split_column is None:
        return None
    return read_splits(_written(columns, split_column, source, first_row=first_row))


def part_numeric(
    settings: DataSettings,
    selection: Selection,
    columns: Mapping[str, Any],
    source: str,
    first_row: int = 1,
) -> dict[str, Numbers]:
    features = settings.features
    if features is None:
        return {}
    chosen = selection.chosen
    written = {
        name: _written_numbers(settings, columns, name, source, first_row)
        for name in (*chosen.numeric, *chosen.timestamps)
    }
    plain = {name: written[name] for name in chosen.numeric}
    for name in chosen.timestamps:
        parts = read_timestamps(written[name], features.timestamp_parts, features.timestamp_format)
        for part, numbers in parts.items():
            cells = pa.array(numbers)
            plain[part_name(name, part)] = written[name]._replace(cells=cells)
    return read_numeric(plain, features.gaps)


def part_categories(
    settings: DataSettings,
    selection: Selection,
    columns: Mapping[str, Any],
    source: str,
    first_row: int = 1,
) -> dict[str, CategoricalColumn]:
    """Return the codes of some rows, by column: categories, then sets of categories."""
    features = settings.features
    if features is None:
        return {}

    def written(name: str) -> WrittenColumn:
        return _written(columns, name, source, features.missing_texts, first_row)

    found = {name: read_categories(written(name)) for name in selection.chosen.categorical}
    for name in selection.chosen.lists:
        found[name] = read_lists(written(name), features.list_separator)
    return found


def part_image(
    image: NDArray[Any], settings: ImageSettings, source: str, first_row: int = 1
) -> NDArray[Any]:
    """Return the images of some rows as (rows, channels, height, width), uint8 or float32."""
    where = source if settings.array is None else f"{source}: array {settings.array!r}"
    if image.ndim != 4:
        raise DataError(f"{where}: expected four dimensions, got shape {image.shape}")
    if settings.layout == "channels_last":
        image = image.transpose(0, 3, 1, 2)
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind != "f":
        raise DataError(f"{where}: expected uint8 or floating-point numbers, not {image.dtype}")
    image = image.astype(np.float32)
    is_wrong = ~np.isfinite(image).all(axis=(1, 2, 3))
    if is_wrong.any():
        rows = list_rows(np.flatnonzero(is_wrong) + first_row)
        raise DataError(f"{where}: NaN or infinite in {rows}")
    return image


def _place(source: str, column: str | None) -> str:
    return f"{source}: column {column!r}"


def _written(
    columns: Mapping[str, Any],
    name: str,
    source: str,
    missing_texts: Sequence[str] = (),
    first_row: int = 1,
) -> WrittenColumn:
    return WrittenColumn(columns[name], _place(source, name), missing_texts, first_row)


def _written_numbers(
    settings: DataSettings, columns: Mapping[str, Any], name: str, source: str, first_row: int
) -> WrittenColumn:
    written = _written(columns, name, source, settings.missing_texts, first_row)
    if isinstance(settings.source, CsvSource):
        return written._replace(decimal=settings.source.decimal)
    return written


def _common_length(columns: Mapping[str, Any], image: NDArray[Any] | None, source: str) -> int:
    lengths = {len(column) for column in columns.values()}
    if image is not None:
        lengths.add(len(image))
    if len(lengths) > 1:
        raise DataError(f"{source}: images and columns have different numbers of rows: {lengths}")
    if lengths == {0}:
        raise DataError(f"{source}: there are no rows")
    return lengths.pop()


def _read_image(source: RowSource, settings: ImageSettings) -> NDArray[Any]:
    if isinstance(source, ImageFolder):
        return part_image(source.read_images(), settings, source.name)
    if isinstance(source, NpzFile) and settings.array is not None:
        return part_image(source.read_array(settings.array), settings, source.name)
    raise TypeError("images are allowed only in npz files and image folders")

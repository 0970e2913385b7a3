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
    rows = WrittenRows(settings, source.name, columns)
    labels = rows.labels()
    if labels is not None:
        check_classes(settings, labels, source.name)
    coded = rows.coded(selection)
    return Table(
        source=source.name,
        ids=[str(row + 1) for row in range(num_rows)]
        if settings.id_column is None
        else part_ids(settings, id_rules, columns, source.name),
        labels=labels,
        numeric=rows.numeric(selection),
        categorical={name: coded[name] for name in selection.chosen.categorical},
        image=image,
        splits=rows.splits(split_column),
        lists={name: coded[name] for name in selection.chosen.lists},
        timestamps=tuple(selection.chosen.timestamps),
        weights=rows.weights(),
        gaps=features.gaps if features else "refused",
    )


class WrittenRows(NamedTuple):
    """Some consecutive rows of a source, and the settings that say how they are read."""

    settings: DataSettings
    source: str
    columns: Mapping[str, Any]
    first_row: int = 1

    def labels(self) -> NDArray[np.float32] | None:
        """Return the labels, possibly all of one class; None without a label column.

        They are NaN in the rows that ``unlabelled_rows: leave_out`` leaves out.
        """
        settings = self.settings
        if settings.label_column is None:
            return None
        column = self._numbers_of(settings.label_column)
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

    def weights(self) -> NDArray[np.float64] | None:
        name = self.settings.weight_column
        return None if name is None else read_weights(self._numbers_of(name))

    def splits(self, column: str | None) -> NDArray[np.int8] | None:
        return None if column is None else read_splits(self._texts_of(column, ()))

    def numeric(self, selection: Selection) -> dict[str, Numbers]:
        features, chosen = self.settings.features, selection.chosen
        if features is None:
            return {}
        plain = {name: self._numbers_of(name) for name in chosen.numeric}
        for name in chosen.timestamps:
            written = self._numbers_of(name)
            parts = read_timestamps(written, features.timestamp_parts, features.timestamp_format)
            for part, numbers in parts.items():
                plain[part_name(name, part)] = written._replace(cells=pa.array(numbers))
        return read_numeric(plain, features.gaps)

    def coded(self, selection: Selection) -> dict[str, CategoricalColumn]:
        """Return codes by column: categories, then sets of categories."""
        features = self.settings.features
        if features is None:
            return {}
        gaps, chosen = features.missing_texts, selection.chosen
        found = {n: read_categories(self._texts_of(n, gaps)) for n in chosen.categorical}
        for name in chosen.lists:
            found[name] = read_lists(self._texts_of(name, gaps), features.list_separator)
        return found

    def _texts_of(self, name: str, gaps: Sequence[str]) -> WrittenColumn:
        where = f"{self.source}: column {name!r}"
        return WrittenColumn(self.columns[name], where, gaps, self.first_row)

    def _numbers_of(self, name: str) -> WrittenColumn:
        written = self._texts_of(name, self.settings.missing_texts)
        if isinstance(self.settings.source, CsvSource):
            return written._replace(decimal=self.settings.source.decimal)
        return written


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

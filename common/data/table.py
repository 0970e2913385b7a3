"""A party's own table: the columns it needs, checked before anything is sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.columns import (
    CategoricalColumn,
    check_columns_exist,
    read_categories,
    read_ids,
    read_labels,
    read_numeric,
    select_features,
)
from common.data.settings import DataSettings, ImageSettings
from common.data.sources import NpzFile, TableSource, list_rows, open_source
from common.errors import DataError


@dataclass(frozen=True, eq=False)
class Table:
    """The needed columns of a party's data, row by row as in the file."""

    source: str
    """The file, for messages."""

    ids: list[str]
    """Each row's id as it stands in the file; empty text where there is none. Whether they are
    distinct and not empty is checked by the alignment, which makes them canonical first."""

    labels: NDArray[np.float32] | None
    """0 or 1 per row."""

    numeric: Mapping[str, NDArray[np.float64]]
    """Finite numbers by column."""

    categorical: Mapping[str, CategoricalColumn]
    """Categories by column."""

    image: NDArray[Any] | None
    """(rows, channels, height, width), uint8 or float32."""

    def __len__(self) -> int:
        return len(self.ids)


def read_table(settings: DataSettings, base_dir: Path) -> Table:
    """Read and check the columns that the settings name; no other column is read.

    Args:
        settings: the party's data settings.
        base_dir: folder in which relative paths start: the settings file's own.

    Raises:
        DataError: naming file, columns, and the rows (counted from 1, without the header line).
        SettingsError: a path names an environment variable that is not set.
    """
    source = open_source(settings.source, base_dir)
    features = settings.features
    names = source.column_names()
    reserved = [name for name in (settings.id_column, settings.label_column) if name is not None]
    numeric, categorical = (
        select_features(features, names, reserved, source.name) if features else ([], [])
    )
    needed = list(dict.fromkeys([*reserved, *numeric, *categorical]))
    check_columns_exist(needed, names, source.name)
    columns = source.read(needed)
    image = _read_image(source, features.image) if features and features.image else None
    num_rows = _common_length(columns, image, source.name)
    missing_texts = features.missing_texts if features else ("",)

    def where(name: str) -> str:
        return f"{source.name}: column {name!r}"

    return Table(
        source=source.name,
        ids=[str(row + 1) for row in range(num_rows)]
        if settings.id_column is None
        else read_ids(columns[settings.id_column], where(settings.id_column)),
        labels=None
        if settings.label_column is None
        else read_labels(
            columns[settings.label_column],
            settings.positive_label,
            missing_texts,
            where(settings.label_column),
        ),
        numeric=read_numeric({name: columns[name] for name in numeric}, features, source.name)
        if features
        else {},
        categorical={
            name: read_categories(columns[name], missing_texts, where(name)) for name in categorical
        },
        image=image,
    )


def _common_length(columns: Mapping[str, Any], image: NDArray[Any] | None, source: str) -> int:
    lengths = {len(column) for column in columns.values()}
    if image is not None:
        lengths.add(len(image))
    if len(lengths) > 1:
        raise DataError(f"{source}: images and columns differ in their numbers of rows: {lengths}")
    if lengths == {0}:
        raise DataError(f"{source}: there are no rows")
    return lengths.pop()


def _read_image(source: TableSource, settings: ImageSettings) -> NDArray[Any]:
    """Return images as (rows, channels, height, width), bytes or float32."""
    if not isinstance(source, NpzFile):
        raise TypeError("the settings allow images only in npz files")
    where = f"{source.name}: array {settings.array!r}"
    image = source.read_array(settings.array)
    if image.ndim != 4:
        raise DataError(f"{where}: expected four dimensions, its shape is {image.shape}")
    if settings.layout == "channels_last":
        image = image.transpose(0, 3, 1, 2)
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind != "f":
        raise DataError(f"{where}: expected uint8 or floating-point numbers, not {image.dtype}")
    image = image.astype(np.float32)
    is_wrong = ~np.isfinite(image).all(axis=(1, 2, 3))
    if is_wrong.any():
        raise DataError(f"{where}: NaN or infinite in {list_rows(np.flatnonzero(is_wrong) + 1)}")
    return image

"""Opens each kind of source that the settings can name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from splitveil.common.data import source_settings
from splitveil.common.data.csv_file import CsvFile
from splitveil.common.data.image_folder import ImageFolder
from splitveil.common.data.sources import ColumnsInMemory, Part, TableSource
from splitveil.common.data.sql_snapshot import snapshot_of
from splitveil.common.data.table_paths import TablePath, local_table_path, table_path_of
from splitveil.common.data.text_forms import TextForm
from splitveil.common.errors import DataError, SettingsError

_ResultT = TypeVar("_ResultT")

_SMALL_BYTES = 1024 * 1024


def open_source(settings: source_settings.Source, base_dir: Path) -> TableSource:
    match settings:
        case source_settings.CsvSource():
            return text_file(settings, base_dir)
        case source_settings.ParquetSource():
            return _parquet(table_path_of(settings, base_dir))
        case source_settings.SqlSource():
            return _parquet(local_table_path(snapshot_of(settings, base_dir)))
        case source_settings.ImagesSource():
            return ImageFolder(settings, base_dir)
        case source_settings.SklearnSource(dataset=dataset, shuffle_seed=seed):
            return _Shipped(dataset, seed)


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
    if isinstance(source, ImageFolder):
        yield source.read(names)
    else:
        for part in source.parts(names):
            yield part.columns


def text_file(settings: source_settings.CsvSource, base_dir: Path) -> CsvFile:
    path = settings.resolve(base_dir)
    form = TextForm(settings.encoding, settings.quote, settings.escape)
    return CsvFile(path, settings.separator(), settings.column_names, form)


@contextmanager
def with_advice(settings: source_settings.Source, base_dir: Path) -> Iterator[None]:
    """Add to an error what the form of a text file says about its cause."""
    try:
        yield
    except (DataError, SettingsError) as error:
        advice = ""
        with suppress(DataError, SettingsError):
            if isinstance(settings, source_settings.CsvSource):
                file = text_file(settings, base_dir)
                advice = f"\n{file.name}: {found}" if (found := file.advice()) else ""
        if not advice:
            raise
        kind = DataError if isinstance(error, DataError) else SettingsError
        raise kind(f"{error}{advice}") from error


def _parquet(path: TablePath) -> TableSource:
    # Importing it takes a second where pandas is installed; other kinds need not wait for it.
    from splitveil.common.data.parquet_files import ParquetFiles  # noqa: PLC0415

    return ParquetFiles(path)


class _Shipped(ColumnsInMemory):
    def __init__(self, name: str, shuffle_seed: int) -> None:
        # Importing it takes a second, which a party with a file of its own need not wait for.
        from sklearn import datasets  # noqa: PLC0415

        bunch = datasets.load_digits() if name == "digits" else datasets.load_breast_cancer()
        order = np.random.default_rng(shuffle_seed).permutation(len(bunch.target))
        columns: dict[str, Any] = {}
        if name == "digits":
            columns["id"] = [f"image-{row:04d}" for row in order]
            columns["digit"] = bunch.target[order]
            names = [f"pixel_{j // 8}_{j % 8}" for j in range(64)]
        else:
            columns["id"] = [f"patient-{row:04d}" for row in order]
            columns["malignant"] = 1 - bunch.target[order]
            names = [str(feature).replace(" ", "_") for feature in bunch.feature_names]
        columns |= {feature: bunch.data[order, j] for j, feature in enumerate(names)}
        cells = {key: pa.chunked_array([pa.array(values)]) for key, values in columns.items()}
        super().__init__(f"scikit-learn's {name}", cells)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        yield Part(self.read(names), None, 1.0)

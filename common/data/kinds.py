"""Opens each kind of source that the settings can name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from splitveil.common.data.csv_file import CsvFile
from splitveil.common.data.image_folder import ImageFolder
from splitveil.common.data.npz_file import NpzFile
from splitveil.common.data.places import Place, place_of, place_on_this_machine
from splitveil.common.data.source_settings import (
    CsvSource,
    ImagesSource,
    NpzSource,
    ParquetSource,
    SklearnSource,
    Source,
    SqlSource,
)
from splitveil.common.data.sources import ColumnsInMemory, Part, TableSource
from splitveil.common.data.sql_snapshot import snapshot_of
from splitveil.common.errors import DataError, SettingsError


def open_source(settings: Source, base_dir: Path, image_array: str | None = None) -> TableSource:
    match settings:
        case CsvSource():
            return text_file(settings, base_dir)
        case ParquetSource():
            return _parquet(place_of(settings, base_dir))
        case SqlSource():
            return _parquet(place_on_this_machine(snapshot_of(settings, base_dir)))
        case NpzSource():
            return NpzFile(settings.resolve(base_dir), image_array)
        case ImagesSource():
            return ImageFolder(settings, base_dir)
        case SklearnSource(dataset=dataset, shuffle_seed=seed):
            return Digits(seed) if dataset == "digits" else BreastCancer(seed)


def text_file(settings: CsvSource, base_dir: Path) -> CsvFile:
    path = settings.resolve(base_dir)
    return CsvFile(path, settings.separator(), settings.column_names, settings.encoding)


@contextmanager
def with_advice(settings: Source, base_dir: Path) -> Iterator[None]:
    """Add to an error what the form of a text file says about its cause."""
    try:
        yield
    except (DataError, SettingsError) as error:
        advice = ""
        with suppress(DataError, SettingsError):
            if isinstance(settings, CsvSource):
                file = text_file(settings, base_dir)
                advice = f"\n{file.name}: {found}" if (found := file.advice()) else ""
        if not advice:
            raise
        kind = DataError if isinstance(error, DataError) else SettingsError
        raise kind(f"{error}{advice}") from error


def _parquet(place: Place) -> TableSource:
    # Importing it takes a second where pandas is installed; other kinds need not wait for it.
    from splitveil.common.data.parquet_files import ParquetFiles  # noqa: PLC0415

    return ParquetFiles(place)


class _Shipped(ColumnsInMemory):
    def __init__(self, name: str, columns: Mapping[str, Any]) -> None:
        cells = {key: pa.chunked_array([pa.array(values)]) for key, values in columns.items()}
        super().__init__(f"scikit-learn's {name}", cells)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        yield Part(self.read(names), None, 1.0)


class Digits(_Shipped):
    def __init__(self, shuffle_seed: int) -> None:
        # Importing it takes a second, which a party with a file of its own need not wait for.
        from sklearn.datasets import load_digits  # noqa: PLC0415

        bunch = load_digits()
        order = np.random.default_rng(shuffle_seed).permutation(len(bunch.target))
        columns = {"id": [f"image-{row:04d}" for row in order], "digit": bunch.target[order]}
        pixels = {f"pixel_{j // 8}_{j % 8}": bunch.data[order, j] for j in range(64)}
        super().__init__("digits", columns | pixels)


class BreastCancer(_Shipped):
    def __init__(self, shuffle_seed: int) -> None:
        # Importing it takes a second, which a party with a file of its own need not wait for.
        from sklearn.datasets import load_breast_cancer  # noqa: PLC0415

        bunch = load_breast_cancer()
        order = np.random.default_rng(shuffle_seed).permutation(len(bunch.target))
        columns: dict[str, Any] = {
            "id": [f"patient-{row:04d}" for row in order],
            "malignant": 1 - bunch.target[order],
        }
        for name, values in zip(bunch.feature_names, bunch.data.T, strict=True):
            columns[str(name).replace(" ", "_")] = values[order]
        super().__init__("breast_cancer", columns)

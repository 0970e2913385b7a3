"""Opens each kind of source that the settings can name: Parquet files and folders of images here.

Many Parquet files are one table, in the order of their paths.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet
from pydantic_core import from_json

from splitveil.common.data import source_settings, sources
from splitveil.common.data.csv_file import CsvFile, TextForm
from splitveil.common.data.source_settings import ImagesSource, expand_path
from splitveil.common.data.sources import (
    ArrowColumn,
    ColumnsInMemory,
    FoundFile,
    Part,
    TablePath,
    TableSource,
    find_files,
    local_table_path,
    table_path_of,
    unreadable_is_data_error,
)
from splitveil.common.data.sql_snapshot import snapshot_of
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.text.files import check_regular
from splitveil.common.text.imports import extra_missing
from splitveil.common.text.wording import suggest

_FILES_AT_ONCE = 16
"""Files that are read at the same time, for stores that answer slowly."""
_NAMED = 3
"""Number of files that a message names."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


class _OneFile(NamedTuple):
    found: FoundFile
    schema: Any
    metadata: Any
    from_folders: Mapping[str, str | None]
    """The columns that the names of the folders make; None is their word for no value."""


class ParquetFiles:
    """The Parquet files at a path, as one table with typed columns."""

    def __init__(self, table_path: TablePath) -> None:
        self.name = table_path.name
        self._table_path = table_path

    def column_names(self) -> list[str]:
        """Return the columns in the order of the first file."""
        first = self._files[0]
        return [*first.schema.names, *first.from_folders]

    @property
    def index_columns(self) -> list[str]:
        """The columns that held the rows' labels in pandas, as it notes in the first file."""
        noted = (self._files[0].schema.metadata or {}).get(b"pandas", b"{}")
        try:
            return [one for one in from_json(noted)["index_columns"] if isinstance(one, str)]
        except (ValueError, LookupError, TypeError):
            return []

    @property
    def category_columns(self) -> list[str]:
        """The columns that were categories in pandas; Parquet itself keeps only text categories."""
        noted = (self._files[0].schema.metadata or {}).get(b"pandas", b"{}")
        try:
            columns = from_json(noted)["columns"]
            return [str(x["name"]) for x in columns if x["pandas_type"] == "categorical"]
        except (ValueError, LookupError, TypeError):
            return []

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        schema = self._common_schema(names)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            batches = pool.map(lambda file: [*self._batches(file, schema)], self._files)
            table = pa.concat_tables([schema.empty_table(), *chain.from_iterable(batches)])
        return {name: table.column(name) for name in names}

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        schema = self._common_schema(names)
        num_rows = sum(file.metadata.num_rows for file in self._files)
        done_rows, held = 0, schema.empty_table()
        for file in self._files:
            for batch in self._batches(file, schema):
                held = pa.concat_tables([held, batch]) if len(held) else batch
                while len(held) >= sources.PART_ROWS:
                    done_rows += sources.PART_ROWS
                    done = min(1.0, done_rows / max(1, num_rows))  # a file may say less than it has
                    yield _part(held.slice(0, sources.PART_ROWS), done)
                    held = held.slice(sources.PART_ROWS)
        if len(held):
            yield _part(held, 1.0)

    @cached_property
    def _files(self) -> list[_OneFile]:
        found = find_files(self._table_path)
        with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(found))) as pool:
            files = list(pool.map(self._open, found))
        first = files[0]
        for file in files:
            if list(file.from_folders) != list(first.from_folders):
                raise DataError(
                    f"{self.name}: expected folders NAME=VALUE with the same names for every "
                    f"file, got {_listed(first.from_folders)} for {first.found.name} and "
                    f"{_listed(file.from_folders)} for {file.found.name}"
                )
        return files

    def _open(self, found: FoundFile) -> _OneFile:
        with (
            unreadable_is_data_error(found.location),
            parquet.ParquetFile(found.path, filesystem=self._table_path.filesystem) as file,
        ):
            # Folders are named NAME=VALUE, as Hive writes them.
            pairs = [folder.split("=", 1) for folder in found.folders if "=" in folder]
            from_folders = {
                unquote(name, errors="strict"): None
                if value == _NO_VALUE
                else unquote(value, errors="strict")
                for name, value in pairs
            }
            return _OneFile(found, file.schema_arrow, file.metadata, from_folders)

    def _common_schema(self, names: Sequence[str]) -> Any:
        problems: list[str] = []
        fields = [self._field(name, problems) for name in dict.fromkeys(names)]
        if problems:
            raise DataError("\n".join(problems))
        return pa.schema(fields)

    def _field(self, name: str, problems: list[str]) -> Any:
        if name in self._files[0].from_folders:
            return pa.field(name, pa.string())
        lacking, known = [], []
        for file in self._files:
            if file.schema.get_field_index(name) < 0:  # absent, or there several times
                lacking.append(file.found.name)
            elif not pa.types.is_null(file.schema.field(name).type):
                known.append((_plain_type(file.schema.field(name).type), file.found.name))
        if lacking:
            named = ", ".join(lacking[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
            problems.append(
                f"{self.name}: column {name!r} is missing in {len(lacking)} of "
                f"{len(self._files)} files: {named}"
            )
        kind, first = known[0] if known else (pa.null(), "")
        for other, where in known:
            if other != kind:
                problems.append(
                    f"{self.name}: column {name!r} has several types: {kind} in {first}, "
                    f"{other} in {where}; write it with one type, or read it from one folder"
                )
                break
        return pa.field(name, kind)

    def _batches(self, file: _OneFile, schema: Any) -> Iterator[Any]:
        stored = [name for name in schema.names if name not in file.from_folders]
        with (
            unreadable_is_data_error(file.found.location),
            parquet.ParquetFile(
                file.found.path, filesystem=self._table_path.filesystem, metadata=file.metadata
            ) as opened,
        ):
            for batch in opened.iter_batches(sources.PART_ROWS, columns=stored):
                columns = [
                    pa.repeat(pa.scalar(file.from_folders[field.name], field.type), len(batch))
                    if field.name in file.from_folders
                    # A column of nothing but nulls may have no type.
                    else _plain(batch.column(field.name)).cast(field.type)
                    for field in schema
                ]
                table = pa.Table.from_arrays(columns, schema=schema)
                table.validate(full=True)  # texts that are not UTF-8 would be errors anywhere
                yield table


def _plain_type(kind: Any) -> Any:
    if isinstance(kind, pa.UuidType) or kind == pa.string_view():
        return pa.string()
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _plain(column: Any) -> Any:
    if isinstance(column.type, pa.UuidType):  # as people and other files write it
        return pa.array((str(one) if one else None for one in column.to_pylist()), pa.string())
    return column


def _part(table: Any, done_fraction: float) -> Part:
    return Part({name: table.column(name) for name in table.column_names}, None, done_fraction)


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"


try:
    from PIL import Image
except ImportError:  # a party with tables need not install it
    Image = None  # type: ignore[assignment]

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats that are read, by content and not by name; Pillow would have Ghostscript run a PostScript
file."""

_MAX_PIXELS = 2**26


class ImageFolder:
    """A folder of image files and the table that names them."""

    def __init__(self, settings: ImagesSource, base_dir: Path) -> None:
        if Image is None:
            raise extra_missing("data.source: kind images", "images")
        table = expand_path("table", settings.table, base_dir)
        separator = "\t" if ".tsv" in table.suffixes[-2:] else ","
        self._table = CsvFile(table, separator, None)
        self.name = self._table.name
        self._folder = settings.resolve(base_dir)
        self._settings = settings

    def column_names(self) -> list[str]:
        return self._table.column_names()

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        return self._table.read(names)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        settings = self._settings
        column = settings.file_column
        if column not in self.column_names():
            raise DataError(
                f"{self.name}: there is no column {column!r}{suggest(column, self.column_names())}"
            )
        rows_at_once = max(1, sources.PART_BYTES // (3 * math.prod(settings.size)))
        first_row, done = 1, 0.0
        for part in self._table.parts(list(dict.fromkeys([*names, column]))):
            files = part.columns[column].to_pylist()
            for start in range(0, len(files), rows_at_once):
                some = files[start : start + rows_at_once]
                image = np.stack(
                    [self._load(name, first_row + i) for i, name in enumerate(some, start)]
                )
                columns = {name: part.columns[name].slice(start, len(some)) for name in names}
                share = (start + len(some)) / len(files)
                yield Part(columns, image, done + share * (part.done_fraction - done))
            first_row, done = first_row + len(files), part.done_fraction

    def _load(self, name: str, row: int) -> NDArray[np.uint8]:
        path = self._folder / f"{name}{self._settings.file_ending}"
        height, width = self._settings.size
        reason = f"damaged, or none of {', '.join(_FORMATS)}"
        try:
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                reason = "its name leads out of the folder"
                raise ValueError(reason)
            check_regular(path)
            with (
                warnings.catch_warnings(action="ignore"),  # which may repeat the file's own texts
                Image.open(path, formats=_FORMATS) as image,
            ):
                if image.width * image.height > _MAX_PIXELS:
                    reason = f"it has more than {_MAX_PIXELS:,} pixels"
                    raise ValueError(reason)
                pixels = image.convert("RGB" if self._settings.colours == "rgb" else "L")
                if pixels.size != (width, height):
                    pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
        except Exception as error:  # Pillow raises a dozen classes for damaged files
            if isinstance(error, FileNotFoundError):
                reason = "there is no such file"
            raise DataError(
                f"{self.name}: row {row}: its image cannot be read ({reason}) in {self._folder}"
            ) from error
        return np.asarray(pixels, np.uint8).reshape(height, width, -1)


_ResultT = TypeVar("_ResultT")

_SMALL_BYTES = 1024 * 1024


def open_source(settings: source_settings.Source, base_dir: Path) -> TableSource:
    match settings:
        case source_settings.CsvSource():
            return text_file(settings, base_dir)
        case source_settings.ParquetSource():
            return ParquetFiles(table_path_of(settings, base_dir))
        case source_settings.SqlSource():
            return ParquetFiles(local_table_path(snapshot_of(settings, base_dir)))
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

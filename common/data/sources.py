"""Kinds of files: what columns one has, and the raw values of those that are needed."""

import csv
import difflib
import io
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from common.data.settings import (
    CsvSource,
    ImagesSource,
    NpzSource,
    ParquetSource,
    SklearnSource,
    Source,
    expand_path,
)
from common.errors import DataError

RESIZING = Image.Resampling.BILINEAR

CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
"""Endings by which pyarrow, too, tells how a file is compressed."""

PART_BYTES = 16 * 1024 * 1024
PART_ROWS = 64 * 1024

ArrowColumn = Any
"""A pyarrow ChunkedArray; pyarrow brings no types."""


class Part(NamedTuple):
    """Some consecutive rows of a source."""

    columns: Mapping[str, ArrowColumn]
    image: NDArray[Any] | None  # as it is stored, (rows, ...)
    done_fraction: float  # of the source, with this part


class TableSource(Protocol):
    """One place that rows come from."""

    name: str
    """How messages call it."""

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        ...

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns, each of the same length; nothing else is read."""
        ...

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the same rows some at a time, with their images: memory need not hold all."""
        ...


def open_source(settings: Source, base_dir: Path, image_array: str | None = None) -> TableSource:
    """Find the place that rows come from.

    Args:
        settings: which one.
        base_dir: folder in which relative paths start.
        image_array: the array of an npz file that holds images, if one does.

    Raises:
        SettingsError: a path names an environment variable that is not set.
    """
    match settings:
        case CsvSource():
            path = settings.resolve(base_dir)
            return CsvFile(path, settings.separator(), settings.column_names)
        case ParquetSource():
            return ParquetFile(settings.resolve(base_dir))
        case NpzSource():
            return NpzFile(settings.resolve(base_dir), image_array)
        case ImagesSource():
            return ImageFolder(settings, base_dir)
        case SklearnSource():
            return BreastCancer(settings.shuffle_seed)


def suggest(name: str, known: Iterable[str]) -> str:
    """Name the most similar of the known names, for messages; empty where none is similar."""
    by_lower_case = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[close[0]]!r}?" if close else ""


def list_rows(rows: Sequence[int] | NDArray[np.int64], count: int | None = None) -> str:
    """Say which rows: the first five numbers and how many there are, for messages."""
    count = len(rows) if count is None else count
    first = ", ".join(str(row) for row in rows[:5])
    if count == 1:
        return f"row {first}"
    return f"rows {first}{', ...' if count > len(rows[:5]) else ''} ({count} in all)"


@contextmanager
def _unreadable_is_data_error(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the text is not UTF-8") from error
    except (OSError, EOFError, pa.ArrowException, csv.Error, zipfile.BadZipFile) as error:
        # The library's own text may quote a row.
        damaged = f"damaged, or not such a file ({type(error).__name__})"
        reason = getattr(error, "strerror", None) or damaged
        raise DataError(f"{path}: cannot be read: {reason}") from error


class CsvFile:
    """Rows as lines of text."""

    def __init__(self, path: Path, separator: str, names: Sequence[str] | None) -> None:
        self.name = str(path)
        self._path = path
        self._separator = separator
        self._names = names

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        if self._names is not None:
            return list(self._names)
        with (
            _unreadable_is_data_error(self._path),
            pa.input_stream(str(self._path), compression="detect") as stream,
        ):
            lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            header = next(csv.reader(lines, delimiter=self._separator), [])
        if not any(header):
            raise DataError(f"{self.name}: the file is empty: expected a line of column names")
        return header

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns as text."""
        if not names:
            return {}  # to pyarrow, an empty list of columns means all of them
        try:
            table = self._read(names)
        except DataError:
            self._report_bad_rows(names)
            raise
        return {name: table.column(name) for name in names}

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the named columns as text, some rows at a time."""
        try:
            yield from self._parts(names)
        except DataError:
            self._report_bad_rows(names)
            raise

    def _report_bad_rows(self, names: Sequence[str]) -> None:
        bad_rows: list[int] = []
        with suppress(DataError):
            for _ in self._parts(names, bad_rows):
                pass
        if bad_rows:
            header_lines = self._names is None
            raise DataError(
                f"{self.name}: expected {len(self.column_names())} cells in every row, "
                f"other numbers in {list_rows([number - header_lines for number in bad_rows])}"
            )

    def _parts(self, names: Sequence[str], bad_rows: list[int] | None = None) -> Iterator[Part]:
        """Yield rows; those with a wrong number of cells are listed, or else an error."""
        if not names:
            raise ValueError("to pyarrow, an empty list of columns means all of them")
        with _unreadable_is_data_error(self._path), self._path.open("rb") as file:
            total_bytes = max(1, self._path.stat().st_size)
            options = self._options(names, bad_rows)
            with arrow_csv.open_csv(_decompressed(file, self._path), **options) as reader:
                for batch in reader:
                    columns = {name: pa.chunked_array([batch.column(name)]) for name in names}
                    yield Part(columns, None, min(1.0, file.tell() / total_bytes))

    def _read(self, names: Sequence[str]) -> Any:
        with _unreadable_is_data_error(self._path):
            return arrow_csv.read_csv(self._path, **self._options(names))

    def _options(self, names: Sequence[str], bad_rows: list[int] | None = None) -> dict[str, Any]:
        def skip(row: Any) -> str:
            if bad_rows is not None:
                bad_rows.append(row.number)
            return "skip"

        # A handler of bad rows goes with one thread only. Threads do not know their rows' numbers,
        # and the last of them may still hold the handler when the interpreter ends: then the
        # process aborts instead of ending with its exit code.
        one_thread = bad_rows is not None
        # Everything is text here, so that an id keeps its leading zeros, and so that a cell that is
        # no number can be reported with its row.
        return {
            "read_options": arrow_csv.ReadOptions(
                use_threads=not one_thread, column_names=self._names, block_size=PART_BYTES
            ),
            "parse_options": arrow_csv.ParseOptions(
                delimiter=self._separator, invalid_row_handler=skip if one_thread else None
            ),
            "convert_options": arrow_csv.ConvertOptions(
                include_columns=list(names),
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=False,
            ),
        }


def _decompressed(file: BinaryIO, path: Path) -> Any:
    """Return an open file's text, whatever packed it; its position tells how far one has read."""
    stream = pa.PythonFile(file, mode="r")
    codec = CODECS.get(path.suffix)
    return stream if codec is None else pa.CompressedInputStream(stream, codec)


class ParquetFile:
    """Rows of typed columns."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        with _unreadable_is_data_error(self._path):
            return list(parquet.read_schema(self._path).names)

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns in the file's own types."""
        with _unreadable_is_data_error(self._path):
            table = parquet.read_table(self._path, columns=list(names))
        return {name: table.column(name) for name in names}

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the named columns in the file's own types, some rows at a time."""
        done_rows = 0
        with _unreadable_is_data_error(self._path), parquet.ParquetFile(self._path) as file:
            for batch in file.iter_batches(PART_ROWS, columns=list(names)):
                done_rows += len(batch)
                columns = {name: pa.chunked_array([batch.column(name)]) for name in names}
                yield Part(columns, None, done_rows / file.metadata.num_rows)


class NpzFile:
    """Rows as the first dimension of named arrays. Pickled objects are never loaded."""

    def __init__(self, path: Path, image_array: str | None = None) -> None:
        self.name = str(path)
        self._path = path
        self._image_array = image_array

    def column_names(self) -> list[str]:
        """Return the columns: ``name`` of one dimension, ``name.0``, ``name.1``, ... of two."""
        names = []
        for name, shape in self._shapes().items():
            if len(shape) == 1:
                names.append(name)
            elif len(shape) == 2:
                names += [f"{name}.{j}" for j in range(shape[1])]
        return names

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns."""
        array_of = self._array_of(names)
        arrays = {array: self.read_array(array) for array in set(array_of.values())}
        self._check_lengths({name: len(array) for name, array in arrays.items()})
        return self._columns(array_of, arrays)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the named columns, and the images, some rows at a time."""
        array_of, array = self._array_of(names), self._image_array
        arrays = {*array_of.values(), *([] if array is None else [array])}
        with _unreadable_is_data_error(self._path), self._open() as archive, ExitStack() as streams:
            for name in arrays - set(archive.files):
                raise DataError(f"{self.name}: there is no array {name!r}{suggest(name, archive)}")
            readers = {name: _NpyReader(archive, name, streams, self.name) for name in arrays}
            num_rows = self._check_lengths({name: r.shape[0] for name, r in readers.items()})
            row_bytes = max(1, sum(reader.row_bytes for reader in readers.values()))
            rows_at_once = min(PART_ROWS, max(1, PART_BYTES // row_bytes))
            for start in range(0, num_rows, rows_at_once):
                end = min(num_rows, start + rows_at_once)
                found = {name: reader.read(end - start) for name, reader in readers.items()}
                image = None if array is None else found[array]
                yield Part(self._columns(array_of, found), image, end / num_rows)

    def _array_of(self, names: Sequence[str]) -> dict[str, str]:
        shapes = self._shapes()
        return {name: name if name in shapes else name.rpartition(".")[0] for name in names}

    def _check_lengths(self, lengths: Mapping[str, int]) -> int:
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"{self.name}: the arrays have different numbers of rows: "
                f"{dict(sorted(lengths.items()))}"
            )
        return next(iter(lengths.values()), 0)

    def _columns(
        self, array_of: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]
    ) -> dict[str, ArrowColumn]:
        columns = {}
        for name, array in array_of.items():
            values = arrays[array]
            is_whole = values.ndim == 1
            part = values if is_whole else values[:, int(name.rpartition(".")[2])]
            columns[name] = self._column(array, part)
        return columns

    def read_array(self, name: str) -> NDArray[Any]:
        """Return one array as it is stored.

        Raises:
            DataError: there is no such array, or it holds pickled objects.
        """
        with _unreadable_is_data_error(self._path), self._open() as archive:
            if name not in archive.files:
                raise DataError(f"{self.name}: there is no array {name!r}{suggest(name, archive)}")
            try:
                return np.asarray(archive[name])
            except ValueError as error:
                raise DataError(
                    f"{self.name}: array {name!r} cannot be read: expected numbers or text, "
                    f"never pickled objects"
                ) from error

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Read the arrays' shapes, not the arrays."""
        shapes = {}
        with _unreadable_is_data_error(self._path), self._open() as archive:
            for name in archive.files:
                with archive.zip.open(f"{name}.npy") as stream:
                    shapes[name] = _npy_header(stream)[0]
        return shapes

    def _open(self) -> Any:
        try:
            archive = np.load(self._path, allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{self.name}: this is not an npz archive") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{self.name}: expected an npz archive, this is a single array")
        return archive

    def _column(self, name: str, array: NDArray[Any]) -> ArrowColumn:
        try:
            return pa.chunked_array([pa.array(np.ascontiguousarray(array))])
        except pa.ArrowException as error:
            raise DataError(
                f"{self.name}: array {name!r} holds {array.dtype}: expected numbers or text"
            ) from error


def _npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether columns come before rows, and element type."""
    is_first_version = np.lib.format.read_magic(stream) == (1, 0)
    if is_first_version:
        return np.lib.format.read_array_header_1_0(stream)
    return np.lib.format.read_array_header_2_0(stream)


class _NpyReader:
    """One array of an npz archive, read from its first row on."""

    def __init__(self, archive: Any, name: str, streams: ExitStack, source: str) -> None:
        self._stream = streams.enter_context(archive.zip.open(f"{name}.npy"))
        self.shape, by_columns, self._dtype = _npy_header(self._stream)
        if self._dtype.hasobject or not self.shape or (by_columns and len(self.shape) > 1):
            raise DataError(
                f"{source}: array {name!r} cannot be read row by row: expected numbers or text, "
                f"never pickled objects, stored in the order of their rows"
            )
        self._source = f"{source}: array {name!r}"
        self.row_bytes = math.prod(self.shape[1:]) * self._dtype.itemsize

    def read(self, num_rows: int) -> NDArray[Any]:
        """Return the next rows."""
        data = self._stream.read(num_rows * self.row_bytes)
        if len(data) < num_rows * self.row_bytes:
            raise DataError(f"{self._source} ends before its last row")
        return np.frombuffer(data, self._dtype).reshape(num_rows, *self.shape[1:])


class ImageFolder:
    """Images as files, and a table that names them."""

    def __init__(self, settings: ImagesSource, base_dir: Path) -> None:
        table = expand_path("table", settings.table, base_dir)
        separator = "\t" if ".tsv" in table.suffixes[-2:] else ","
        self._table = CsvFile(table, separator, None)
        self.name = self._table.name
        self._folder = settings.resolve(base_dir)
        self._settings = settings

    def column_names(self) -> list[str]:
        """Return the names of the table's columns."""
        return self._table.column_names()

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns of the table."""
        return self._table.read(names)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield columns and images, some rows at a time."""
        settings = self._settings
        column = settings.file_column
        if column not in self.column_names():
            raise DataError(
                f"{self.name}: there is no column {column!r}{suggest(column, self.column_names())}"
            )
        rows_at_once = max(1, PART_BYTES // (3 * settings.height * settings.width))
        first_row = 1
        for part in self._table.parts(list(dict.fromkeys([*names, column]))):
            files = part.columns[column].to_pylist()
            for start in range(0, len(files), rows_at_once):
                some = files[start : start + rows_at_once]
                image = np.stack(
                    [self._load(name, first_row + i) for i, name in enumerate(some, start)]
                )
                columns = {name: part.columns[name].slice(start, len(some)) for name in names}
                is_last = start + len(some) == len(files)
                yield Part(columns, image, part.done_fraction if is_last else 0.0)
            first_row += len(files)

    def read_images(self) -> NDArray[np.uint8]:
        """Return all images, (rows, height, width, channels)."""
        images = [part.image for part in self.parts([]) if part.image is not None]
        if not images:
            raise DataError(f"{self.name}: there are no rows")
        return np.concatenate(images)

    def _load(self, name: str, row: int) -> NDArray[np.uint8]:
        path = self._folder / f"{name}{self._settings.file_ending}"
        size = (self._settings.width, self._settings.height)
        try:
            with Image.open(path) as image:
                pixels = image.convert("RGB" if self._settings.colours == "rgb" else "L")
                resized = pixels if pixels.size == size else pixels.resize(size, RESIZING)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else "damaged"
            raise DataError(
                f"{self.name}: row {row}: its image cannot be read ({reason}) in {self._folder}"
            ) from error
        return np.asarray(resized, np.uint8).reshape(*size[::-1], -1)


class BreastCancer:
    """The Wisconsin diagnostic data set that scikit-learn ships."""

    name = "scikit-learn's breast_cancer"

    def __init__(self, shuffle_seed: int) -> None:
        # It takes a second to import, which a party with a file of its own need not wait for.
        from sklearn.datasets import load_breast_cancer  # noqa: PLC0415

        bunch = load_breast_cancer()
        order = np.random.default_rng(shuffle_seed).permutation(len(bunch.target))
        self._columns: dict[str, Any] = {
            "id": [f"patient-{row:04d}" for row in order],
            "malignant": 1 - bunch.target[order],
        }
        for name, values in zip(bunch.feature_names, bunch.data.T, strict=True):
            self._columns[str(name).replace(" ", "_")] = values[order]

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        return list(self._columns)

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns."""
        return {name: pa.chunked_array([pa.array(self._columns[name])]) for name in names}

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the named columns at once: they are few."""
        yield Part(self.read(names), None, 1.0)

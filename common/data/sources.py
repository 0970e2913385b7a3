"""Kinds of files: what columns one has, and the raw values of those that are needed."""

import csv
import difflib
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from common.data.settings import CsvSource, NpzSource, ParquetSource, SklearnSource
from common.errors import DataError

ArrowColumn = Any
"""A pyarrow ChunkedArray; pyarrow brings no types."""


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


def open_source(
    settings: CsvSource | ParquetSource | NpzSource | SklearnSource, base_dir: Path
) -> TableSource:
    """Find the place that rows come from.

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
            return NpzFile(settings.resolve(base_dir))
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

    def _report_bad_rows(self, names: Sequence[str]) -> None:
        bad_rows: list[int] = []
        with suppress(DataError):
            self._read(names, bad_rows)
        if bad_rows:
            header_lines = self._names is None
            raise DataError(
                f"{self.name}: expected {len(self.column_names())} cells in every row, "
                f"other numbers in {list_rows([number - header_lines for number in bad_rows])}"
            )

    def _read(self, names: Sequence[str], bad_rows: list[int] | None = None) -> Any:
        """Read the columns; rows with a wrong number of cells are listed, or else an error."""

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
        with _unreadable_is_data_error(self._path):
            return arrow_csv.read_csv(
                self._path,
                arrow_csv.ReadOptions(
                    use_threads=not one_thread,
                    column_names=self._names,
                    block_size=16 * 1024 * 1024,
                ),
                arrow_csv.ParseOptions(
                    delimiter=self._separator, invalid_row_handler=skip if one_thread else None
                ),
                arrow_csv.ConvertOptions(
                    include_columns=list(names),
                    column_types=dict.fromkeys(names, pa.string()),
                    strings_can_be_null=False,
                ),
            )


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


class NpzFile:
    """Rows as the first dimension of named arrays. Pickled objects are never loaded."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

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
        shapes = self._shapes()
        array_of = {name: name if name in shapes else name.rpartition(".")[0] for name in names}
        arrays = {array: self.read_array(array) for array in set(array_of.values())}
        lengths = {name: len(array) for name, array in sorted(arrays.items())}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self.name}: the arrays have different numbers of rows: {lengths}")
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
                    is_first_version = np.lib.format.read_magic(stream) == (1, 0)
                    read_header = (
                        np.lib.format.read_array_header_1_0
                        if is_first_version
                        else np.lib.format.read_array_header_2_0
                    )
                    shapes[name] = read_header(stream)[0]
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

"""Reads NumPy archives, whole or in parts. Pickled objects are never loaded.

The size in an array's header is believed only if the file is large enough to hold that much.
"""

import math
import tokenize
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data import sources
from splitveil.common.data.sources import ArrowColumn, Part, suggest, unreadable_is_data_error
from splitveil.common.errors import DataError

MAX_COLUMNS = 2**20
_LARGEST_RATIO = 1032
"""Largest compression ratio of zlib, the only compression that numpy uses."""
_SLACK_BYTES = 4096
_BAD_EXPRESSION = (
    *(ValueError, TypeError, LookupError, SyntaxError, tokenize.TokenError),
    *(RecursionError, MemoryError),
)
"""The errors of numpy and Python for a header that is not a literal."""


class NpzFile:
    """A NumPy archive, whose rows are the first dimension of its arrays."""

    def __init__(self, path: Path, image_array: str | None = None) -> None:
        self.name = str(path)
        self._path = path
        self._image_array = image_array

    def column_names(self) -> list[str]:
        """Return the columns: ``name`` for one dimension, ``name.0``, ``name.1``, ... for two."""
        names: list[str] = []
        for name, shape in self._shapes().items():
            if len(shape) == 2 and len(names) + shape[1] > MAX_COLUMNS:
                raise DataError(f"{self.name}: expected at most {MAX_COLUMNS:,} columns")
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
        """Yield the named columns and the images, in parts."""
        array_of, array = self._array_of(names), self._image_array
        arrays = {*array_of.values(), *([] if array is None else [array])}
        with unreadable_is_data_error(self._path), self._open() as archive, ExitStack() as streams:
            for name in arrays - set(archive.files):
                raise DataError(f"{self.name}: there is no array {name!r}{suggest(name, archive)}")
            readers = {name: _NpyReader(archive, name, streams, self.name) for name in arrays}
            for name, reader in readers.items():
                self._check_size(archive, name, reader.header, reader.header_bytes)
            num_rows = self._check_lengths({name: r.shape[0] for name, r in readers.items()})
            row_bytes = max(1, sum(reader.row_bytes for reader in readers.values()))
            rows_at_once = min(sources.PART_ROWS, max(1, sources.PART_BYTES // row_bytes))
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

    def array_names(self) -> list[str]:
        """Return the names of the arrays.

        Raises:
            DataError: the file cannot be read.
        """
        return list(self._shapes())

    def read_array(self, name: str) -> NDArray[Any]:
        """Return one array as stored.

        Raises:
            DataError: there is no such array, or it holds pickled objects.
        """
        with unreadable_is_data_error(self._path), self._open() as archive:
            if name not in archive.files:
                raise DataError(f"{self.name}: there is no array {name!r}{suggest(name, archive)}")
            with _opened(archive, name, self.name) as stream:
                header = _npy_header(stream, f"{self.name}: array {name!r}")
                if header.dtype.hasobject:
                    raise DataError(
                        f"{self.name}: array {name!r} cannot be read: expected numbers or text, "
                        f"never pickled objects"
                    )
                self._check_size(archive, name, header, stream.tell())
                stream.seek(0)
                return np.lib.format.read_array(stream, allow_pickle=False)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Read the shapes of the arrays without reading the arrays."""
        shapes = {}
        with unreadable_is_data_error(self._path), self._open() as archive:
            for name in archive.files:
                with _opened(archive, name, self.name) as stream:
                    shapes[name] = _npy_header(stream, f"{self.name}: array {name!r}").shape
        return shapes

    def _check_size(self, archive: Any, name: str, header: "_Header", header_bytes: int) -> None:
        """Check that an array is as large as its header says before allocating memory for it."""
        member = archive.zip.getinfo(f"{name}.npy")
        possible = min(member.compress_size, self._path.stat().st_size)
        if member.compress_type != zipfile.ZIP_STORED:
            possible = possible * _LARGEST_RATIO + _SLACK_BYTES
        held = member.file_size - header_bytes
        if header.num_bytes != held or held > possible or 0 in header.shape[1:]:
            raise DataError(
                f"{self.name}: array {name!r} cannot be read: its header says "
                f"{' x '.join(map(str, header.shape))} of {header.dtype}, which does not match "
                f"the size of the data"
            )

    def _open(self) -> Any:
        try:
            archive = np.load(self._path, allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{self.name}: this is not an npz archive") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{self.name}: expected an npz archive, got a single array")
        return archive

    def _column(self, name: str, array: NDArray[Any]) -> ArrowColumn:
        try:
            return pa.chunked_array([pa.array(np.ascontiguousarray(array))])
        except (pa.ArrowException, ValueError) as error:  # ValueError: invalid code points
            raise DataError(
                f"{self.name}: array {name!r} holds {array.dtype}: expected numbers or text"
            ) from error


class _Header(NamedTuple):
    """The description of an array in its first bytes."""

    shape: tuple[int, ...]
    by_columns: bool
    """Whether columns come before rows."""
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Size of the array in bytes; -1 if the header describes no possible array."""
        if self.dtype.itemsize == 0 or any(length < 0 for length in self.shape):
            return -1
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def _opened(archive: Any, name: str, source: str) -> Iterator[Any]:
    """Open the file of one array in an archive."""
    try:
        stream = archive.zip.open(f"{name}.npy")
    except KeyError as error:
        raise DataError(f"{source}: {name!r} is not an array") from error
    except RuntimeError as error:  # it needs a password, or an unsupported method
        raise DataError(f"{source}: array {name!r} is not compressed as numpy does it") from error
    with stream:
        yield stream


def _npy_header(stream: Any, where: str) -> _Header:
    """Read an array's header.

    Raises:
        DataError: it is not a header.
    """
    try:
        if np.lib.format.read_magic(stream) == (1, 0):
            return _Header(*np.lib.format.read_array_header_1_0(stream))
        return _Header(*np.lib.format.read_array_header_2_0(stream))
    except _BAD_EXPRESSION as error:
        # The header is a Python expression, in which numpy evaluates only literals.
        raise DataError(f"{where} cannot be read: its header is damaged") from error


class _NpyReader:
    """Reads one array of an npz archive sequentially, from its first row."""

    def __init__(self, archive: Any, name: str, streams: ExitStack, source: str) -> None:
        self._stream = streams.enter_context(_opened(archive, name, source))
        self.header = _npy_header(self._stream, f"{source}: array {name!r}")
        self.header_bytes = self._stream.tell()
        self.shape, by_columns, self._dtype = self.header
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

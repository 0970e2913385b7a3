"""Reads NumPy archives, whole or in parts. Pickled objects are never loaded."""

import math
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data import sources
from splitveil.common.data.sources import ArrowColumn, Part, unreadable_is_data_error
from splitveil.common.errors import DataError
from splitveil.common.text.wording import suggest

_NO_LITERAL = (ValueError, TypeError, LookupError, SyntaxError, tokenize.TokenError, RecursionError)
"""The errors of numpy for a header, a Python expression, that is no literal."""


class NpzFile:
    """A NumPy archive, whose rows are the first dimension of its arrays.

    An array is a column ``name`` if it has one dimension, or columns ``name.0``, ``name.1``, ... if
    it has two.
    """

    def __init__(self, path: Path, image_array: str | None = None) -> None:
        self.name = str(path)
        self._path = path
        self._image_array = image_array

    def column_names(self) -> list[str]:
        names: list[str] = []
        for name, shape in self._shapes().items():
            if len(shape) == 1:
                names.append(name)
            elif len(shape) == 2:
                names += [f"{name}.{j}" for j in range(shape[1])]
        return names

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        array_of = self._array_of(names)
        arrays = {array: self.read_array(array) for array in set(array_of.values())}
        self._check_lengths({name: len(array) for name, array in arrays.items()})
        return self._columns(array_of, arrays)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        array_of, image_array = self._array_of(names), self._image_array
        wanted = {*array_of.values(), *([] if image_array is None else [image_array])}
        with unreadable_is_data_error(self._path), self._open() as archive, ExitStack() as streams:
            for name in wanted - set(archive.files):
                raise self._absent(name, archive)
            arrays = {name: self._open_array(archive, name, streams) for name in wanted}
            for array in arrays.values():
                array.check_rows_are_together()
            num_rows = self._check_lengths({name: one.shape[0] for name, one in arrays.items()})
            row_bytes = max(1, sum(array.row_bytes for array in arrays.values()))
            rows_at_once = min(sources.PART_ROWS, max(1, sources.PART_BYTES // row_bytes))
            for start in range(0, num_rows, rows_at_once):
                end = min(num_rows, start + rows_at_once)
                rows = {name: array.next_rows(end - start) for name, array in arrays.items()}
                image = None if image_array is None else rows[image_array]
                yield Part(self._columns(array_of, rows), image, end / num_rows)

    def array_names(self) -> list[str]:
        return list(self._shapes())

    def read_array(self, name: str) -> NDArray[Any]:
        """Return one array as stored."""
        with unreadable_is_data_error(self._path), self._open() as archive:
            if name not in archive.files:
                raise self._absent(name, archive)
            try:
                array: NDArray[Any] = archive[name]
            except ValueError as error:
                raise DataError(
                    f"{self.name}: array {name!r} cannot be read: expected numbers or text, never "
                    f"pickled objects"
                ) from error
            return array

    def _array_of(self, names: Sequence[str]) -> dict[str, str]:
        shapes = self._shapes()
        return {name: name if name in shapes else name.rpartition(".")[0] for name in names}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        with unreadable_is_data_error(self._path), self._open() as archive, ExitStack() as streams:
            return {name: self._open_array(archive, name, streams).shape for name in archive.files}

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
            part = values if values.ndim == 1 else values[:, int(name.rpartition(".")[2])]
            try:
                columns[name] = pa.chunked_array([pa.array(np.ascontiguousarray(part))])
            except (pa.ArrowException, ValueError) as error:  # ValueError: invalid code points
                raise DataError(
                    f"{self.name}: array {array!r} holds {part.dtype}: expected numbers or text"
                ) from error
        return columns

    def _open(self) -> Any:
        try:
            archive = np.load(self._path, allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{self.name}: this is not an npz archive") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{self.name}: expected an npz archive, got a single array")
        return archive

    def _open_array(self, archive: Any, name: str, streams: ExitStack) -> "_Array":
        try:
            stream = streams.enter_context(archive.zip.open(f"{name}.npy"))
        except KeyError as error:
            raise DataError(f"{self.name}: {name!r} is not an array") from error
        except RuntimeError as error:  # it needs a password, or an unsupported method
            raise DataError(
                f"{self.name}: array {name!r} is not compressed as numpy does it"
            ) from error
        return _Array(stream, f"{self.name}: array {name!r}")

    def _absent(self, name: str, archive: Any) -> DataError:
        return DataError(f"{self.name}: there is no array {name!r}{suggest(name, archive)}")


class _Array:
    """An array of an archive, read sequentially from its first row."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream, self._where = stream, where
        try:
            if np.lib.format.read_magic(stream) == (1, 0):
                header = np.lib.format.read_array_header_1_0(stream)
            else:
                header = np.lib.format.read_array_header_2_0(stream)
        except _NO_LITERAL as error:
            raise DataError(f"{where} cannot be read: its header is damaged") from error
        self.shape, self._by_columns, self._dtype = header
        self.row_bytes = math.prod(self.shape[1:]) * self._dtype.itemsize

    def check_rows_are_together(self) -> None:
        by_columns = self._by_columns and len(self.shape) > 1
        if self._dtype.hasobject or not self.shape or by_columns or not self.row_bytes:
            raise DataError(
                f"{self._where} cannot be read row by row: expected numbers or text, never "
                f"pickled objects, stored in the order of their rows"
            )

    def next_rows(self, count: int) -> NDArray[Any]:
        data = self._stream.read(count * self.row_bytes)
        if len(data) < count * self.row_bytes:
            raise DataError(f"{self._where} ends before its last row")
        return np.frombuffer(data, self._dtype).reshape(count, *self.shape[1:])

"""Reads NumPy archives, whole or in parts. Pickled objects are never loaded."""

import math
import tokenize
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data import sources
from splitveil.common.data.sources import ArrowColumn, Part, joined, unreadable_is_data_error
from splitveil.common.errors import DataError
from splitveil.common.text.wording import suggest

_NO_LITERAL = (ValueError, TypeError, LookupError, SyntaxError, tokenize.TokenError, RecursionError)
"""The errors of numpy for a header, a Python expression, that is no literal."""

_ENDING = ".npy"

_MAX_COLUMNS = 2**17


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
                if shape[1] > _MAX_COLUMNS - len(names):
                    raise DataError(f"{self.name}: expected at most {_MAX_COLUMNS:,} columns")
                names += [f"{name}.{j}" for j in range(shape[1])]
        return names

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        return joined(NpzFile(self._path).parts(names), names)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        shapes, image_array = self._shapes(), self._image_array
        array_of = {name: name if name in shapes else name.rpartition(".")[0] for name in names}
        wanted = {*array_of.values(), *([] if image_array is None else [image_array])}
        with self._open(wanted) as arrays:
            lengths = {name: array.num_rows for name, array in arrays.items()}
            if len(set(lengths.values())) > 1:
                raise DataError(
                    f"{self.name}: the arrays have different numbers of rows: "
                    f"{dict(sorted(lengths.items()))}"
                )
            num_rows = next(iter(lengths.values()), 0)
            row_bytes = sum(array.row_bytes for array in arrays.values())
            rows_at_once = max(1, sources.PART_BYTES // max(1, row_bytes))
            for start in range(0, max(1, num_rows), rows_at_once):
                end = min(start + rows_at_once, num_rows)
                rows = {name: array.next_rows(end - start) for name, array in arrays.items()}
                image = None if image_array is None else rows[image_array]
                yield Part(self._columns(array_of, rows), image, end / max(1, num_rows))

    def array_names(self) -> list[str]:
        return list(self._shapes())

    def read_array(self, name: str) -> NDArray[Any]:
        """Return one array as stored."""
        with self._open([name]) as arrays:
            return arrays[name].next_rows(arrays[name].num_rows)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        with self._open() as arrays:
            return {name: array.shape for name, array in arrays.items()}

    @contextmanager
    def _open(self, names: Sequence[str] | set[str] | None = None) -> Iterator[dict[str, "_Array"]]:
        with (
            unreadable_is_data_error(self._path),
            zipfile.ZipFile(self._path) as archive,
            ExitStack() as streams,
        ):
            members = [name for name in archive.namelist() if name.endswith(_ENDING)]
            stored = [name.removesuffix(_ENDING) for name in members]
            arrays = {}
            for name in stored if names is None else names:
                if name not in stored:
                    raise DataError(
                        f"{self.name}: there is no array {name!r}{suggest(name, stored)}"
                    )
                where = f"{self.name}: array {name!r}"
                try:
                    stream = streams.enter_context(archive.open(name + _ENDING))
                except RuntimeError as error:  # it needs a password, or an unsupported method
                    raise DataError(f"{where} is not compressed as numpy does it") from error
                arrays[name] = _Array(stream, where)
                if names is not None:
                    arrays[name].check_rows()
            yield arrays

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
        self.shape, by_columns, self._dtype = header
        self._order: Literal["F", "C"] = "F" if by_columns else "C"
        self._held: NDArray[Any] | None = None
        self.num_rows = self.shape[0] if self.shape else 0
        self.row_bytes = math.prod(self.shape[1:]) * self._dtype.itemsize

    def check_rows(self) -> None:
        if self._dtype.hasobject or not self.shape or min(self.shape) < 0 or not self.row_bytes:
            raise DataError(
                f"{self._where} cannot be read: expected rows of numbers or text, never pickled "
                f"objects"
            )

    def next_rows(self, count: int) -> NDArray[Any]:
        if self._held is not None:
            rows, self._held = self._held[:count], self._held[count:]
            return rows
        size = self.num_rows if self._order == "F" else count  # columns are together: read all
        data = self._stream.read(size * self.row_bytes)
        if len(data) < size * self.row_bytes:
            raise DataError(f"{self._where} ends before its last row")
        rows = np.frombuffer(data, self._dtype).reshape(size, *self.shape[1:], order=self._order)
        if self._order == "F":
            self._held = rows[count:]
        return rows[:count]

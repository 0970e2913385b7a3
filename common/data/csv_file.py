"""Reads text files with one row per line, whole or in parts."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import csv as arrow_csv

from splitveil.common.data import sources
from splitveil.common.data.sources import ArrowColumn, Part, list_rows, unreadable_is_data_error
from splitveil.common.errors import DataError

CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
"""Endings from which pyarrow, too, infers how a file is compressed."""

HEADER_CHARACTERS = 8 * 1024 * 1024
"""The length at which pyarrow, too, rejects a row."""


class CsvFile:
    """A text file with one row per line."""

    def __init__(self, path: Path, separator: str, names: Sequence[str] | None) -> None:
        self.name = str(path)
        self._path = path
        self._separator = separator
        self._names = names
        self._block_bytes: int | None = None

    def in_blocks_of(self, block_bytes: int) -> "CsvFile":
        """Return the same file, whose parts are no larger than this, in bytes of its text."""
        file = CsvFile(self._path, self._separator, self._names)
        file._block_bytes = block_bytes
        return file

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        if self._names is not None:
            return list(self._names)
        with (
            unreadable_is_data_error(self._path),
            pa.input_stream(str(self._path), compression="detect") as stream,
        ):
            lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            header = next(csv.reader(self._first_lines(lines), delimiter=self._separator), [])
        if not any(header):
            raise DataError(f"{self.name}: the file is empty: expected a line of column names")
        return header

    def _first_lines(self, lines: io.TextIOWrapper) -> Iterator[str]:
        """Yield the lines of the header, which may span several lines with quoted line breaks."""
        left = HEADER_CHARACTERS
        while line := lines.readline(left):
            left -= len(line)
            if left == 0:
                raise DataError(
                    f"{self.name}: expected a line of column names, at most {HEADER_CHARACTERS:,} "
                    f"characters long"
                )
            yield line

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns as text."""
        parts = list(self.parts(names)) if names else []
        return {
            name: pa.chunked_array(
                [chunk for part in parts for chunk in part.columns[name].chunks], pa.string()
            )
            for name in names
        }

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the named columns as text, in parts."""
        num_rows = 0
        try:
            for part in self._parts(names):
                num_rows += len(part.columns[names[0]])
                yield part
        except DataError as error:
            self._report_bad_rows(names)
            if "straddling" in str(error.__cause__):
                raise DataError(
                    f"{self.name}: row {num_rows + 1} is longer than {self._block_size:,} bytes, "
                    f"or a quotation mark in it is never closed"
                ) from error
            raise

    @property
    def _block_size(self) -> int:
        return self._block_bytes or sources.PART_BYTES

    def _report_bad_rows(self, names: Sequence[str]) -> None:
        bad_rows: list[int] = []
        with suppress(DataError):
            for _ in self._parts(names, bad_rows):
                pass
        if bad_rows:
            header_lines = self._names is None
            raise DataError(
                f"{self.name}: expected {len(self.column_names())} cells in every row, got "
                f"another number in {list_rows([number - header_lines for number in bad_rows])}"
            )

    def _parts(self, names: Sequence[str], bad_rows: list[int] | None = None) -> Iterator[Part]:
        """Yield rows; a row with a wrong number of cells is added to the list, or is an error."""
        if not names:
            raise ValueError("to pyarrow, an empty list of columns means all of them")
        with unreadable_is_data_error(self._path), self._path.open("rb") as file:
            total_bytes = max(1, self._path.stat().st_size)
            options = self._options(names, bad_rows)
            text = pa.PythonFile(_Text(file, self._path), mode="r")
            with arrow_csv.open_csv(text, **options) as reader:
                for batch in reader:
                    columns = {name: pa.chunked_array([batch.column(name)]) for name in names}
                    yield Part(columns, None, min(1.0, file.tell() / total_bytes))

    def _options(self, names: Sequence[str], bad_rows: list[int] | None = None) -> dict[str, Any]:
        def skip(row: Any) -> str:
            if bad_rows is not None:
                bad_rows.append(row.number)
            return "skip"

        # A handler of bad rows requires a single thread. Threads do not know the numbers of their
        # rows, and the last of them may still hold the handler when the interpreter exits: the
        # process then aborts instead of ending with its exit code.
        one_thread = bad_rows is not None
        # Everything is read as text, so that an id keeps its leading zeros and a cell that is not a
        # number can be reported with its row.
        return {
            "read_options": arrow_csv.ReadOptions(
                use_threads=not one_thread,
                column_names=self._names,
                block_size=self._block_size,
            ),
            "parse_options": arrow_csv.ParseOptions(
                delimiter=self._separator,
                newlines_in_values=True,
                invalid_row_handler=skip if one_thread else None,
            ),
            "convert_options": arrow_csv.ConvertOptions(
                include_columns=list(names),
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=False,
            ),
        }


class _Text:
    """An open file's decompressed text; the file's own position still shows the progress."""

    closed = False

    def __init__(self, file: BinaryIO, path: Path) -> None:
        codec = CODECS.get(path.suffix)
        self._file = file if codec is None else pa.CompressedInputStream(pa.PythonFile(file), codec)
        self._left = b""

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most this many, which end in a carriage return only if alone.

        At the edge of two blocks, pyarrow drops the line feed of a quoted CR LF.
        """
        block: bytes = self._left + self._file.read(size - len(self._left))
        self._left = b"\r" if block.endswith(b"\r") and len(block) > 1 else b""
        return block.removesuffix(self._left)

    def close(self) -> None:
        """Leave the file to whoever opened it."""

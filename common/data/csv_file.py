"""Reads text files with one row per line, whole or in parts, and infers their form."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
from pyarrow import csv as arrow_csv

from splitveil.common.data import sources
from splitveil.common.data.canonical_form import is_unicode
from splitveil.common.data.columns import (
    NEARLY_ALL,
    NUMBER,
    NUMBERS_BY_DECIMAL,
    check_columns_exist,
)
from splitveil.common.data.sources import (
    ArrowColumn,
    Part,
    find_files,
    joined,
    list_rows,
    local_table_path,
    unreadable_is_data_error,
)
from splitveil.common.errors import DataError


class TextForm(NamedTuple):
    """The notation of cells in a text, beside the delimiter; see ``CsvSource``."""

    encoding: str = "utf-8"
    quote: str = '"'
    escape: str | None = None

    def rows(self, lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
        return csv.reader(
            lines,
            delimiter=delimiter,
            quotechar=self.quote or None,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            escapechar=self.escape,
        )


NO_HEADER = (
    "the first line looks like data: write a line of column names above it, or name the columns in "
    "data.source.column_names"
)

QUOTED = 'cells stand between apostrophes: set data.source.quote to them ("\'")'
ESCAPED = r"a backslash stands before marks within cells: set data.source.escape to it ('\')"
_ANY_NUMBER = re.compile("|".join([NUMBER, *NUMBERS_BY_DECIMAL.values()]))


_PLAIN = TextForm()


def form_of(beginning: str, delimiter: str) -> TextForm:
    """Return which quotation marks and which escape a text seems to have."""
    cell = rf"('(?:[^'\n]|'')*'|[^{re.escape(delimiter)}\n]*)(?:{re.escape(delimiter)}|$)"
    rows = [re.findall(cell, line) for line in beginning.splitlines()[1:]]
    columns = [[one for one in column if one] for column in zip(*rows, strict=False)]
    wrapped = [sum(len(x) > 1 and x[0] + x[-1] == "''" for x in column) for column in columns]
    if any(n > NEARLY_ALL * len(column) for n, column in zip(wrapped, columns, strict=True)):
        return TextForm(quote="'")
    # Within a cell, a quotation mark that is none of a backslash is doubled.
    inside = rf'(?<!\\)(\\\\)*\\"[^"\r\n{re.escape(delimiter)}]'
    escaped = TextForm(escape="\\")
    widths = [{*map(len, _rows(beginning, delimiter, form))} for form in (_PLAIN, escaped)]
    is_escaped = "\\" in beginning and len(widths[0]) > 1 == len(widths[1])
    return escaped if is_escaped or re.search(inside, beginning) else _PLAIN


def delimiter_of(beginning: str, form: TextForm = _PLAIN) -> str | None:
    """Return the delimiter that splits most lines into equally many cells; None for one column."""
    found = {}
    for delimiter in ",;\t|":
        widths = [len(row) for row in _rows(beginning, delimiter, form)]
        for width, count in Counter(widths).most_common(1):
            if width > 1:
                found[delimiter] = (count / len(widths), width)
    return max(found, key=lambda delimiter: found[delimiter], default=None)


def advice_on(
    beginning: str, end: str, delimiter: str, form: TextForm = _PLAIN, *, has_header: bool
) -> str:
    """Return the apparent fault in the form of a text, with the remedy; empty if there is none.

    The text is given by its first lines, all of them complete, and its last ones.
    """
    if beginning.count("\0") > len(beginning) // 4:
        order = "le" if beginning[1:2] == "\0" else "be"
        return f"the text looks like UTF-16: set data.source.encoding to utf-16-{order}"
    found = delimiter_of(beginning, form)
    if found not in {None, delimiter}:
        return f"the cells look separated by {found!r}: set data.source.delimiter"
    rows = _rows(beginning, delimiter, form)
    # One column without a name may be an index, or what a delimiter at the end makes.
    least = max(Counter(map(len, rows)).most_common(1), default=(1, 0))[0] - 1
    names = (i for i, row in enumerate(rows) if any(row[1:]) and sum(map(bool, row)) >= least)
    titles = next(names, 0)
    if has_header and titles:
        lines = "the line" if titles == 1 else f"the {titles} lines"
        return f"the column names seem to come later: delete {lines} above them"
    if has_header and looks_like_data(beginning, delimiter, form):
        return NO_HEADER
    last = [line for line in end.splitlines() if delimiter in line][::-1]
    full = (i for i, line in enumerate(last) if set(line) - {delimiter, '"', " "})
    if ghosts := next(full, len(last)):
        rows_hold = f"{ghosts} rows hold" if ghosts > 1 else "row holds"
        return f"the last {rows_hold} nothing but delimiters: delete what follows the last row"
    return ""


def looks_like_data(beginning: str, delimiter: str, form: TextForm = _PLAIN) -> bool:
    """Return whether the first line has numbers above numbers, and texts like those below it."""
    header, *others = [row for row in _rows(beginning, delimiter, form) if row] or [[]]
    below = [set(cells) - {""} for cells in zip(*others, strict=False)]
    columns = [(name, cells) for name, cells in zip(header, below, strict=False) if name and cells]
    numbers = [column for column in columns if all(map(_ANY_NUMBER.match, column[1]))]
    texts = [column for column in columns if column not in numbers]
    return (
        bool(numbers)
        and all(_ANY_NUMBER.match(name) for name, _ in numbers)
        and header != [str(number) for number in range(len(header))]  # names that pandas gives
        and any(
            name in cells or _form(name) in map(_form, cells) for name, cells in texts or numbers
        )
    )


def _form(text: str) -> str:
    """Return which characters are digits and which are letters; without digits the text itself."""
    form = re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", text))
    return form if "9" in form else text


def _rows(text: str, delimiter: str, form: TextForm = _PLAIN) -> list[list[str]]:
    return list(form.rows(text.splitlines(keepends=True), delimiter))


CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
"""File endings that name a compression, as in pyarrow."""

HEADER_CHARACTERS = 8 * 1024 * 1024
"""The length at which a row is rejected, as in pyarrow."""

_LOOKED_AT = 2**16
"""Characters at the beginning and at the end that show the form of a text."""

_MARKS = {
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
PARQUET = b"PAR1\x15"
"""The first bytes of a Parquet file; a column's name may begin with PAR1."""
_OTHER_FORMATS = {
    b"PK\x03\x04": "a spreadsheet or zip archive: save it as CSV",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet: save it as CSV",
    PARQUET: "a Parquet file: let its name end in .parquet",
    b"\x1f\x8b\x08": "compressed by gzip: let its name end in .gz",
}
_SEPARATOR = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([ -~\t])"?\r?\n')
_SEPARATOR_BYTES = 12


class CsvFile:
    """A text file with one row per line, or several that are the parts of one table."""

    def __init__(
        self,
        path: Path,
        separator: str,
        names: Sequence[str] | None,
        form: TextForm = TextForm(),  # noqa: B008 - immutable
    ) -> None:
        self.name = str(path)
        self._path = path
        self._separator = separator
        self._names = names
        self._form = form
        self._block_bytes: int | None = None

    def in_blocks_of(self, block_bytes: int) -> "CsvFile":
        """Return the same file, whose parts are no larger than this, in bytes of its text."""
        file = CsvFile(self._path, self._separator, self._names, self._form)
        file._block_bytes = block_bytes
        return file

    def column_names(self) -> list[str]:
        if self._names is not None:
            return list(self._names)
        header = self._first_row(self._files[0])
        if not any(header):
            raise DataError(f"{self.name}: the file is empty: expected a line of column names")
        return header

    def beginning(self) -> str:
        """Return complete lines from the beginning of the (first) file."""
        with self._text(self._files[0]) as text:
            start = text.lines().read(_LOOKED_AT)
        return start if len(start) < _LOOKED_AT else start[: start.rfind("\n") + 1]

    def advice(self) -> str:
        """Return the fault in the form of the text, with the remedy; empty if there is none."""
        with self._text(self._files[-1]) as text:
            lines, end, separator = text.lines(), "", text.separator
            while more := lines.read(_LOOKED_AT):
                end = (end + more)[-_LOOKED_AT:]
        has_header = self._names is None
        beginning = self.beginning()
        said = advice_on(beginning, end, separator, self._form, has_header=has_header)
        return said or next(iter(self.doubts()), "")

    def doubts(self) -> list[str]:
        """Return which marks around or within cells seem not to belong to the cells."""
        if self._form != TextForm(self._form.encoding):  # chosen
            return []
        with self._text(self._files[0]) as text:
            separator = text.separator
        found = form_of(self.beginning(), separator)
        return list(filter(None, [QUOTED * (found.quote != '"'), ESCAPED * bool(found.escape)]))

    @cached_property
    def _files(self) -> list[Path]:
        paths = [Path(found.path) for found in find_files(local_table_path(self._path))]
        return [path for path in paths if len(paths) == 1 or self._first_row(path)] or paths[:1]

    @contextmanager
    def _text(self, path: Path) -> Iterator["_Text"]:
        with unreadable_is_data_error(path), path.open("rb") as file:
            try:
                yield _Text(file, path, self._separator, self._form)
            except UnicodeError as error:
                raise DataError(
                    f"{path}: the text is not {self._form.encoding}, as data.source.encoding says"
                ) from error

    def _first_row(self, path: Path) -> list[str]:
        with self._text(path) as text:
            lines = self._first_lines(text.lines())
            row = next(filter(None, self._form.rows(lines, text.separator)), [])
        if not is_unicode("".join(row)):
            raise self._undecodable(path)
        return row

    def _first_lines(self, lines: io.TextIOWrapper) -> Iterator[str]:
        left = HEADER_CHARACTERS
        while line := lines.readline(left):
            left -= len(line)
            if left == 0:
                raise DataError(
                    f"{self.name}: expected a line of column names, at most {HEADER_CHARACTERS:,} "
                    f"characters long"
                )
            yield line

    def _undecodable(self, path: Path) -> DataError:
        where, guess = "", "cp1252"
        with suppress(csv.Error), self._text(path) as text:
            rows = filter(None, self._form.rows(text.lines(), text.separator))
            row, column, cell = next(
                (row, column, cell)
                for row, cells in enumerate(rows, start=self._names is not None)
                for column, cell in enumerate(cells, start=1)
                if not is_unicode(cell)
            )
            where = f" in {f'row {row}' if row else 'the line of column names'}, column {column}"
            guess = "cp1252" if sum(map(is_unicode, cell)) * 2 > len(cell) else "gbk"
        return DataError(
            f"{path}: the text is not UTF-8{where}: set data.source.encoding (with splitveil init, "
            f"--encoding) to the text's encoding, such as {guess}"
        )

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        return joined(self.parts(names) if names else [], names, pa.string())

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        for index, path in enumerate(self._files):
            if len(self._files) > 1 and self._names is None:
                check_columns_exist(names, self._first_row(path), str(path))
            for part in self._parts_of(path, names):
                done = (index + part.done_fraction) / len(self._files)
                yield part._replace(done_fraction=done)

    def _parts_of(self, path: Path, names: Sequence[str]) -> Iterator[Part]:
        num_rows = 0
        try:
            for part in self._rows_of(path, names):
                num_rows += len(part.columns[names[0]])
                yield part
        except DataError as error:
            if "invalid UTF8" in str(error.__cause__):
                raise self._undecodable(path) from error
            self._report_bad_rows(path, names)
            if "straddling" in str(error.__cause__):
                raise DataError(
                    f"{path}: row {num_rows + 1} is longer than {self._block_size:,} bytes, "
                    f"or a quotation mark in it is never closed"
                ) from error
            raise

    @property
    def _block_size(self) -> int:
        return self._block_bytes or sources.PART_BYTES

    def _report_bad_rows(self, path: Path, names: Sequence[str]) -> None:
        bad_rows: list[int] = []
        with suppress(DataError):
            for _ in self._rows_of(path, names, bad_rows):
                pass
        if bad_rows:
            header_lines = self._names is None
            raise DataError(
                f"{path}: expected {len(self._names or self._first_row(path))} cells in every row, "
                f"got another number in {list_rows([number - header_lines for number in bad_rows])}"
            )

    def _rows_of(
        self, path: Path, names: Sequence[str], bad_rows: list[int] | None = None
    ) -> Iterator[Part]:
        """Yield rows; a row with a wrong number of cells is added to the list, or is an error."""
        if not names:
            raise ValueError("to pyarrow, an empty list of columns means all of them")
        with self._text(path) as text:
            options = self._options(names, text.separator, bad_rows)
            with arrow_csv.open_csv(pa.PythonFile(text, mode="r"), **options) as reader:
                for batch in reader:
                    columns = {name: pa.chunked_array([batch.column(name)]) for name in names}
                    yield Part(columns, None, text.done_fraction())

    def _options(
        self, names: Sequence[str], separator: str, bad_rows: list[int] | None
    ) -> dict[str, Any]:
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
                use_threads=not one_thread, column_names=self._names, block_size=self._block_size
            ),
            "parse_options": arrow_csv.ParseOptions(
                delimiter=separator,
                quote_char=self._form.quote or False,
                escape_char=self._form.escape or False,
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
    """An open file's text, decompressed and in UTF-8, without a first line that names a separator.

    The file's own position still shows the progress.
    """

    closed = False

    def __init__(self, file: BinaryIO, path: Path, separator: str, form: TextForm) -> None:
        self.separator = separator
        """The character between two cells."""
        self._raw = file
        self._num_bytes = max(1, path.stat().st_size)
        codec = CODECS.get(path.suffix)
        with pa.input_stream(str(path), compression=codec) as start:
            mark = start.read(len(PARQUET))
        for magic, what in _OTHER_FORMATS.items():
            if mark.startswith(magic):
                raise DataError(f"{path}: this is no text but {what}")
        encoding = next(
            (name for name, marks in _MARKS.items() if mark.startswith(marks)), form.encoding
        )
        self._file: Any = file
        if codec is not None:
            self._file = pa.CompressedInputStream(pa.PythonFile(file), codec)
        if codecs.lookup(encoding).name != "utf-8":
            native = pa.PythonFile(file) if codec is None else self._file
            self._file = pa.transcoding_input_stream(native, encoding, "utf-8")
        self._left: bytes = self._file.read(_SEPARATOR_BYTES)
        if named := _SEPARATOR.match(self._left):
            self.separator = named[1].decode()
            self._left = self._left[named.end() :]
        self._half, self._backslash = b"", None
        if form.escape:
            plain = re.escape(f"{form.quote}{self.separator}").encode()
            self._backslash = re.compile(rb"\\([\\\r\n" + plain + rb"])?")
            self._left = self._escaped(self._left)

    def lines(self) -> io.TextIOWrapper:
        """Return the text's lines; bytes that are not UTF-8 become surrogates."""
        return io.TextIOWrapper(
            pa.PythonFile(self, mode="r"), "utf-8-sig", "surrogateescape", newline=""
        )

    def done_fraction(self) -> float:
        return min(1.0, self._raw.tell() / self._num_bytes)

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most this many, which end in a carriage return only if alone.

        At the edge of two blocks, pyarrow drops the line feed of a quoted CR LF.
        """
        block: bytes = self._left
        while len(block) < size:
            more: bytes = self._file.read(size - len(block))
            block += self._escaped(more) if more else 2 * self._half
            if not more:
                self._half = b""
            if not more or len(block) > 1:
                break
        end = min(size, len(block))
        if end > 1 and block[end - 1 : end] == b"\r":
            end -= 1
        self._left = block[end:]
        return block[:end]

    def _escaped(self, text: bytes) -> bytes:
        """Double each backslash that belongs to a cell, as pyarrow would drop it."""
        if self._backslash is None:
            return text
        text = self._half + text
        is_half = (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
        self._half = b"\\" * is_half
        return self._backslash.sub(
            lambda found: found[0] if found[1] else 2 * found[0], text[: len(text) - is_half]
        )

    def close(self) -> None:
        """Leave the file to whoever opened it."""

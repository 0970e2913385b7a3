"""Infers the form of a text: the separator of its cells, and the lines that are no rows."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from splitveil.common.data.columns import NEARLY_ALL, NUMBER, NUMBERS_BY_DECIMAL


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

"""Says what the form of a text file reveals: what separates its cells, and what is no row of it."""

import csv
import re
from collections import Counter

from splitveil.common.data.columns import COMMA_NUMBER, NUMBER

NO_HEADER = (
    "the first line looks like data: write a line of column names above it, or name the columns in "
    "data.source.column_names"
)

_NUMBER = re.compile(rf"{NUMBER}|{COMMA_NUMBER}")


def delimiter_of(beginning: str) -> str | None:
    """Return the character by which most lines have as many cells; None for a single column."""
    found = {}
    for delimiter in ",;\t|":
        widths = [len(row) for row in _rows(beginning, delimiter)]
        for width, count in Counter(widths).most_common(1):
            if width > 1:
                found[delimiter] = (count / len(widths), width)
    return max(found, key=lambda one: found[one], default=None)


def advice_on(beginning: str, end: str, delimiter: str, *, has_header: bool) -> str:
    """Return what is wrong with the form of a text, with the remedy; empty if nothing seems to be.

    The text is given by its first lines, all of them complete, and its last ones.
    """
    if beginning.count("\0") > len(beginning) // 4:
        order = "le" if beginning[1:2] == "\0" else "be"
        return f"the text looks like UTF-16: set data.source.encoding to utf-16-{order}"
    found = delimiter_of(beginning)
    if found not in {None, delimiter}:
        return f"the cells look separated by {found!r}: set data.source.delimiter"
    rows = _rows(beginning, delimiter)
    titles = next((i for i, row in enumerate(rows) if any(row[1:])), 0)
    if has_header and titles:
        lines = "the line" if titles == 1 else f"the {titles} lines"
        return f"the column names seem to come later: delete {lines} above them"
    if has_header and looks_like_data(beginning, delimiter):
        return NO_HEADER
    last = [line for line in end.splitlines() if delimiter in line][::-1]
    full = (i for i, line in enumerate(last) if set(line) - {delimiter, '"', " "})
    if ghosts := next(full, len(last)):
        rows_hold = f"{ghosts} rows hold" if ghosts > 1 else "row holds"
        return f"the last {rows_hold} nothing but delimiters: delete what follows the last row"
    return ""


def looks_like_data(beginning: str, delimiter: str) -> bool:
    """Say whether the first line has numbers above numbers, and texts as they stand below it."""
    header, *others = [row for row in _rows(beginning, delimiter) if row] or [[]]
    below = [set(cells) - {""} for cells in zip(*others, strict=False)]
    columns = [(name, cells) for name, cells in zip(header, below, strict=False) if name and cells]
    numbers = [column for column in columns if all(map(_NUMBER.match, column[1]))]
    texts = [column for column in columns if column not in numbers]
    return (
        bool(numbers)
        and all(_NUMBER.match(name) for name, _ in numbers)
        and header != [str(number) for number in range(len(header))]  # names that pandas gives
        and any(
            name in cells or _form(name) in map(_form, cells) for name, cells in texts or numbers
        )
    )


def _form(text: str) -> str:
    """Return which characters are digits and which are letters; without digits the text itself."""
    form = re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", text))
    return form if "9" in form else text


def _rows(text: str, delimiter: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines(keepends=True), delimiter=delimiter))

"""A table that stays readable on a narrow terminal: no name is cut or abbreviated.

rich's own tables end a name that is too long for its column with an ellipsis, or fold it at any
character. Here cells wrap between words, names at their separators, and columns for which there is
no room at all follow in a further table below, with the first columns repeated.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from splitveil.common.text.visible_text import visible
from splitveil.common.text.wrapping import longest_part, longest_word, wrapped

_BESIDE_CELL = 3
"""Cells of a terminal that a column takes beside its text: two spaces and a line."""


class FittedTable:
    """A table that rich prints, as wide as its text, or as the terminal.

    Args:
        title: stands above it, on the left.
        caption: stands below it.
        lead: number of columns that name a row; each part of a table that is divided has them.
        show_header: whether the headings are shown.
    """

    def __init__(
        self, title: str, *, caption: str = "", lead: int = 1, show_header: bool = True
    ) -> None:
        self._title, self._caption = title, caption
        self._lead = lead
        self._show_header = show_header
        self._headings: list[str] = []
        self._justified: list[Literal["left", "right"]] = []
        self._rows: list[list[str]] = []
        self._section_ends: set[int] = set()

    def add_column(self, heading: str, justify: Literal["left", "right"] = "left") -> None:
        """Add a column; all of them come before the first row."""
        self._headings.append(visible(heading))
        self._justified.append(justify)

    def add_row(self, *cells: object) -> None:
        """Add a row with one value for each column, from the first; others stay empty."""
        shown = [visible(str(one)) for one in cells]
        self._rows.append(shown + [""] * (len(self._headings) - len(shown)))

    def add_section(self) -> None:
        """Draw a line beneath the rows so far."""
        self._section_ends.add(len(self._rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its parts, for a terminal's width."""
        parts = self._divided(options.max_width)
        for number, columns in enumerate(parts):
            is_last = number == len(parts) - 1
            yield self._part(columns, options.max_width, "" if not is_last else self._caption)

    def _divided(self, width: int) -> list[list[int]]:
        """Return the columns of each part: as few parts as names without a cut allow."""
        lead = list(range(self._lead))
        others = list(range(self._lead, len(self._headings)))
        parts = [[*lead, *others[:1]]]
        for column in others[1:]:
            together = [*parts[-1], column]
            if sum(self._sizes(together, longest_part)) <= _room(together, width):
                parts[-1] = together
            else:
                parts.append([*lead, column])
        return parts

    def _part(self, columns: Sequence[int], width: int, caption: str) -> Table:
        widths = self._widths(columns, width)
        whole = sum(widths) + len(columns) * _BESIDE_CELL + 1
        table = Table(
            title=Text("\n".join(wrapped(visible(self._title), whole))),
            title_justify="left",
            caption=Text("\n".join(wrapped(visible(caption), whole))) if caption else None,
            caption_justify="left",
            show_header=self._show_header,
        )
        for column, own in zip(columns, widths, strict=True):
            heading = _fitting(self._headings[column], own)
            table.add_column(heading, justify=self._justified[column], width=own, no_wrap=True)
        for number, row in enumerate(self._rows, start=1):
            cells = (
                _fitting(row[column], own) for column, own in zip(columns, widths, strict=True)
            )
            table.add_row(*cells, end_section=number in self._section_ends)
        return table

    def _widths(self, columns: Sequence[int], width: int) -> list[int]:
        """Return the widths of columns: whole lines if they fit, else whole words, else parts."""
        room = _room(columns, width)
        least = [1] * len(columns)
        for measure in (longest_part, longest_word, _longest_line):
            wanted = self._sizes(columns, measure)
            if sum(wanted) > room:
                return _shared(least, wanted, room)
            least = wanted
        return least

    def _sizes(self, columns: Sequence[int], measure: Callable[[str], int]) -> list[int]:
        headings = self._headings if self._show_header else [""] * len(self._headings)
        cells = ([headings[column], *(row[column] for row in self._rows)] for column in columns)
        return [max(1, *map(measure, own)) for own in cells]


def _room(columns: Sequence[int], width: int) -> int:
    """Return how many cells of a terminal are left for the text of columns."""
    return width - len(columns) * _BESIDE_CELL - 1


def _shared(least: Sequence[int], wanted: Sequence[int], room: int) -> list[int]:
    """Return widths between two bounds: no column is cut so that a wider one is less so."""
    widths = list(least)
    while sum(widths) < room:
        growing = [n for n, width in enumerate(widths) if width < wanted[n]]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def _longest_line(text: str) -> int:
    return Text(text).cell_len


def _fitting(text: str, width: int) -> Text:
    return Text("\n".join(wrapped(text, width)))

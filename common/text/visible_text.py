"""Makes untrusted text safe for a terminal: escapes control characters and disables markup.

A file, a peer or a certificate may contain an escape sequence that clears the screen, a line break
that starts a new line in the log, a mark that changes the reading direction, or a surrogate that no
stream can encode.
"""

from collections.abc import Sequence
from typing import Literal

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def visible(text: str) -> str:
    """Return a text with every nonprintable character as an ASCII escape sequence."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def visible_lines(text: str) -> str:
    """Escape the nonprintable characters of a message, except its line breaks."""
    return "\n".join(map(visible, text.split("\n")))


def cell(value: object, *below: object) -> Text:
    """Return values, one below another, for a rich table, which would take ``[...]`` for markup."""
    return Text("\n".join(visible(str(one)) for one in (value, *below)))


class PlainTable:
    """A rich table of values that are shown as they are, whose first columns name its rows."""

    def __init__(
        self,
        title: str,
        names: Sequence[str] = (),
        numbers: Sequence[str] = (),
        *,
        caption: str = "",
        lead: int | None = None,
        show_header: bool = True,
        framed: bool = True,
    ) -> None:
        self._lead = lead or len(names) or 1
        self._table = Table(
            title=cell(title) if title else None,
            title_justify="left",
            caption=cell(caption) if caption else None,
            caption_justify="left",
            show_header=show_header,
            box=HEAVY_HEAD if framed else SIMPLE_HEAD,
            show_edge=framed,
            pad_edge=framed,
        )
        for heading in names:
            self.add_column(heading)
        for heading in numbers:
            self.add_column(heading, justify="right")

    def add_column(self, heading: str, justify: Literal["left", "right"] = "left") -> None:
        # Where there is little room, the figures beside the names are wrapped.
        is_name = len(self._table.columns) < self._lead
        self._table.add_column(cell(heading), justify, no_wrap=is_name, overflow="fold")

    def add_row(self, *values: object) -> None:
        """Add a row with one value for each column, from the first; others stay empty."""
        self._table.add_row(*(one if isinstance(one, Text) else cell(one) for one in values))

    def add_section(self) -> None:
        self._table.add_section()

    def __rich__(self) -> Table:
        return self._table

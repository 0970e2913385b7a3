"""Tables for notebooks: data frames of pandas where it is installed, else tables of pyarrow."""

import html
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
from rich.console import Console

from splitveil.common.text.visible_text import PlainTable, visible_lines

if TYPE_CHECKING:
    try:  # as where the types are checked
        from pandas import DataFrame
    except ImportError:
        from pyarrow import Table as DataFrame

Frame: TypeAlias = "DataFrame"

Row = Mapping[str, object]
_COLUMNS = 120


class Tabular(ABC):
    """A result that a terminal and a notebook show as the same table, between title and note."""

    @abstractmethod
    def _table(self) -> tuple[str, Sequence[Row], str]:
        """Return the title, the rows, which all have the same columns, and the note."""

    def __repr__(self) -> str:
        title, rows, note = self._table()
        table = PlainTable(title, list(rows[0]) if rows else (), lead=1, caption=note, framed=False)
        for row in rows:
            table.add_row(*map(_shown, row.values()))
        return printed(lambda console: console.print(table)) if rows else f"{title}: {note}"

    def _repr_html_(self) -> str:
        return as_html(*self._table())

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]


def printed(show_on: Callable[[Console], object]) -> str:
    """Return what is printed on a console, as text without colours."""
    file = io.StringIO()
    # In a notebook, rich would display what it is asked to print into a file.
    show_on(Console(file=file, width=_COLUMNS, highlight=False, force_jupyter=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def frame(rows: Iterable[Row]) -> Frame:
    """Return rows (column -> value) as a ``pandas.DataFrame``; without pandas, a ``pyarrow.Table``.

    Columns are in order of first appearance; a row without a column has a missing value there.
    """
    listed = list(rows)
    names = dict.fromkeys(name for row in listed for name in row)
    columns = {name: pa.array([row.get(name) for row in listed]) for name in names}
    table = pa.table(
        {n: c.cast("double") if c.type == pa.null() else c for n, c in columns.items()}
    )
    try:
        import_module("pandas")
    except ImportError:
        return table
    return table.to_pandas()


def as_html(title: str, rows: Sequence[Row], note: str = "") -> str:
    """Return a small table as HTML, between a title and a note; everything in it is escaped."""
    heads = "".join(f"<th>{html.escape(str(name))}</th>" for name in (rows[0] if rows else ()))
    cells = ([f"<td>{html.escape(_shown(value))}</td>" for value in row.values()] for row in rows)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    below = f"<p>{html.escape(note)}</p>" if note else ""
    return visible_lines(
        f"<p><b>{html.escape(title)}</b></p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def _shown(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

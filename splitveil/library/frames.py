"""Tables for notebooks: data frames of pandas where it is installed, else tables of pyarrow."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from splitveil.common.text.visible_text import visible_lines

if TYPE_CHECKING:
    try:  # as where the types are checked
        from pandas import DataFrame
    except ImportError:
        from pyarrow import Table as DataFrame

Frame: TypeAlias = "DataFrame"

Row = Mapping[str, object]


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
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_shown(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    )
    below = f"<p>{html.escape(note)}</p>" if note else ""
    return visible_lines(
        f"<p><b>{html.escape(title)}</b></p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def _shown(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

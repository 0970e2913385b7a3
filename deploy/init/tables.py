"""Reads a party's own file for ``splitveil init``, or the beginning of a very large one."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import TypeAdapter

from splitveil.common.data.kinds import open_source
from splitveil.common.data.source_settings import Source, not_expanded
from splitveil.common.data.sources import unreadable_is_data_error
from splitveil.common.errors import DataError, SettingsError

MOST_ROWS = 1_000_000
"""Rows that are looked at; in a larger table, those at its beginning stand for the others."""

DELIMITERS = (",", ";", "\t", "|")
_TEXT = {".csv", ".tsv", ".txt"}
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4", ".br"}


class RawTable(NamedTuple):
    """A table's columns as written."""

    path: Path
    source: Mapping[str, Any]
    """The source as it stands in the settings, without its path."""
    columns: Mapping[str, Any]
    """Column name -> pyarrow ChunkedArray."""
    num_rows: int
    """Rows of the whole file, estimated if only its beginning was read."""
    is_whole: bool
    """Whether all rows were read."""
    index_columns: Sequence[str] = ()
    """Those that held the rows' labels in pandas."""


def read_raw(path: Path, delimiter: str | None = None, most_rows: int = MOST_ROWS) -> RawTable:
    """Read a CSV, TSV or Parquet file, or a folder of Parquet files.

    Args:
        path: the file.
        delimiter: character between two cells of a text file; by default it is found out.
        most_rows: further rows are not read.

    Raises:
        DataError: the file cannot be read, or has no rows.
        SettingsError: its ending is of none of these kinds.
    """
    source = _source_of(path, delimiter)
    where = not_expanded(str(path.absolute()))
    settings = TypeAdapter(Source).validate_python({**source, "path": where})
    table = open_source(settings, Path())
    names = table.column_names()
    repeated = sorted(name for name, count in Counter(names).items() if count > 1 or not name)
    if repeated:
        shown = ", ".join(map(repr, repeated))
        raise DataError(f"{path}: expected a name of its own for every column, got {shown} again")
    parts, rows, done = [], 0, 1.0
    for part in table.parts(names):
        parts.append(pa.table(dict(part.columns)))
        rows, done = rows + len(parts[-1]), part.done_fraction
        if rows >= most_rows:
            break
    if not rows:
        raise DataError(f"{path}: there are no rows")
    whole = pa.concat_tables(parts)
    is_whole = rows < most_rows or done >= 1.0
    estimate = rows if is_whole else round(rows / max(done, 1e-6))
    columns, index = {name: whole[name] for name in names}, getattr(table, "index_columns", ())
    return RawTable(path, source, columns, estimate, is_whole, index)


def _source_of(path: Path, delimiter: str | None) -> dict[str, Any]:
    endings = [ending for ending in path.suffixes if ending not in _COMPRESSED]
    last = endings[-1].lower() if endings else ""
    if path.is_dir() or last in {".parquet", ".pq"}:
        return {"kind": "parquet"}
    if last not in _TEXT:
        raise SettingsError(
            f"{path}: expected a file whose name ends in .csv, .tsv, .txt (also compressed) or "
            f".parquet, or a folder of Parquet files; write other sources into the settings by "
            f"hand (docs/settings.md)"
        )
    found = delimiter or _delimiter_of(path)
    by_default = "\t" if last == ".tsv" else ","
    return {"kind": "csv"} | ({} if found == by_default else {"delimiter": found})


def _delimiter_of(path: Path) -> str:
    """Return the character that separates most cells of the header, outside of quotes."""
    with (
        unreadable_is_data_error(path),
        pa.input_stream(str(path), compression="detect") as stream,
    ):
        beginning = stream.read(2**16).decode("utf-8-sig", errors="replace")
    header = beginning.splitlines()[:1]
    if not header or not header[0].strip():
        raise DataError(f"{path}: the file is empty: expected a line of column names")
    widths = {one: len(next(csv.reader(header, delimiter=one))) for one in DELIMITERS}
    return max(widths, key=lambda one: widths[one])

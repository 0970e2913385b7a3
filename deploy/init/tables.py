"""Reads a party's own file for ``splitveil init``, or the beginning of a very large one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from splitveil.common.data.columns import (
    COMMA_NUMBER,
    NUMBER,
    WrittenColumn,
    clean_text,
    with_points,
)
from splitveil.common.data.csv_file import CODECS, NO_HEADER, delimiter_of, looks_like_data
from splitveil.common.data.kinds import open_source, text_file, with_advice
from splitveil.common.data.source_settings import CsvSource, Source, not_expanded
from splitveil.common.data.table_paths import find_files, local_table_path
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.settings import validate
from splitveil.deploy.init.columns import GAPS, as_text

MOST_ROWS = 1_000_000
"""Rows that are looked at; in a larger table, those at its beginning stand for the others."""

_TEXT = {".csv", ".tsv", ".txt"}
_INDEX = "Unnamed: 0"
_SURE_NUMBER = r"^[+-]?\d[\d.]*(\.\d+,|,\d{1,2}$|,\d{4,}$)"
"""A number whose comma is no thousands mark."""
_NO_NAME = "has no name, like the row numbers that DataFrame.to_csv writes: name it to use it"


class RawTable(NamedTuple):
    """A table's columns as written."""

    path: Path
    source: Mapping[str, Any]
    """The source as it stands in the settings, without its path."""
    settings: Source
    """The same with its path."""
    columns: Mapping[str, Any]
    """Column name -> pyarrow ChunkedArray."""
    num_rows: int
    """Rows of the whole file, estimated if only its beginning was read."""
    is_whole: bool
    left_out: Mapping[str, str]
    """The reasons not to use a column that is not among ``columns``."""
    index_columns: Sequence[str]
    """Those that held the rows' labels in pandas."""


def read_raw(
    path: Path,
    delimiter: str | None = None,
    encoding: str | None = None,
    *,
    has_header: bool = False,
    most_rows: int = MOST_ROWS,
) -> RawTable:
    """Read a CSV, TSV or Parquet file, or a folder of them; rows beyond ``most_rows`` are not read.

    The delimiter and the encoding of a text are found out by default. With ``has_header``, its
    first line surely holds the column names.
    """
    where = not_expanded(str(path.absolute()))
    source: dict[str, Any] = {"kind": _kind_of(path)}
    if source["kind"] == "csv":
        source |= {"encoding": encoding} if encoding else {}
        text = validate(CsvSource, {**source, "path": where}, "--encoding")
        beginning = text_file(text, Path()).beginning()
        found = delimiter or delimiter_of(beginning) or text.separator()
        source |= {} if found == text.separator() else {"delimiter": found}
        if not has_header and looks_like_data(beginning, found):
            raise DataError(f"{path}: {NO_HEADER}; if it does name them, name one: --id-column")
    settings: Source = TypeAdapter(Source).validate_python({**source, "path": where})
    with with_advice(settings, Path()):
        return _read(path, source, settings, most_rows)


def _read(path: Path, source: dict[str, Any], settings: Source, most_rows: int) -> RawTable:
    table = open_source(settings, Path())
    names = [name for name in table.column_names() if name]
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
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
    columns = {name: whole[name] for name in names}
    left_out = {
        f"column {n}": _NO_NAME for n, name in enumerate(table.column_names(), 1) if not name
    }
    if names[:1] == [_INDEX] and set(columns[_INDEX].to_pylist()) == set(map(str, range(rows))):
        del columns[_INDEX]
        left_out[_INDEX] = "the numbers of the rows, which DataFrame.to_csv writes"
    may_have_commas = isinstance(settings, CsvSource) and settings.separator() != ","
    if may_have_commas and (found := _with_points(columns)):
        source["decimal"] = ","
        columns |= found
    index = getattr(table, "index_columns", ())
    return RawTable(path, source, settings, columns, estimate, is_whole, left_out, index)


def _with_points(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of numbers with decimal commas, with decimal points instead.

    There are none if others have decimal points, or if all commas may be thousands marks.
    """
    found, is_sure = {}, False
    for name, cells in columns.items():
        text = clean_text(WrittenColumn(cells, name, GAPS)).drop_null()
        with_comma, sure, whole, others = (
            pc.sum(pc.match_substring_regex(text, form)).as_py() or 0
            for form in (COMMA_NUMBER, _SURE_NUMBER, r"^[+-]?\d+$", NUMBER)
        )
        if with_comma and with_comma + whole == len(text):
            found[name], is_sure = with_points(as_text(cells)), is_sure or sure > 0
        elif whole < others == len(text):
            return {}
    return found if is_sure else {}


def _kind_of(path: Path) -> str:
    first = Path(find_files(local_table_path(path))[0].path)
    endings = [ending.lower() for ending in first.suffixes if ending not in CODECS]
    if endings and endings[-1] in _TEXT:
        return "csv"
    if path.is_dir() or (endings and endings[-1] in {".parquet", ".pq"}):
        return "parquet"
    raise SettingsError(
        f"{path}: expected a file whose name ends in .csv, .tsv, .txt (also compressed) or "
        f".parquet, or a folder of such files; write other sources into the settings by hand "
        f"(docs/settings.md)"
    )

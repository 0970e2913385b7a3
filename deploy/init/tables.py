"""Reads a party's own file for ``splitveil init``, or the beginning of a very large one."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from splitveil.common.data.columns import NUMBER, NUMBERS_BY_DECIMAL, with_points
from splitveil.common.data.csv_file import (
    CODECS,
    NO_HEADER,
    PARQUET,
    delimiter_of,
    form_of,
    looks_like_data,
)
from splitveil.common.data.kinds import open_source, text_file, with_advice
from splitveil.common.data.source_settings import CsvSource, Source, not_expanded
from splitveil.common.data.sources import find_files, local_table_path, unreadable_is_data_error
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.settings import validate
from splitveil.deploy.init.columns import GAPS, NO_NAME, as_text, plain_numbers, without_gaps

MOST_ROWS = 1_000_000  # that are looked at; in a larger table, they stand for the others

_TEXT = {".csv", ".tsv", ".txt"}


class RawTable(NamedTuple):
    """A table's columns as written."""

    path: Path
    source: Mapping[str, Any]  # the source as it stands in the settings, without its path
    settings: Source  # the same with its path
    columns: Mapping[str, Any]  # column name -> pyarrow ChunkedArray
    num_rows: int  # rows of the whole file, estimated if only its beginning was read
    is_whole: bool
    left_out: Mapping[str, str]  # the reasons not to use a column that is not among ``columns``
    index_columns: Sequence[str]  # those that held the rows' labels in pandas
    written: Mapping[str, Any]  # the columns among ``columns`` that are without units there
    units: Mapping[str, Sequence[str]]  # the texts beside their numbers


def read_raw(
    path: Path,
    delimiter: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    *,
    has_header: bool = False,
    most_rows: int = MOST_ROWS,
    numeric: Collection[str] = (),
    as_written: Collection[str] = (),
) -> RawTable:
    """Read a CSV, TSV or Parquet file, or a folder of them; rows beyond ``most_rows`` are not read.

    The delimiter, the encoding and the decimal mark of a text are found out by default. With
    ``has_header``, its first line surely holds the column names. The user says that ``numeric``
    columns are numbers, and that columns ``as_written`` are not.
    """
    where = not_expanded(str(path.absolute()))
    source: dict[str, Any] = {"kind": _kind_of(path)}
    if source["kind"] == "csv":
        source |= {"encoding": encoding} if encoding else {}
        source |= {"decimal": decimal} if decimal else {}
        text = validate(CsvSource, {**source, "path": where}, "--encoding")
        beginning = text_file(text, Path()).beginning()
        guess = delimiter or delimiter_of(beginning) or text.separator()
        form = form_of(beginning, guess)
        found = delimiter or delimiter_of(beginning, form) or text.separator()
        source |= {} if found == text.separator() else {"delimiter": found}
        source |= {"quote": form.quote} if form.quote != '"' else {}
        source |= {"escape": form.escape} if form.escape else {}
        if not has_header and looks_like_data(beginning, found, form):
            raise DataError(f"{path}: {NO_HEADER}; if it does name them, name one: --id-column")
    settings: Source = TypeAdapter(Source).validate_python({**source, "path": where})
    with with_advice(settings, Path()):
        raw = _read(path, source, settings, most_rows)
    plain, units = plain_numbers(raw.columns, numeric, as_written)
    written = {name: raw.columns[name] for name in plain}
    raw = raw._replace(columns={**raw.columns, **plain}, written=written, units=units)
    if not isinstance(settings, CsvSource):
        return raw
    texts = {
        name: without_gaps(cells, GAPS)
        for name, cells in raw.columns.items()
        if name not in as_written
    }
    forms = {
        name: {mark for mark, form in NUMBERS_BY_DECIMAL.items() if _are_all(text, form)}
        for name, text in texts.items()
    }
    decimal = settings.decimal or _decimal_of(texts, forms)
    if not decimal:
        return raw
    source["decimal"] = decimal
    plain = {
        name: with_points(as_text(raw.columns[name]), decimal)
        for name, form in forms.items()
        if decimal in form
    }
    return raw._replace(columns={**raw.columns, **plain})


def _read(path: Path, source: dict[str, Any], settings: Source, most_rows: int) -> RawTable:
    table = open_source(settings, Path())
    found = Counter(table.column_names())
    repeated = [name for name, count in found.items() if name and count > 1]
    names = [name for name, count in found.items() if name and count == 1]
    if not names:
        raise DataError(f"{path}: expected a name of its own for every column")
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
        f"column {n}": NO_NAME for n, name in enumerate(table.column_names(), 1) if not name
    }
    left_out |= {name: f"{found[name]} columns have this name: rename them" for name in repeated}
    for name in set(getattr(table, "category_columns", ())) & set(columns):
        if pa.types.is_integer(columns[name].type):
            columns[name] = columns[name].dictionary_encode()
    index = getattr(table, "index_columns", ())
    return RawTable(path, source, settings, columns, estimate, is_whole, left_out, index, {}, {})


def _decimal_of(texts: Mapping[str, Any], forms: Mapping[str, set[str]]) -> str | None:
    """Return the decimal mark of all columns of numbers; None if a point will do, or unknown."""
    plain = {name for name, text in texts.items() if _are_all(text, NUMBER)}
    others = [texts[name] for name, marks in forms.items() if marks and name not in plain]
    possible = set(NUMBERS_BY_DECIMAL).intersection(
        *(marks for name, marks in forms.items() if marks or name in plain)
    )
    if not any(pc.any(pc.match_substring(text, ",")).as_py() for text in others):
        possible.discard(",")
    return possible.pop() if others and len(possible) == 1 else None


def _are_all(text: Any, form: str) -> bool:
    return pc.all(pc.match_substring_regex(text, form)).as_py() is not False


def _kind_of(path: Path) -> str:
    first = Path(find_files(local_table_path(path))[0].path)
    endings = [ending.lower() for ending in first.suffixes if ending not in CODECS]
    if endings and endings[-1] in _TEXT:
        return "csv"
    with unreadable_is_data_error(first), first.open("rb") as file:
        is_parquet = file.read(len(PARQUET)) == PARQUET
    if is_parquet or (endings and endings[-1] in {".parquet", ".pq"}):
        return "parquet"
    if not endings or path.is_dir():
        return "csv"
    raise SettingsError(
        f"{path}: expected a file whose name ends in .csv, .tsv, .txt (also compressed) or "
        f".parquet, or a folder of such files: save a spreadsheet as CSV, and write other sources "
        f"into the settings by hand (docs/settings.md)"
    )

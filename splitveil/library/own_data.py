"""Tables in memory as the data of simulated parties: arrays, data frames, tables of pyarrow.

Each table is written as a Parquet file beside settings made for it, so that a simulation reads it
as two processes would. Numbers become numeric features, dates and times timestamps, and lists of
whole numbers sequences; texts are judged by ``init``.
"""

import hashlib
import logging
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pyarrow import parquet

from splitveil.common.data.columns import is_numeric, is_text, is_unnamed_index
from splitveil.common.data.sequences import is_list
from splitveil.common.data.sources import list_rows
from splitveil.common.errors import SettingsError
from splitveil.common.record.run_folder import write_text_atomically
from splitveil.deploy.init.choices import Choices, Wishes, choose_features, judged
from splitveil.deploy.init.columns import Column, Kind, as_text, describe, plain_numbers
from splitveil.deploy.init.labels import is_of_numbers, label_of

_logger = logging.getLogger(__name__)

CONTRACT: Mapping[str, Any] = {
    "run_name": "simulated",
    "cut_shape": [16],
    "batch_size": 32,
    "epochs": 10,
    "split": {"kind": "hash", "train": 0.8, "test": 0.2},
}
ADAM = {"kind": "adam", "learning_rate": 0.001}
TOP = {"kind": "mlp", "hidden": [16]}
BOTTOM = {"kind": "mlp", "hidden": [32], "output_activation": "relu"}


def write_settings(
    folder: Path,
    active: Any,
    passive: Any,
    *,
    label: str,
    key: str | None = "",
    label_range: tuple[float, float] | None = None,
    positive_label: str | float | Sequence[str | float] | None = None,
) -> None:
    """Write the parties' tables and settings files for them into a folder for its owner alone.

    The arguments are those of ``simulate``; without ``passive``, only the active party
    has settings.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owners: dict[str, Any] = {"passive": passive}
    if passive is None or _is_by_party(passive):
        owners = dict(passive or {})
    contract = dict(CONTRACT)
    if owners and list(owners) != ["passive"]:
        contract["passive_parties"] = list(owners)
    _write(folder / "contract.yaml", contract)
    table = as_table(active, "active")
    tables = {name: as_table(given, name) for name, given in owners.items()}
    ids = id_columns({"active": table} | tables, key)
    if label not in table.column_names:
        raise SettingsError(f"active: expected a column {label!r}, got {_listed(table)}")
    data = _data(folder, "active", table, [label], ids["active"])
    source = data["source"]
    read: dict[str, Any] = {"label_column": label}
    if label_range is not None:
        low, high = label_range
        read["label_range"] = {"low": float(low), "high": float(high)}
    elif positive_label is not None:
        is_one = isinstance(positive_label, str | Real | np.generic)
        texts: Any = [positive_label] if is_one else positive_label
        read["positive_label"] = [*map(str, texts)]
    else:
        read |= _classes(label, table.column(label))
    data |= read
    _write(
        folder / "active.yaml", _settings(data) | {"top_model": TOP, "defense": {"name": "none"}}
    )
    for name, theirs in tables.items():
        data = _data(folder, name, theirs, [], ids[name])
        settings = _settings(data) | {"bottom_model": BOTTOM, "party": name}
        labels = {
            "source": source,
            **read,
            **({} if ids["active"] is None else {"id_column": ids["active"]}),
        }
        if label_range is None:  # the adversary's attacks compare classes
            settings["adversary"] = {"layers": ["cut"], "labels": labels}
        file = "passive.yaml" if len(owners) == 1 else f"passive_{name}.yaml"
        _write(folder / file, settings)


def as_table(given: Any, name: str) -> pa.Table:
    """Return a table of any kind as one of pyarrow; the index of a data frame becomes columns."""
    of_pandas: Any = getattr(sys.modules.get("pandas"), "DataFrame", ())
    try:
        if isinstance(given, Mapping):
            return pa.table({str(one): _cells(name, one, cells) for one, cells in given.items()})
        if isinstance(given, of_pandas):
            if given.columns.inferred_type != "string":
                given = given.rename(columns=str)
            return pa.Table.from_pandas(given, preserve_index=True)
        is_column = hasattr(given, "dtype")
        if hasattr(given, "__arrow_c_stream__") and not is_column:  # of polars, DuckDB and others
            table = pa.table(given)
            if "Object" in map(str, getattr(given, "dtypes", ())):
                raise TypeError("a column holds objects")  # polars hands their addresses over
            if twice := [one for one, n in Counter(table.column_names).items() if n > 1]:
                raise ValueError(f"several columns are named {', '.join(map(repr, twice))}")
            plain = pa.table({one: _without_views(table[one]) for one in table.column_names})
            return plain.replace_schema_metadata(table.schema.metadata)  # pandas' index
        rows = np.asarray(given)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        # The last argument is pyarrow's name of the column; the first may quote a cell.
        why = next(filter(None, map(_in_other_kinds, _objects(given))), error.args[-1])
        raise SettingsError(f"{name}: cannot be read as a table: {why}") from error
    if rows.ndim != 2 or rows.dtype.kind not in "biuf":
        raise SettingsError(
            f"{name}: expected a data frame, a pyarrow table, a mapping of columns or an array "
            f"(rows, columns) of numbers, got {type(given).__name__}"
        )
    return pa.table({f"x{column}": rows[:, column] for column in range(rows.shape[1])})


def _cells(table: str, column: object, values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        if str(getattr(values, "dtype", "")) == "category":  # an array would hold only its texts
            return pa.array(values)
        # An array would make texts of numbers beside texts.
        is_plain = isinstance(values, list) and not isinstance((values or [0])[0], np.generic)
        return pa.array(values if is_plain else np.asarray(values))
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
        no_table = f"column {column!r}: expected cells of one kind, and not nested"
        raise SettingsError(f"{table}: {_in_other_kinds((column, values)) or no_table}") from error


def _objects(given: Any) -> Iterator[tuple[object, Any]]:
    """Yield the columns of Python objects of a data frame of pandas or polars."""
    for name in given.columns if hasattr(given, "dtypes") else ():
        if str(getattr(given[name], "dtype", "")).lower() == "object":
            yield name, given[name]


def _in_other_kinds(column: tuple[object, Any]) -> str:
    """Name a column's rows whose cells are of another kind than most; empty if there are none."""
    names = {str: "texts", **dict.fromkeys((int, float, bool), "numbers")}
    cells = [one.item() if isinstance(one, np.generic) else one for one in column[1]]
    kinds = np.array([names.get(type(one), type(one).__name__) for one in cells])
    kinds[[one is None or (isinstance(one, float) and math.isnan(one)) for one in cells]] = ""
    usual = Counter(kinds[kinds != ""].tolist()).most_common(1)[0][0]
    is_other = (kinds != usual) & (kinds != "")
    if not is_other.any():
        return ""
    where = list_rows(np.flatnonzero(is_other) + 1)
    return f"column {column[0]!r}: expected cells of one kind: {usual} in most rows, not in {where}"


def _without_views(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts as Parquet can hold them: categories of polars are views, which it cannot."""
    if pa.types.is_dictionary(cells.type) and cells.type.value_type == pa.string_view():
        parts = [
            pa.DictionaryArray.from_arrays(
                one.indices.cast(pa.int32()), one.dictionary.cast(pa.string())
            )
            for one in cells.chunks
        ]
        return pa.chunked_array(parts, pa.dictionary(pa.int32(), pa.string()))
    return cells.cast(pa.string()) if cells.type == pa.string_view() else cells


def id_columns(tables: Mapping[str, pa.Table], key: str | None) -> dict[str, str | None]:
    """Return each table's column of ids; None for all if row n is the same example everywhere.

    With an empty key, ids are an index that is unique in each table, and has one name or holds
    texts in all of them. Otherwise all tables must have the same row labels: different ones mean
    that rows were sorted or left out in one of them, and that row n is another example.
    """
    if key is None:
        return dict.fromkeys(tables)
    if key:
        for name, table in tables.items():
            if key not in table.column_names:
                raise SettingsError(f"{name}: expected a column {key!r}, got {_listed(table)}")
        return dict.fromkeys(tables, key)
    unique = {name: _unique_index(table) for name, table in tables.items()}
    if None not in unique.values():
        kinds = [tables[name].column(column).type for name, column in unique.items()]
        one_name, *others = {*unique.values()}
        is_named = not others and not is_unnamed_index(str(one_name))
        if is_named or not any(map(pa.types.is_integer, kinds)):
            return unique
    check_rows_correspond(tables)
    return dict.fromkeys(tables)


def check_rows_correspond(tables: Mapping[str, pa.Table]) -> None:
    """Refuse tables without ids that differ in their number of rows or in their row labels.

    A table without an index has the labels 0, 1, ..., as pandas gives them.
    """
    first = next(iter(tables))
    for name, table in tables.items():
        shared = f"without key, row n is the same example in every table, but {first} and {name}"
        advice = (
            "name in key= the column or index of ids that all tables have, or say key=None if row "
            "n is the same example all the same"
        )
        if len(table) != len(tables[first]):
            raise SettingsError(
                f"{shared} have {len(tables[first]):,} and {len(table):,} rows: {advice}"
            )
        if _row_labels(table) != _row_labels(tables[first]):
            raise SettingsError(f"{shared} have different row labels (pandas' index): {advice}")


def _index_of(table: pa.Table) -> list[str]:
    described = table.schema.pandas_metadata or {}
    names = {one.get("field_name"): one["name"] for one in described.get("columns", ())}
    fields = [one for one in described.get("index_columns", ()) if isinstance(one, str)]
    # An index that is a column, too, has the name of the column, but another field.
    index = {names.get(field) or field for field in fields}
    columns = table.column_names
    return [one for one in columns if one in index] or [*filter(is_unnamed_index, columns)]


def _unique_index(table: pa.Table) -> str | None:
    """Return the row labels' column if it can be ids: one column, of distinct texts or integers."""
    index = _index_of(table)
    if len(index) != 1:
        return None
    cells = table.column(index[0])
    is_id = pa.types.is_integer(cells.type) or cells.type in {pa.string(), pa.large_string()}
    is_unique = len(cells.unique()) == len(cells) and not cells.null_count
    return index[0] if is_id and is_unique else None


def _row_labels(table: pa.Table) -> list[list[Any]]:
    index = table.select(_index_of(table)).columns
    return [column.to_pylist() for column in index] or [list(range(len(table)))]


def _is_by_party(passive: Any) -> bool:
    def is_table(one: Any) -> bool:  # and no column, which has __arrow_c_stream__ as well
        has_columns = hasattr(one, "schema") or hasattr(one, "columns")
        if has_columns or isinstance(one, Mapping):
            return True
        return not isinstance(one, list) and np.ndim(one) == 2

    return isinstance(passive, Mapping) and all(map(is_table, passive.values()))


def _data(
    folder: Path, name: str, table: pa.Table, own: Sequence[str], id_column: str | None
) -> dict[str, Any]:
    columns = _judged_columns(name, table, {*own, id_column, *_index_of(table)})
    written = folder / f"{name}.parquet"
    parquet.write_table(table, written)
    written.chmod(0o600)
    # Its name depends on its content, so that runs of other rows have other settings.
    with written.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    path = written.rename(folder / f"{name}-{digest}.parquet")
    return {
        "source": {"kind": "parquet", "path": path.name},
        **({} if id_column is None else {"id_column": id_column}),
        **columns,
    }


_KINDS: Mapping[str, Kind] = {"numeric": "number", "categorical": "text", "timestamps": "time"}
_JUDGED_ROWS = 20_000


def _judged_columns(
    table_name: str, table: pa.Table, others: Collection[str | None]
) -> dict[str, Any]:
    """Return the settings of the columns that are features.

    Texts are judged as ``init`` does, except that what it would ask about is a category; a column
    that has another type is what its type says, and is never left out.
    """
    columns: dict[str, Column] = {}
    texts: dict[str, Any] = {}
    sequences: dict[str, dict[str, int]] = {}
    for field in table.schema:
        if field.name in others or is_unnamed_index(field.name):
            continue
        way, own = _way_of(field, table_name), table.column(field.name)
        if way == "sequences":
            lengths, tokens = pc.list_value_length(own), pc.list_flatten(own)
            sequences[field.name] = {
                "max_length": max(1, pc.max(lengths).as_py() or 0),
                "num_tokens": max(0, pc.max(tokens).as_py() or 0) + 1,
            }
            continue
        columns[field.name] = _by_type(field.name, own, _KINDS[way])
        if is_text(field.type) and as_text(own) is not None:
            texts[field.name] = own
    plain, units = plain_numbers(texts)
    described, codes, wishes = judged(texts | plain, Wishes())
    by_type = [column for name, column in columns.items() if name not in texts]
    asked = [column for column in described if column.kind == "text" and column.almost]
    columns |= {column.name: column for column in described}
    categories = [*asked, *(column for column in by_type if column.kind == "text")]
    wishes = wishes._replace(
        numeric=tuple(column.name for column in by_type if column.kind == "number"),
        categorical=tuple(column.name for column in categories),
    )
    choices = choose_features([*columns.values()], texts | plain, wishes, None, None, units=units)
    for what, names in _said(choices, columns.values(), texts).items():
        _logger.warning("%s: column %s: %s", table_name, ", ".join(map(repr, names)), what)
    if codes:
        shown = ", ".join(map(repr, codes))
        _logger.warning("%s: no value, as columns of numbers show: %s", table_name, shown)
    settings = choices.settings()
    if sequences:
        settings["features"] = settings.get("features", {}) | {"sequences": sequences}
    return settings


def _by_type(name: str, cells: pa.ChunkedArray, kind: Kind) -> Column:
    missing = cells.null_count
    if pa.types.is_floating(cells.type):
        missing += pc.sum(pc.is_nan(cells)).as_py() or 0
    column = Column(name, kind, len(cells), missing, (), 0, (), (), "")
    if not pa.types.is_integer(cells.type):
        return column
    described = describe(name, cells[:_JUDGED_ROWS])
    return column._replace(doubt=described.doubt, identifies=described.identifies)


def _said(
    choices: Choices, columns: Iterable[Column], texts: Collection[str]
) -> dict[str, list[str]]:
    """Return what may be meant otherwise, with the names of the columns."""
    ways = {"numbers": choices.numeric, "categories": choices.categorical}
    ways["times"] = choices.timestamps
    read = {column.name: way for way, some in ways.items() for column in some}
    said: dict[str, list[str]] = {}
    for column in columns:
        way = read.get(column.name)
        if column.name in texts and way in {"numbers", "times"}:
            what = f"texts that are {way}, read as such unless their type is categories"
            said.setdefault(what, []).append(column.name)
        if column.almost:
            what = f"each text is a category, but {column.almost.in_words}; if those are mistakes, "
            said.setdefault(f"{what}convert the column to numbers", []).append(column.name)
        if way and (why := column.identifies or column.doubt[0].partition(",")[0]):
            said.setdefault(f"{why}, read as {way}", []).append(column.name)
    for name, why in choices.left_out.items():
        said.setdefault(f"left out: {why}", []).append(name)
    return said


def _way_of(column: pa.Field, table: str) -> str:
    kind, types = column.type, pa.types
    if types.is_date(kind) or types.is_timestamp(kind):
        return "timestamps"
    if is_list(kind) and types.is_integer(kind.value_type):
        return "sequences"
    cells = kind.value_type if types.is_dictionary(kind) else kind
    is_other = isinstance(cells, pa.BaseExtensionType) and cells.extension_name != "arrow.uuid"
    is_time_of_no_day = types.is_duration(kind) or types.is_time(kind) or types.is_interval(kind)
    if is_time_of_no_day or types.is_nested(cells) or is_other:
        raise SettingsError(
            f"{table}: column {column.name!r}: expected numbers, dates, times, texts or lists of "
            f"whole numbers, not {cells}: convert the column or leave it out"
        )
    return "numeric" if is_numeric(kind) or types.is_boolean(kind) else "categorical"


def _settings(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "contract": "contract.yaml",
        "security": {"mode": "insecure"},
        "data": data,
        "optimizer": ADAM,
    }


def _classes(label: str, labels: pa.ChunkedArray) -> dict[str, Any]:
    """Return how ``init`` reads the labels; nothing for 0 and 1, and for any other numbers."""
    of_numbers = is_numeric(labels.type)
    if pa.types.is_boolean(labels.type):
        return {}
    kind = labels.type.value_type if pa.types.is_dictionary(labels.type) else labels.type
    if not of_numbers and not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise SettingsError(f"active: column {label!r}: expected numbers or texts, not {kind}")
    labels = labels.drop_null()  # gaps are for the run, which knows data.unlabelled_rows
    if pa.types.is_floating(labels.type):
        labels = labels.filter(pc.invert(pc.is_nan(labels)))
    column = describe(label, labels)
    if of_numbers and (column.distinct < 2 or is_of_numbers(column)):
        return {}  # the run says what it expects
    try:
        read = label_of(column, as_written=of_numbers)
    except SettingsError as error:
        words = str(error).replace("--label-column ", "active: column ")
        raise SettingsError(words.replace("--positive-label", "positive_label")) from error
    if read.positive_is_guessed:
        raise SettingsError(
            f"active: column {label!r}: name in positive_label= the text that stands for 1; it "
            f"has {', '.join(map(repr, sorted(labels.unique().to_pylist())))}"
        )
    given = {"classes": read.classes, "positive_label": read.positive_setting}
    return {
        name: [*one] if isinstance(one, tuple) else one
        for name, one in given.items()
        if one is not None
    }


def _listed(table: pa.Table) -> str:
    return ", ".join(map(repr, table.column_names[:20])) or "no columns"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_text_atomically(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))

"""Judges the columns of a table in memory: by their types, and texts as ``init`` does."""

import logging
from collections.abc import Collection

import pyarrow as pa

from splitveil.common.data.columns import is_numeric, is_text, is_unnamed_index, without_units
from splitveil.common.data.sequences import is_list
from splitveil.common.errors import SettingsError
from splitveil.deploy.init.columns import Column, as_text, describe, units_of

_WAYS = {"numeric": "numbers", "categorical": "categories", "timestamps": "times"}
_JUDGED_ROWS = 20_000

_logger = logging.getLogger(__name__)


def judged_features(
    table_name: str, table: pa.Table, others: Collection[str | None]
) -> tuple[dict[str, list[str]], dict[str, list[str]], set[str]]:
    """Return the columns of features by their way, texts beside numbers, and texts for gaps.

    Texts are judged as ``init`` does; a column that has another type is what its type says.
    """
    features: dict[str, list[str]] = {way: [] for way in (*_WAYS, "sequences")}
    units: dict[str, list[str]] = {}
    gaps: set[str] = set()
    said: dict[str, list[str]] = {}
    for field in table.schema:
        if field.name in others or is_unnamed_index(field.name):
            continue
        way, cells = _way_of(field, table_name), table.column(field.name)
        text = as_text(cells) if is_text(field.type) else None
        if text is None and not pa.types.is_integer(field.type):
            features[way].append(field.name)
            continue
        beside = units_of(text) if text is not None else ()
        column = describe(
            field.name, cells[:_JUDGED_ROWS] if text is None else without_units(text, beside)
        )
        if text is not None and (way := _way_of_texts(column)) != "categorical":
            units |= {field.name: list(beside)} if beside else {}
            gaps |= {"", *column.gaps} if column.missing else set()
            what = f"texts that are {_WAYS[way]}, read as such unless their type is categories"
            said.setdefault(what, []).append(field.name)
        if text is not None and column.almost:
            what = f"each text is a category, but {column.almost.in_words}; if those are mistakes, "
            said.setdefault(f"{what}convert the column to numbers", []).append(field.name)
        if why := column.identifies or column.doubt[0].partition(",")[0]:
            said.setdefault(f"{why}, read as {_WAYS.get(way, way)}", []).append(field.name)
        features[way].append(field.name)
    for what, names in said.items():
        _logger.warning("%s: column %s: %s", table_name, ", ".join(map(repr, names)), what)
    return features, units, gaps


def _way_of_texts(column: Column) -> str:
    if column.kind in {"whole", "number"} and not column.looks_like_codes:
        return "numeric"
    return "timestamps" if None in column.time_formats else "categorical"


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

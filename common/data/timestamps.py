"""Turns columns of dates and times into numbers."""

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import WrittenColumn, clean_text
from splitveil.common.data.settings import TimestampPart
from splitveil.common.data.sources import ArrowColumn
from splitveil.common.errors import DataError

_NAIVE = pa.timestamp("us")
_UTC = pa.timestamp("us", "UTC")
_ZONE = r"\d\d:\d\d\S*(Z|[+-]\d\d(:?\d\d)?)$"
"""The end of a text that names a zone."""

_PARTS = {
    "year": pc.year,
    "month": pc.month,
    "day": pc.day,
    "day_of_week": pc.day_of_week,
    "hour": pc.hour,
    "minute": pc.minute,
}


def read_timestamps(
    column: WrittenColumn, parts: Sequence[TimestampPart], text_format: str | None
) -> dict[TimestampPart, NDArray[np.float64]]:
    """Return the numbers of a column of dates or times, NaN where there is none.

    Args:
        column: the column.
        parts: the numbers that are wanted.
        text_format: how texts are written; None for ISO 8601.

    Raises:
        DataError: names the rows whose text is no time, never the text.
    """
    times = _times(column, text_format)
    return {part: _as_numbers(times, part) for part in parts}


def _as_numbers(times: ArrowColumn, part: TimestampPart) -> NDArray[np.float64]:
    if part == "seconds":
        numbers = pc.divide(pc.cast(pc.cast(times, pa.int64()), pa.float64(), safe=False), 1e6)
    else:
        numbers = pc.cast(_PARTS[part](times), pa.float64())
    return np.asarray(numbers.to_numpy(), np.float64)


def _times(column: WrittenColumn, text_format: str | None) -> ArrowColumn:
    """Return the times without a zone, those with one in UTC."""
    cells = column.cells
    if pa.types.is_dictionary(cells.type):
        cells = pc.cast(cells, cells.type.value_type)
    kind = cells.type
    if pa.types.is_null(kind):
        return pc.cast(cells, _NAIVE)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            return _without_zone(pc.cast(cells, _UTC, safe=False))
        return pc.cast(cells, _NAIVE, safe=False)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{column.where}: expected dates, times or text, not {kind}")
    text = clean_text(column._replace(cells=cells))
    if text_format is not None:
        return _in_format(column, text, text_format)
    return _in_iso_form(column, text)


def _without_zone(times: ArrowColumn) -> ArrowColumn:
    return pc.cast(pc.cast(times, pa.int64()), _NAIVE)


def _in_format(column: WrittenColumn, text: ArrowColumn, text_format: str) -> ArrowColumn:
    times = pc.strptime(text, format=text_format, unit="us", error_is_null=True)
    is_wrong = pc.and_(pc.is_null(times), pc.is_valid(text)).to_numpy()
    if is_wrong.any():
        raise DataError(
            f"{column.where}: expected times written as {text_format} in "
            f"{column.list_rows(is_wrong)}"
        )
    return times


def _in_iso_form(column: WrittenColumn, text: ArrowColumn) -> ArrowColumn:
    nothing = pa.scalar(None, pa.string())
    has_zone = pc.match_substring_regex(text, _ZONE)
    try:
        plain = pc.cast(pc.if_else(has_zone, nothing, text), _NAIVE)
        zoned = _without_zone(pc.cast(pc.if_else(has_zone, text, nothing), _UTC))
    except pa.ArrowInvalid as error:
        is_wrong = np.array([not _is_iso(cell) for cell in text.to_pylist()])
        where = column.list_rows(is_wrong) if is_wrong.any() else "some rows"
        raise DataError(
            f"{column.where}: expected times such as 2026-03-01 or 2026-03-01T17:30:00 in {where}; "
            f"data.features.timestamp_format names another form"
        ) from error
    return pc.coalesce(plain, zoned)


def _is_iso(text: str | None) -> bool:
    try:
        return text is None or bool(datetime.fromisoformat(text))
    except ValueError:
        return False

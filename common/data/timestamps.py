"""Turns columns of dates and times into numbers."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import WrittenColumn, clean_text, is_text
from splitveil.common.data.settings import TimestampPart
from splitveil.common.data.sources import ArrowColumn
from splitveil.common.errors import DataError

_NAIVE = pa.timestamp("us")
_UTC = pa.timestamp("us", "UTC")
_ZONE = r"\d\d:\d\d\S*(Z|[+-]\d\d(:?\d\d)?)$"
"""The end of a text that names a zone."""
_FORM = r"^\d{4}-\d\d-\d\d([ T]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?$"
_BEYOND_MICROSECONDS = r"(:\d\d\.\d{6})\d{1,3}"

_DATES = (
    *("%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%Y"),
    *(
        "%m-%d-%Y",
        "%Y-%m-%d",
        "%Y/%m/%d",
        "%Y.%m.%d",
        "%d-%b-%Y",
        "%d-%b-%y",
        "%d %b %Y",
        "%b %d, %Y",
    ),
)
_CLOCKS = ("", " %H:%M", " %H:%M:%S")
_TRIED_FIRST = 20

_PARTS = {
    "year": pc.year,
    "month": pc.month,
    "day": pc.day,
    "day_of_week": pc.day_of_week,
    "hour": pc.hour,
    "minute": pc.minute,
}


def read_timestamps(
    column: WrittenColumn,
    parts: Sequence[TimestampPart],
    text_format: str | None,
    first_year: int = 1969,
) -> dict[TimestampPart, NDArray[np.float64]]:
    """Return the numbers of a column of dates or times, NaN where there is none.

    Years of two digits are among the hundred from ``first_year``. DataError names the rows whose
    text is no time (by default of ISO 8601), never the text.
    """
    times, found = _times(column, text_format, first_year), {}
    for part in parts:
        if part == "seconds":
            numbers = pc.divide(pc.cast(pc.cast(times, pa.int64()), pa.float64(), safe=False), 1e6)
        else:
            numbers = pc.cast(_PARTS[part](times), pa.float64())
        found[part] = np.asarray(numbers.to_numpy(), np.float64)
    return found


def _times(column: WrittenColumn, text_format: str | None, first_year: int) -> ArrowColumn:
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
    if not is_text(kind):
        raise DataError(f"{column.where}: expected dates, times or text, not {kind}")
    text = clean_text(column._replace(cells=cells))
    if text_format is not None:
        times = pc.strptime(text, format=text_format, unit="us", error_is_null=True)
        is_wrong = pc.and_(pc.is_null(times), pc.is_valid(text)).to_numpy()
        column.check(is_wrong, f"times written as {text_format}")
        return _in_century(times, first_year) if "%y" in text_format else times
    try:
        return _parsed(text)
    except pa.ArrowInvalid as error:
        where = column.list_rows(~are_times(text) & pc.is_valid(text).to_numpy())
        raise DataError(
            f"{column.where}: expected times such as 2026-03-01 or 2026-03-01T17:30:00 in {where}; "
            f"data.features.timestamp_format names another form, and data.features.missing_texts "
            f"texts that mean no value"
        ) from error


def _without_zone(times: ArrowColumn) -> ArrowColumn:
    return pc.cast(pc.cast(times, pa.int64()), _NAIVE)


def _in_century(times: ArrowColumn, first_year: int) -> ArrowColumn:
    """Move times of 1969 to 2068, strptime's century, to the hundred years from a given year."""
    plain = times.to_numpy()
    months = plain.astype("datetime64[M]")
    years = months.astype("datetime64[Y]").astype(np.int64) + 1970
    moved = np.where(np.isnat(plain), 0, (first_year - years + 99) // 100)
    exact = (months + 1200 * moved).astype(plain.dtype) + (plain - months)
    return pa.chunked_array([pa.array(exact, _NAIVE)])


def _parsed(text: ArrowColumn) -> ArrowColumn:
    """Return times of ISO 8601; digits of a second beyond the sixth are dropped."""
    nothing = pa.scalar(None, pa.string())
    text = pc.replace_substring_regex(text, _BEYOND_MICROSECONDS, r"\1")
    has_zone = pc.match_substring_regex(text, _ZONE)
    plain = pc.cast(pc.if_else(has_zone, nothing, text), _NAIVE)
    zoned = _without_zone(pc.cast(pc.if_else(has_zone, text, nothing), _UTC))
    return pc.coalesce(plain, zoned)


def time_formats(text: ArrowColumn) -> dict[str | None, NDArray[np.bool_]]:
    """Return which texts are times, by ISO 8601 (None) and each form that some of them have."""
    found: dict[str | None, NDArray[np.bool_]] = {None: are_times(text)}
    for form in (date + clock for date in _DATES for clock in _CLOCKS):
        if _are_in_form(text[:_TRIED_FIRST], form).any():
            found[form] = _are_in_form(text, form)
    return found


def _are_in_form(text: ArrowColumn, form: str) -> NDArray[np.bool_]:
    times = pc.strptime(text, format=form, unit="s", error_is_null=True)
    again, plain = (
        pc.utf8_lower(pc.replace_substring_regex(one, r"\b0+(\d)", r"\1"))
        for one in (pc.strftime(times, form), text)
    )
    # The library takes 30 February for 1 March, and 24 for the year 24.
    is_right = pc.and_(pc.equal(again, plain), pc.greater(pc.year(times), 999))
    if "%y" in form:  # but 4.4.2 is a version
        is_right = pc.and_(is_right, pc.match_substring_regex(text, r"\D\d\d( |$)"))
    return np.asarray(pc.fill_null(is_right, False).to_numpy(zero_copy_only=False), np.bool_)


def are_times(text: ArrowColumn) -> NDArray[np.bool_]:
    """Return which texts are dates or times of ISO 8601."""
    looks_so = pc.fill_null(pc.match_substring_regex(text, _FORM), False)
    found = np.array(looks_so.to_numpy(zero_copy_only=False), np.bool_)
    found[found] = _are_parsed(text.filter(looks_so))
    return found


def _are_parsed(text: ArrowColumn) -> NDArray[np.bool_]:
    """Parse halves, since the library does not say which text is wrong."""
    try:
        _parsed(text)
    except pa.ArrowInvalid:
        if len(text) == 1:
            return np.zeros(1, np.bool_)
        half = len(text) // 2
        return np.concatenate([_are_parsed(text[:half]), _are_parsed(text[half:])])
    return np.ones(len(text), np.bool_)

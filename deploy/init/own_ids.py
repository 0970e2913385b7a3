"""Judges columns of ids as a run does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import NEARLY_ALL, WrittenColumn, is_unnamed_index, read_ids
from splitveil.common.data.id_forms import SHORTENED
from splitveil.common.data.ids import Allowed, unusable_rows
from splitveil.common.errors import DataError
from splitveil.deploy.init.columns import Column


def objections_to(cells: Any, allowed: Allowed) -> tuple[list[str], int]:
    """Return why a run refuses ids, with the option for it, and how many rows have their own."""
    raw = read_ids(WrittenColumn(cells, "ids"), may_be_floats=True)
    form = CanonicalForm()
    rows = unusable_rows(raw, form.of(raw), form)
    unusable, repeated = len(rows.without_id), len(rows.repeated)
    found = []
    if unusable and not allowed.unusable:
        found.append(f"{unusable:,} rows without an id: --unusable-ids leave_out")
    if repeated and not allowed.duplicates:
        found.append(f"{repeated:,} rows with the id of an earlier row: --duplicate-ids first")
    return found, len(raw) - unusable - repeated


def likely_ids(
    columns: Sequence[Column], cells: Mapping[str, Any], allowed: Allowed
) -> dict[str, list[str]]:
    """Return the columns of which nearly all rows have an id of their own, and what is objected."""
    found = {}
    for column in columns:
        is_float = pa.types.is_floating(cells[column.name].type)
        is_index = is_unnamed_index(column.name) and column.kind == "whole"
        is_shortened = any(re.match(SHORTENED, value) for value in column.values)
        may_be = column.kind in {"whole", "text"}
        may_be |= column.kind == "number" and (is_float or is_shortened)
        if is_index or not may_be or column.distinct < 0.8 * column.num_rows:
            continue
        try:
            objections, num_ids = objections_to(cells[column.name], allowed)
        except DataError:
            continue
        if is_float:
            rule = "the contract says ids: {whole_numbers: true} if --id-column names it"
            objections.append(f"stored as floating-point numbers: {rule}")
        elif is_shortened:
            objections.append("some are written like 1.2E+15, as spreadsheets shorten long numbers")
        if num_ids >= NEARLY_ALL * column.num_rows:
            found[column.name] = objections
    return found

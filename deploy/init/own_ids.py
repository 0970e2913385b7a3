"""Judges columns of ids as a run does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import WrittenColumn, is_text, is_unnamed_index, read_ids
from splitveil.common.data.id_forms import SHORTENED
from splitveil.common.data.ids import unusable_rows
from splitveil.common.errors import DataError
from splitveil.deploy.init.columns import Column

_POINTED = r"[+-]?\d+\.0*"


class OwnIds(NamedTuple):
    """What a run makes of a column of ids."""

    num_rows: int
    without_id: int = 0
    repeated: int = 0
    """Rows with the id of an earlier row."""

    doubt: str = ""
    """Why the column is taken only if it is named."""

    is_floating: bool = False
    """Whether whole numbers have a decimal point, for which the contract needs a rule."""

    @property
    def num_ids(self) -> int:
        return self.num_rows - self.without_id - self.repeated

    @property
    def losses(self) -> str:
        """Say how many rows take no part; empty if all do."""
        without = f"{self.without_id:,} without an id" if self.without_id else ""
        repeated = f"{self.repeated:,} with the id of an earlier row" if self.repeated else ""
        words = " and ".join(filter(None, [without, repeated]))
        return words and f"{self.without_id + self.repeated:,} rows take no part: {words}"


def judge(column: Column, cells: Any) -> OwnIds:
    """Return what a run makes of a column; DataError if it cannot read it as ids."""
    raw = read_ids(WrittenColumn(cells, "ids"), may_be_floats=True)
    form = CanonicalForm()
    rows = unusable_rows(raw, form.of(raw), form)
    is_floating = column.kind == "number" and (
        pa.types.is_floating(cells.type) or all(re.fullmatch(_POINTED, x) for x in column.values)
    )
    doubt = ""
    if is_floating:
        rule = "the contract says ids: {whole_numbers: true} if --id-column names it"
        doubt = f"whole numbers with a decimal point: {rule}"
    elif any(re.match(SHORTENED, value) for value in column.values):
        doubt = "some are written like 1.2E+15, as spreadsheets shorten long numbers"
    return OwnIds(len(raw), len(rows.without_id), len(rows.repeated), doubt, is_floating)


def likely_ids(columns: Sequence[Column], cells: Mapping[str, Any]) -> dict[str, OwnIds]:
    """Return the columns of which more than half of the rows have an id of their own."""
    found = {}
    for column in columns:
        own = cells[column.name]
        if is_text(own.type) and column.kind == "other":
            if len(own.unique()) == len(own):
                why = "bytes that are no text: write them as text, such as hexadecimal digits"
                found[column.name] = OwnIds(len(own), doubt=why)
            continue
        is_index = is_unnamed_index(column.name) and column.kind == "whole"
        may_be = column.kind in {"whole", "text", "number"} and not is_index
        if not may_be or column.distinct <= column.num_rows // 2:
            continue
        try:
            judged = judge(column, own)
        except DataError:
            continue
        is_id = column.kind != "number" or judged.doubt
        if is_id and judged.num_ids > column.num_rows // 2:
            found[column.name] = judged
    return found

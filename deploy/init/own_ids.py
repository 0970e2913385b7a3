"""Judges columns of ids as a run does: which rows it would refuse, and what lets it go on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import NEARLY_ALL, WrittenColumn, is_unnamed_index, read_ids
from splitveil.common.data.ids import Allowed, canonical_texts, odd_rows
from splitveil.common.errors import DataError
from splitveil.deploy.init.columns import Column


class OwnIds(NamedTuple):
    """What a run finds in a column of ids."""

    num_rows: int
    unusable: int
    """Rows without a usable id."""

    repeated: int
    """Rows whose id an earlier row has."""

    whole_numbers: bool
    """Whether the contract needs this rule, as they are stored as floating-point numbers."""

    def objections(self, allowed: Allowed) -> dict[str, str]:
        """Return why a run refuses them, with the option that lets it go on, by what it allows."""
        found = {}
        if self.unusable and not allowed.unusable:
            found["unusable"] = f"{self.unusable:,} rows without an id: --unusable-ids leave_out"
        if self.repeated and not allowed.duplicates:
            rows = f"{self.repeated:,} rows with the id of an earlier row"
            found["duplicates"] = f"{rows}: --duplicate-ids first"
        return found

    @property
    def needs_a_rule(self) -> list[str]:
        """What else has to be agreed on."""
        rule = "--id-column names it, and the contract says ids: {whole_numbers: true}"
        return [f"stored as floating-point numbers: {rule}"] if self.whole_numbers else []

    @property
    def is_likely(self) -> bool:
        """Whether nearly all rows have an id of their own."""
        return self.unusable + self.repeated <= (1 - NEARLY_ALL) * self.num_rows


def own_ids(cells: Any) -> OwnIds | None:
    """Judge a column; None if it holds neither texts nor whole numbers."""
    try:
        raw = read_ids(WrittenColumn(cells, ""), may_be_floats=True)
    except DataError:
        return None
    odd = odd_rows(raw, canonical_texts(raw), CanonicalForm())
    is_float = pa.types.is_floating(cells.type)
    return OwnIds(len(raw), len(odd.unusable), len(odd.repeated), is_float)


def likely_ids(columns: Sequence[Column], cells: Mapping[str, Any]) -> dict[str, OwnIds]:
    """Return the columns whose texts or whole numbers may be ids, of nearly all rows."""
    found = {}
    for column in columns:
        is_float = pa.types.is_floating(cells[column.name].type)
        may_be = column.kind in {"whole", "text"} or (is_float and column.kind == "number")
        may_be &= not (is_unnamed_index(column.name) and column.kind == "whole")
        if may_be and column.distinct >= (1 - 2 * (1 - NEARLY_ALL)) * column.num_rows:
            ids = own_ids(cells[column.name])
            if ids is not None and ids.is_likely:
                found[column.name] = ids
    return found

"""Judges columns of ids as a run does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import (
    NEARLY_ALL,
    WrittenColumn,
    is_text,
    is_unnamed_index,
    read_ids,
)
from splitveil.common.data.id_forms import SHORTENED
from splitveil.common.data.ids import unusable_rows
from splitveil.common.errors import DataError
from splitveil.common.run.id_rules import TextId
from splitveil.deploy.init.columns import Column
from splitveil.deploy.init.whole_numbers import LEAST_REPEATS

_POINTED = r"[+-]?\d+\.0*"
_IDENTIFIERS = {
    "IBANs": r"[A-Z]{2}\d{2}( ?[A-Z0-9]{4}){2,7}( ?[A-Z0-9]{1,3})?",
    "UUIDs": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "hashes": r"[0-9a-fA-F]{32,}",
    "e-mail addresses": r"[^@\s]+@[^@\s]+\.\w+",
    "telephone or account numbers": r"(\+|0)\d[\d ()/-]{6,20}",
}
_EPOCHS_S = (0.9e9, 2.2e9)  # times since 1970 have as many digits as telephone numbers


class OwnIds(NamedTuple):
    """A run's reading of a column of ids."""

    num_rows: int
    without_id: int = 0
    repeated: int = 0  # rows with the id of an earlier row
    doubt: str = ""  # why the column is taken only if it is named
    rule: TextId = TextId()
    """The contract's rule for them: for whole numbers with a decimal point, and for letters all of
    one case, which the other party may write in the other case."""

    @property
    def num_ids(self) -> int:
        return self.num_rows - self.without_id - self.repeated

    @property
    def losses(self) -> str:
        """Say how many rows are left out; empty if none is."""
        lost = {"without an id": self.without_id, "with the id of an earlier row": self.repeated}
        words = [f"{n:,} row{'s' * (n > 1)} {why}" for why, n in lost.items() if n]
        return f"left out: {', '.join(words)}" if words else ""


def identifiers_in(column: Column) -> str:
    """Say that a column's cells identify persons or things; empty if they do not, or are codes."""
    if column.present >= LEAST_REPEATS * column.distinct:
        return ""
    kinds = _IDENTIFIERS if column.kind in {"text", "whole"} else ()
    found = next((x for x in kinds if _are_nearly_all(column.values, _IDENTIFIERS[x])), None)
    if found is None and _is_long_number(column):
        found = f"numbers of {len(str(int(column.low)))} digits, such as telephone or card numbers"
    found = found or column.identifies * (column.kind in {"text", "whole", "number"})
    return f"{found}: they identify, and are neither quantities nor categories" if found else ""


def _are_nearly_all(texts: Sequence[str], pattern: str) -> bool:
    return sum(map(bool, (re.fullmatch(pattern, x) for x in texts))) >= NEARLY_ALL * len(texts)


def _is_long_number(column: Column) -> bool:
    if column.kind not in {"whole", "number"} or column.almost or column.low < 1:
        return False
    digits = len(str(int(column.low)))
    unit = 10.0 ** (digits - 10)
    is_time = digits in {10, 13, 16, 19} and (
        _EPOCHS_S[0] <= column.low / unit and column.high / unit <= _EPOCHS_S[1]
    )
    is_whole = all(float(value).is_integer() for value in column.values)
    return digits >= 9 and digits == len(str(int(column.high))) and is_whole and not is_time


def judge(column: Column, cells: Any) -> OwnIds:
    """Return a run's reading of a column; DataError if it cannot read it as ids."""
    if column.kind == "whole" and {*column.gaps} <= {""}:  # spares a look at each row
        return OwnIds(column.num_rows, column.missing, column.present - column.distinct)
    raw = read_ids(WrittenColumn(cells, "ids"), may_be_floats=True)
    form = CanonicalForm()
    rows = unusable_rows(raw, form.of(raw), form)
    doubt = _doubt(column, cells)
    is_floating = doubt is _POINTS
    folds = not is_floating and _may_fold(raw)
    rule = TextId(fold_case=folds, whole_numbers=is_floating)
    return OwnIds(len(raw), len(rows.without_id), len(rows.repeated), doubt, rule)


_POINTS = (
    "whole numbers with a decimal point: the contract says ids: {whole_numbers: true} if "
    "--id-column names it"
)


def _doubt(column: Column, cells: Any) -> str:
    if column.kind == "number" and (
        pa.types.is_floating(cells.type) or all(re.fullmatch(_POINTED, x) for x in column.values)
    ):
        return _POINTS
    if any(map(re.compile(SHORTENED).match, column.values)):
        return "some are written like 1.2E+15, as spreadsheets shorten long numbers"
    return ""


def _may_fold(raw: Sequence[str]) -> bool:
    """Say whether no id has letters of both cases, and no two differ only in case."""
    texts = {text for text in raw if text != text.upper() or text != text.lower()}
    has_one_case = all(text in {text.upper(), text.lower()} for text in texts)
    return bool(texts) and has_one_case and len({text.casefold() for text in texts}) == len(texts)


def likely_ids(columns: Sequence[Column], cells: Mapping[str, Any]) -> dict[str, OwnIds]:
    """Return the columns that have distinct ids for more than half of the rows."""
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
        if column.kind == "number" and not _doubt(column, own):
            continue
        try:
            judged = judge(column, own)
        except DataError:
            continue
        if judged.num_ids > column.num_rows // 2:
            found[column.name] = judged
    return found

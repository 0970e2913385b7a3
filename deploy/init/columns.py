"""Describes one column of a table: what its cells hold, how many there are of each, and its gaps.

The readers of a run judge what the cells are. What is found is meant for the table's owner only.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import (
    NUMBER,
    NUMBERS_BY_DECIMAL,
    CategoricalColumn,
    WrittenColumn,
    are_numbers,
    clean_text,
    is_text,
    read_categories,
    read_numbers,
)
from splitveil.common.data.sources import list_rows
from splitveil.common.data.timestamps import time_formats
from splitveil.common.errors import DataError

_SIGN = "[%‰€$£¥]|EUR|USD|CHF|GBP"
_FORMS = (
    (
        "numbers with commas or marks between thousands",
        "|".join(NUMBERS_BY_DECIMAL.values()),
        "--decimal . if a comma stands between thousands, --decimal , if it is a decimal one;",
    ),
    (
        "numbers with a percent sign or a currency",
        rf"^({_SIGN})?\s*[+-]?\d[\d.,' ]*\s*({_SIGN})?$",
        "write the column without it, or",
    ),
)
"""Forms that no column of numbers has, each with what to do; of those that fit equally, the first.
"""
_MOST_TEXTS = 20
_CODE = r"(?i)(?![+-]?(inf|infinity|nan)$)\D+"
NO_NAME = "has no name of its own, like the row numbers of a pandas table: name it to use it"


class Almost(NamedTuple):
    """What nearly all cells of a column are."""

    in_words: str  # how many cells are, and which rows are not
    codes: tuple[str, ...]  # other texts without a digit, in several cells each, so not mistyped
    remedy: str


def almost(
    column: CategoricalColumn, what: str, is_right: NDArray[np.bool_], remedy: str = ""
) -> Almost:
    """Describe a column of which nearly all cells are right, or all in another form."""
    is_wrong = column.rows_of(~is_right)
    wrong = np.flatnonzero(is_wrong) + 1
    num_cells = np.count_nonzero(column.codes >= 0)
    words = f"{num_cells - len(wrong):,} of {num_cells:,} cells are {what}"
    if len(wrong):
        words += f"; {list_rows(wrong)} {'is' if len(wrong) == 1 else 'are'} not"
    others = column.categories.filter(~is_right).to_pylist()
    if remedy or len(others) > _MOST_TEXTS:
        others = []
    counts = np.bincount(column.codes[is_wrong], minlength=len(is_right))[~is_right]
    codes = (x for x, n in zip(others, counts, strict=False) if n > 1 and re.fullmatch(_CODE, x))
    remedy = remedy or "--missing-text TEXT for a text that means no value,"
    return Almost(words, tuple(codes), remedy)


def almost_numbers(column: CategoricalColumn, is_number: NDArray[np.bool_]) -> Almost | None:
    """Describe a column without gaps of which nearly all texts are numbers, in whatever form."""
    found = [("numbers", is_number, "")]
    is_other = is_number | ~matches(column.categories, NUMBER)
    found += [
        (what, matches(column.categories, form) & is_other, remedy) for what, form, remedy in _FORMS
    ]
    likely = [one for one in found if column.is_nearly_all(one[1])]
    best = max(likely, key=lambda one: column.rows_of(one[1]).sum(), default=None)
    return None if best is None else almost(column, *best)


def matches(texts: Any, pattern: str) -> NDArray[np.bool_]:
    found = pc.match_substring_regex(texts, pattern)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


Kind = Literal["empty", "constant", "whole", "number", "time", "other time", "text", "other"]
"""What the cells of a column hold: nothing; one value; whole numbers; numbers; dates or times (of
ISO 8601, or in another form); texts; or something that is none of these, such as a list."""

_GAP_WORDS = ("na", "n/a", "n.a.", "nan", "null", "none", "nil", "<na>", "(null)", "[null]", "nat")
GAPS = (
    *("", "?", ".", "..", "-", "--", "---", r"\N", "0000-00-00", "0000-00-00 00:00:00"),
    *(form for word in _GAP_WORDS for form in (word, word.upper(), word.capitalize())),
    *("NaN", "NaT", "k.A.", "k. A.", "keine Angabe", "n.v.", "#NV", "#N/A N/A", "1.#IND"),
    *("#N/A", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#NULL!"),
)
"""Texts that mean "no value" where a column holds them beside other cells."""


def words_of(name: str) -> set[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return set(re.split(r"[^a-z0-9]+", spaced.lower()))


CODE_WORDS = words_of(
    "agent app area branch brand category channel city class code country county device district "
    "id ids ip kind merchant model os plz postcode product region sector shop sku state store "
    "terminal type vendor zip zipcode"
)
"""Words in the names of columns whose whole numbers are codes and not quantities."""

_WHOLE = r"^[+-]?\d+$"
_COMPACT_DATE = r"^(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$"
_MOST_CODES = 1000
LEAST_REPEATS = 20
_SPARSE = 0.5


class Column(NamedTuple):
    """What one column holds."""

    name: str
    kind: Kind
    num_rows: int
    missing: int
    gaps: tuple[str, ...]  # the texts in this column that mean "no value"
    distinct: int  # number of distinct values, without gaps
    values: tuple[str, ...]  # distinct, the most frequent first; at most ``MOST_VALUES``
    counts: tuple[int, ...]  # rows of each of them
    reason: str  # why the whole numbers look like codes and not quantities; empty if they do not
    low: float = 0.0  # the least of the numbers; 0 for other cells
    high: float = 0.0
    variance: float = 0.0  # of the numbers over the rows
    almost: Almost | None = None  # what nearly all cells are, if others prevent reading it so
    time_formats: tuple[str | None, ...] = ()  # forms of strptime; None for ISO 8601

    @property
    def looks_like_codes(self) -> bool:
        return bool(self.reason)

    @property
    def present(self) -> int:
        return self.num_rows - self.missing

    @property
    def is_unique(self) -> bool:
        return not self.missing and self.distinct == self.num_rows

    def in_words(self) -> str:
        """Describe the column, without any of its values."""
        forms = " or ".join(map(str, self.time_formats)) or "several forms"
        what = {
            "empty": "no values",
            "constant": "the same value in every row",
            "whole": f"whole numbers, {self.distinct:,} distinct",
            "number": f"numbers, {self.distinct:,} distinct",
            "time": "dates or times",
            "other time": f"dates or times written as {forms}",
            "text": f"texts, {self.distinct:,} distinct",
            "other": "neither texts nor numbers",
        }[self.kind]
        what += f" ({self.almost.in_words})" if self.almost else ""
        if not self.missing or self.kind == "empty":
            return what
        shown = ", ".join("empty" if gap == "" else repr(gap) for gap in self.gaps)
        return f"{what}; {self.missing:,} gaps{f' ({shown})' if shown else ''}"


MOST_VALUES = 200  # values of a column that are listed: more than any label has classes


def describe(
    name: str, cells: Any, missing_texts: Sequence[str] = (), known: Sequence[str] = GAPS
) -> Column:
    text = as_text(cells)
    if text is None:
        return Column(name, "other", len(cells), cells.null_count, (), 0, (), (), "")
    present = set(pc.unique(text).to_pylist())
    gaps = tuple(gap for gap in dict.fromkeys((*known, *missing_texts)) if gap in present)
    found = read_categories(WrittenColumn(text, name, gaps))
    kind, nearly, formats = _kind_of(name, cells.type, found)
    values, counts = found.categories, np.bincount(found.codes + 1)[1:]
    numbers = np.zeros(0)
    if kind in {"whole", "number"}:
        numbers = read_numbers(WrittenColumn(pa.chunked_array([values]), "")).values
    if np.isnan(numbers).any():  # other spellings of NaN
        is_value = ~np.isnan(numbers)
        values, numbers = values.filter(pa.array(is_value)), numbers[is_value]
        counts = counts[is_value]
    order = np.argsort(-counts, kind="stable")[:MOST_VALUES]
    return Column(
        name=name,
        kind=kind,
        num_rows=len(cells),
        missing=len(cells) - int(counts.sum()),
        gaps=gaps,
        distinct=len(values),
        values=tuple(values.take(pa.array(order)).to_pylist()),
        counts=tuple(counts[order].tolist()),
        reason=_reason_for_codes(name, kind, numbers, counts),
        low=float(numbers.min()) if len(numbers) else 0.0,
        high=float(numbers.max()) if len(numbers) else 0.0,
        variance=_variance(numbers, counts) if len(numbers) and nearly is None else 0.0,
        almost=nearly,
        time_formats=formats,
    )


def codes_for_gaps(columns: Sequence[Column], cells: Mapping[str, Any]) -> tuple[str, ...]:
    """Return texts that mean "no value" in columns of numbers or times, and nothing in others."""
    codes = {code for column in columns if column.almost for code in column.almost.codes}
    for column in columns if codes else ():
        text = None if column.almost else as_text(cells[column.name])
        if text is not None:
            codes = {code for code in codes if not pc.any(pc.equal(text, code)).as_py()}
    return tuple(sorted(codes))


def as_text(cells: Any) -> Any | None:
    """Return a column's cells as texts without surrounding white space; None if they have none."""
    try:
        if pa.types.is_floating(cells.type):
            cells = pc.cast(cells, pa.string())
        return clean_text(WrittenColumn(cells, ""))
    except DataError:
        return None


def without_gaps(text: Any, gaps: Sequence[str]) -> Any:
    """Return the texts with null in place of every gap."""
    return clean_text(WrittenColumn(text, "", gaps))


_Found = tuple[Kind, Almost | None, tuple[str | None, ...]]


def _kind_of(name: str, written_as: Any, column: CategoricalColumn) -> _Found:
    """Return what the cells are, what nearly all of them are, and in which form they are times."""
    texts = column.categories
    is_number = are_numbers(texts)
    is_typed = pa.types.is_floating(written_as) or pa.types.is_decimal(written_as)
    if is_typed and not is_number.all():
        return "number", almost(column, "finite numbers of float32", is_number), ()
    if len(texts) <= 1:
        return "constant" if len(texts) else "empty", None, ()
    if pa.types.is_temporal(written_as):  # times of day and durations only have a text
        is_time = pa.types.is_date(written_as) or pa.types.is_timestamp(written_as)
        return "time" if is_time else "text", None, ()
    if is_text(written_as) and matches(texts, _COMPACT_DATE).all():
        return "other time", None, ("%Y%m%d",)
    if is_typed or is_number.all():
        is_whole = matches(texts, _WHOLE).all() and not pa.types.is_floating(written_as)
        return "whole" if is_whole else "number", None, ()
    return _kind_of_texts(name, column, is_number)


def _kind_of_texts(name: str, column: CategoricalColumn, is_number: NDArray[np.bool_]) -> _Found:
    texts = column.categories
    forms = time_formats(texts)
    fitting = tuple(form for form, is_time in forms.items() if is_time.all())
    if fitting or np.logical_or.reduce([*forms.values()]).all():
        return "time" if None in fitting else "other time", None, fitting
    is_time = max(forms.values(), key=lambda one: int(one.sum()))
    if column.is_nearly_all(is_time):
        return "text", almost(column, "dates or times", is_time), ()
    return "text", None if words_of(name) & CODE_WORDS else almost_numbers(column, is_number), ()


def _variance(numbers: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    centred = numbers - np.average(numbers, weights=counts)
    return float(np.average(centred**2, weights=counts))


def _reason_for_codes(
    name: str, kind: Kind, numbers: NDArray[np.float64], counts: NDArray[np.int64]
) -> str:
    """Say why whole numbers are codes; empty if they are quantities.

    Quantities use most of the numbers between their smallest and their largest, or are most often
    at the smallest, as counts are; codes are used again and again, and leave most numbers out.
    """
    if kind != "whole" or len(numbers) < 3 or numbers.min() < 0:
        return ""
    if words_of(name) & CODE_WORDS:
        return "named like a code"
    steps = np.diff(np.unique(numbers))
    unit = float(np.gcd.reduce(steps[steps < 2**53].astype(np.int64))) or 1.0
    width = (numbers.max() - numbers.min()) / unit + 1
    is_sparse = len(numbers) / width < _SPARSE
    is_repeated = counts.sum() / len(numbers) >= LEAST_REPEATS
    starts_highest = counts[np.argmin(numbers)] == counts.max()
    if 5 <= len(numbers) <= _MOST_CODES and is_sparse and is_repeated and not starts_highest:
        return "few of the numbers in their range are used, again and again"
    return ""

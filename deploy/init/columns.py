"""Describes one column of a table: the kind of its cells, their counts, and its gaps.

The readers of a run judge the cells. The results are meant for the table's owner only.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import (
    NEARLY_ALL,
    NUMBER,
    NUMBERS_BY_DECIMAL,
    CategoricalColumn,
    WrittenColumn,
    are_numbers,
    clean_text,
    is_text,
    read_categories,
    read_numbers,
    without_units,
)
from splitveil.common.data.sources import list_rows
from splitveil.common.data.timestamps import time_formats
from splitveil.common.errors import DataError

_THOUSANDS = (
    "numbers with commas or marks between thousands",
    "|".join(NUMBERS_BY_DECIMAL.values()),
    "--decimal . if a comma stands between thousands, --decimal , if it is a decimal one;",
)
_BESIDE = (
    r"^(?P<before>\D*?)(?P<number>[+-]?(?:\d[\d.,'\x{2019}\x{a0}\x{202f}\x{2009} ]*|[.,]\d+)"
    r"(?:[eE][+-]?\d+)?)(?P<after>\D*)$"
)
"""A number, with what stands before and after it."""
_MOST_TEXTS = 20
_CODE = r"(?i)(?![+-]?(inf|infinity|nan)$)\D+"
NO_NAME = "has no name of its own, like the row numbers of a pandas table: name it to use it"


class Almost(NamedTuple):
    """The form of nearly all cells of a column."""

    in_words: str  # how many cells are, and which rows are not
    codes: tuple[str, ...]  # other texts without a digit, in several cells each, so not mistyped
    remedy: str


def almost(
    column: CategoricalColumn, what: str, is_right: NDArray[np.bool_], remedy: str = ""
) -> Almost:
    """Describe a column with nearly all cells right, or all in another form."""
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
    """Describe a column without gaps where nearly all texts are numbers, in any form."""
    what, form, remedy = _THOUSANDS
    is_other = is_number | ~matches(column.categories, NUMBER)
    found = [
        ("numbers", is_number, ""),
        (what, matches(column.categories, form) & is_other, remedy),
    ]
    likely = [one for one in found if column.is_nearly_all(one[1])]
    is_beside = ~is_number & matches(column.categories, _BESIDE)
    is_beside &= matches(column.categories, r"^[^\pL\d]*\d|\p{Sc}")  # and no name, as red 5
    num_cells, num_numbers = (column.codes >= 0).sum(), column.rows_of(is_number).sum()
    are_few = LEAST_REPEATS * len(column.categories) <= num_cells
    are_most = num_numbers * 2 >= num_cells and not are_few
    if not likely and are_most and column.is_nearly_all(is_number | is_beside):
        likely = [("numbers alone", is_number, "")]
    if not likely:
        return None
    best = max(likely, key=lambda one: column.rows_of(one[1]).sum())
    found_almost = almost(column, *best)
    if best[1] is is_number and column.rows_of(is_beside).sum() > 1:
        is_negative = matches(column.categories, r"-$|^\(") & is_beside
        do = "write the sign of a number first," if is_negative.any() else _DROP
        return found_almost._replace(remedy=f"{found_almost.remedy} {do}")
    return found_almost


_DROP = "--numeric NAME for the number without the text beside it,"


def units_of(text: Any, *, is_wanted: bool = False) -> tuple[str, ...]:
    """Return the texts beside the numbers of a column: the same in nearly all cells.

    They are any that several cells have if the user wants numbers. Names with a number (``K17``),
    codes (``#007``) and negative numbers in the way of accountants (``35-``, ``(35)``) have none.
    """
    some = without_gaps(without_units(text[:_LOOKED_AT], ()), GAPS).drop_null()
    may_be = is_wanted or (are_mostly(some, _BESIDE) and not are_mostly(some, NUMBER))
    if len(some) and not may_be:
        return ()
    column = read_categories(WrittenColumn(without_units(text, ()), "", GAPS))
    is_like_one = matches(column.categories, _BESIDE)
    if not len(is_like_one) or not (is_wanted or column.is_nearly_all(is_like_one)):
        return ()
    counts = np.bincount(column.codes + 1)[1:]
    parts = pc.extract_regex(column.categories, _BESIDE).to_pylist()
    rows, is_padded, num_fractions = Counter[tuple[str, str]](), False, 0
    for one, count in zip(parts, counts.tolist(), strict=True):
        if one is not None:
            rows[one["before"].lstrip(" +-"), one["after"].strip()] += count
            is_padded |= re.match(r"[+-]?0\d", one["number"]) is not None
            num_fractions += re.search(r"[.,]\d", one["number"]) is not None
    del rows["", ""]
    enough = 2 if is_wanted else NEARLY_ALL * counts.sum()
    forms = [form for form, count in rows.items() if count >= enough]
    if is_wanted:
        forms = [one for one in forms if not set("-()") & set("".join(one))]
    elif not forms or is_padded or set("-()") & set("".join(forms[0])):
        return ()
    elif re.search(r"[^\W\d_]", before := forms[0][0]):
        are_amounts = before.endswith(" ") and num_fractions * 2 >= len(parts)
        if not (are_amounts or is_currency(before)):
            return ()
    return tuple(sorted({part.strip() for form in forms for part in form} - {""}))


def plain_numbers(
    columns: Mapping[str, Any], numeric: Collection[str] = (), as_written: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Sequence[str]]]:
    """Return columns of numbers without the texts beside them, and these texts (``units_of``).

    The user says that ``numeric`` columns are numbers, and that columns ``as_written`` are not.
    """
    plain: dict[str, Any] = {}
    units: dict[str, Sequence[str]] = {}
    for name, cells in columns.items():
        own = as_text(cells) if name not in as_written and is_text(cells.type) else None
        if own is None:
            continue
        if beside := units_of(own, is_wanted=name in numeric):
            units[name] = beside
        bare = without_units(own, beside)
        if beside or (bare is not own and are_mostly(bare, NUMBER)):
            plain[name] = bare
    return plain, units


def is_currency(text: str) -> bool:
    return bool(re.fullmatch("[A-Z]{3} ", text)) or "Sc" in map(unicodedata.category, text)


def matches(texts: Any, pattern: str) -> NDArray[np.bool_]:
    found = pc.match_substring_regex(texts, pattern)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


def are_mostly(text: Any, form: str) -> bool:
    share = pc.mean(pc.match_substring_regex(text, form)).as_py()
    return share is not None and share >= 0.5


Kind = Literal["empty", "constant", "whole", "number", "time", "other time", "text", "other"]
"""The kind of a column's cells: nothing; one value; whole numbers; numbers; dates or times (of ISO
8601, or in another form); texts; or something that is none of these, such as a list."""

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


_WHOLE = r"^[+-]?\d+$"
_COMPACT_DATE = r"^(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$"
_PADDED = r"^0\d\d+$"
_MOST_SHAPES = 12
_LOOKED_AT = 1000  # cells that decide whether a column is worth adding up


class Column(NamedTuple):
    """The content of one column."""

    name: str
    kind: Kind
    num_rows: int
    missing: int
    gaps: tuple[str, ...]  # the texts in this column that mean "no value"
    distinct: int  # number of distinct values, without gaps
    values: tuple[str, ...]  # distinct, the most frequent first; at most ``MOST_VALUES``
    counts: tuple[int, ...]  # rows of each of them
    reason: str  # why the whole numbers look like codes and not quantities; empty if they do not
    doubt: tuple[str, str] = ("", "")  # what was decided, and the option that decides otherwise
    identifies: str = ""  # why the values seem to be drawn without replacement, as identifiers are
    low: float = 0.0  # the least of the numbers; 0 for other cells
    high: float = 0.0
    total: float = 0.0  # of the numbers, if more than five are not 0
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
    kind, nearly, formats = _kind_of(cells.type, found)
    values, counts = found.categories, np.bincount(found.codes + 1)[1:]
    numbers = np.zeros(0)
    if kind in {"whole", "number"}:
        numbers = read_numbers(WrittenColumn(pa.chunked_array([values]), "")).values
    if np.isnan(numbers).any():  # other spellings of NaN
        is_value = ~np.isnan(numbers)
        values, numbers = values.filter(pa.array(is_value)), numbers[is_value]
        counts = counts[is_value]
    order = np.argsort(-counts, kind="stable")[:MOST_VALUES]
    reason, doubt = "", ("", "")
    if kind == "whole":
        widths = np.unique(pc.utf8_length(values).to_numpy())
        is_padded = len(widths) == 1 and bool(matches(values, _PADDED).any())
        reason, doubt = codes_or_quantities(numbers, counts, is_padded=is_padded)
    elif kind == "text" and not nearly and not pa.types.is_dictionary(cells.type):
        shapes = pc.replace_substring_regex(values, r"\d+([.,]\d+)*", "9").unique()
        is_like_one = matches(values, r"^[^\pL\d]*\d")
        if len(shapes) <= _MOST_SHAPES and found.is_nearly_all(is_like_one):
            what = "texts that begin with a number, read as categories"
            doubt = what, "for quantities, write one number and nothing else in each cell"
    return Column(
        name=name,
        kind=kind,
        num_rows=len(cells),
        missing=len(cells) - int(counts.sum()),
        gaps=gaps,
        distinct=len(values),
        values=tuple(values.take(pa.array(order)).to_pylist()),
        counts=tuple(counts[order].tolist()),
        reason=reason,
        doubt=doubt,
        identifies="" if nearly else why_identifiers(numbers, counts),
        low=float(numbers.min()) if len(numbers) else 0.0,
        high=float(numbers.max()) if len(numbers) else 0.0,
        total=float(numbers @ counts) if counts[: len(numbers)] @ (numbers != 0) > 5 else 0.0,
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


def columns_of_sums(columns: Sequence[Column], cells: Mapping[str, Any], row: int) -> list[str]:
    """Return the columns where a row is the sum of all others; a single one may be chance."""
    found = []
    for column in columns:
        if column.total:
            own = WrittenColumn(cells[column.name][row:][:1], "", column.gaps)
            if np.isclose(2 * read_numbers(own).values[0], column.total, rtol=1e-6, atol=0):
                found.append(column.name)
    return found if len(found) > 1 else []


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


def _kind_of(written_as: Any, column: CategoricalColumn) -> _Found:
    """Return the kind of the cells, the form of nearly all cells, and the forms of times."""
    texts = column.categories
    is_number = are_numbers(texts)
    is_typed = pa.types.is_floating(written_as) or pa.types.is_decimal(written_as)
    if is_typed and not is_number.all():
        return "number", almost(column, "finite numbers of float32", is_number), ()
    if len(texts) <= 1:
        return "constant" if len(texts) else "empty", None, ()
    # Times of day and durations only have a text, and a dictionary is its owner's own word for
    # categories.
    if pa.types.is_temporal(written_as) or pa.types.is_dictionary(written_as):
        is_time = pa.types.is_date(written_as) or pa.types.is_timestamp(written_as)
        return "time" if is_time else "text", None, ()
    if is_text(written_as) and matches(texts, _COMPACT_DATE).all():
        return "other time", None, ("%Y%m%d",)
    if is_typed or is_number.all():
        is_whole = matches(texts, _WHOLE).all() and not pa.types.is_floating(written_as)
        return "whole" if is_whole else "number", None, ()
    return _kind_of_texts(column, is_number)


def _kind_of_texts(column: CategoricalColumn, is_number: NDArray[np.bool_]) -> _Found:
    texts = column.categories
    forms = time_formats(texts)
    fitting = tuple(form for form, is_time in forms.items() if is_time.all())
    if fitting or np.logical_or.reduce([*forms.values()]).all():
        return "time" if None in fitting else "other time", None, fitting
    is_time = max(forms.values(), key=lambda one: int(one.sum()))
    if column.is_nearly_all(is_time):
        return "text", almost(column, "dates or times", is_time), ()
    return "text", almost_numbers(column, is_number), ()


_MOST_CODES = 1000
LEAST_REPEATS = 20
_SPARSE = 0.5
_TAIL = 0.05  # share of the rows at either end whose numbers do not say how dense they are
_EVEN = 0.35  # mean place in their range; from it on, numbers do not thin out upwards
_APART = 0.7  # median logarithm of the ratio of two neighbours' rows; unrelated from it on
_LEAST_COINCIDENCES = 20


def codes_or_quantities(
    numbers: NDArray[np.float64], counts: NDArray[np.int64], *, is_padded: bool
) -> tuple[str, tuple[str, str]]:
    """Say why whole numbers are codes, empty if they are quantities, and what is in doubt.

    Quantities use most of the numbers where most rows are, or are most often at the smallest, as
    counts are, and neighbours among them are used similarly often. What is used again and again
    may be either; codes then leave most numbers out, and lie evenly in their range.
    """
    if len(numbers) < 3 or numbers.min() < 0:
        return "", ("", "")
    if is_padded:
        return "digits of one width, some of which begin with 0", ("", "")
    order = np.argsort(numbers)
    numbers, counts = numbers[order], counts[order]
    steps = np.diff(numbers)
    unit = float(np.gcd.reduce(steps[steps < 2**53].astype(np.int64))) or 1.0
    share = (np.cumsum(counts) - counts / 2) / counts.sum()
    is_usual = (share >= _TAIL) & (share <= 1 - _TAIL)
    is_usual |= np.count_nonzero(is_usual) < 3
    usual, logs = numbers[is_usual], np.log(counts[is_usual])
    repeats = counts.sum() / len(numbers)
    if len(numbers) < 5 or repeats < 2 or counts[0] == counts.max():
        return "", ("", "")
    is_sparse = len(usual) < _SPARSE * (np.ptp(usual) / unit + 1)
    # Of independent frequencies, two in three are higher or lower than both neighbours.
    turns = np.count_nonzero(np.diff(np.sign(np.diff(counts))))
    is_rough = 2 * turns >= len(numbers) - 2
    is_often = repeats >= LEAST_REPEATS
    if not is_sparse and not (is_rough and is_often and np.median(np.abs(np.diff(logs))) >= _APART):
        return "", ("", "")
    is_even = np.mean((numbers - numbers[0]) / np.ptp(numbers)) >= _EVEN
    if is_sparse and is_rough and is_even and is_often and len(numbers) <= _MOST_CODES:
        why = "few of the numbers in their range are used, again and again"
        return why, ("whole numbers that may be quantities, read as categories", "--numeric")
    return "", ("whole numbers that may be codes, read as numbers", "--categorical")


def why_identifiers(numbers: NDArray[np.float64], counts: NDArray[np.int64]) -> str:
    """Say that values repeat far less often than any values that are drawn independently.

    Of n rows whose values lie among w whole numbers, n^2 / 2w pairs at least are expected to be
    equal, and where P pairs are, 2 P^2 / 3n triples at least (by Jensen's and Lyapunov's
    inequalities; even frequencies have the fewest).
    """
    rows = float(counts.sum())
    pairs = float((counts * (counts - 1.0)).sum() / 2)
    triples = float((counts * (counts - 1.0) * (counts - 2.0)).sum() / 6)
    least = 0.0
    if len(numbers) > 2 and (numbers == np.floor(numbers)).all():
        least = rows * (rows - 1) / 2 / (np.ptp(numbers) + 1)
    if least >= _LEAST_COINCIDENCES and pairs <= least / 4:
        return "whole numbers that repeat far less often than by chance"
    least = 2 * pairs**2 / (3 * rows) if rows else 0.0
    if least >= _LEAST_COINCIDENCES and triples <= least / 2:
        return f"values that each stand in no more than {counts.max()} rows"
    return ""

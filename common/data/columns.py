"""Selects a file's feature columns, and checks and converts the values of its columns.

Row numbers in messages count from 1, without the header line.
"""

import fnmatch
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.settings import DataSettings, FeatureSettings, Gaps
from splitveil.common.data.sources import ArrowColumn, RowSource, list_rows
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.run.sample_order import SPLITS
from splitveil.common.text.wording import suggest

_logger = logging.getLogger(__name__)

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_MANTISSA_BITS = {16: 11, 32: 24, 64: 53}
"""Power of 2 above which neighbouring whole numbers become the same, by the type's width."""
MAX_WEIGHT = 1_000_000
NEARLY_ALL = 0.9
"""Share of the cells, or of the distinct texts, that makes the others probable mistakes."""
WILDCARDS = frozenset("*?[")
_UNNAMED_INDEX = r"__index_level_\d+__|Unnamed: \d+(\.\d+)*"
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?(?i:inf|infinity|nan)$"
_MARKS = " '\u2019\u00a0\u202f\u2009"
"""Marks between thousands that are never decimal ones."""
NUMBERS_BY_DECIMAL = {
    decimal: rf"^[+-]?((\d+|[1-9]\d{{0,2}}([{other}{_MARKS}]\d{{3}})+)([{decimal}]\d*)?"
    rf"|[{decimal}]\d+)([eE][+-]?\d+)?$"
    for decimal, other in (".,", ",.")
}
"""Numbers by their decimal mark, perhaps with marks between their thousands."""


class WrittenColumn(NamedTuple):
    """A column of some rows, as written in the file."""

    cells: ArrowColumn
    where: str
    missing_texts: Sequence[str] = ()
    """Cells that mean "no value"."""

    first_row: int = 1
    decimal: str | None = None
    """The decimal mark of numbers that are written as text, perhaps with marks between thousands;
    without it, they have points and no marks."""

    units: Sequence[str] = ()
    """Texts before or after the numbers, which are dropped."""

    def list_rows(self, is_wrong: NDArray[np.bool_]) -> str:
        """Name the rows where a condition holds."""
        return list_rows(np.flatnonzero(is_wrong) + self.first_row)

    def check(self, is_wrong: NDArray[np.bool_], expected: str) -> None:
        """Raise DataError, which names the rows, if any row lacks the expected content."""
        if is_wrong.any():
            raise DataError(f"{self.where}: expected {expected} in {self.list_rows(is_wrong)}")


Numbers = NDArray[np.float64] | NDArray[np.float32]
"""Numbers of a column, as wide as the file stores them; whoever computes with them widens them."""


class CategoricalColumn(NamedTuple):
    """A column of text with few distinct values."""

    codes: NDArray[np.int32]  # per row, the index into ``categories``; -1 for a missing value
    categories: Any  # pyarrow array of the distinct texts

    def rows_of(self, is_it: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows hold a text that meets a condition."""
        return np.asarray(np.append(is_it, False)[self.codes], np.bool_)

    def is_nearly_all(self, is_it: NDArray[np.bool_]) -> bool:
        """Return whether a condition holds for nearly all cells, or nearly all distinct texts."""
        if is_it.mean() < 0.5:  # spares the reading of all codes, which may be on disk
            return False
        num_right, num_cells = self.rows_of(is_it).sum(), (self.codes >= 0).sum()
        return bool(is_it.mean() >= NEARLY_ALL or num_right >= NEARLY_ALL * num_cells)


class _Numbers(NamedTuple):
    values: NDArray[np.float64]  # NaN where the cell holds no number
    is_unreadable: NDArray[np.bool_]  # the cell holds text that is not a number


class ChosenColumns(NamedTuple):
    """The feature columns by how they are read, in the file's order."""

    numeric: list[str]
    categorical: list[str]
    timestamps: list[str]
    lists: list[str]
    sequences: list[str]

    @classmethod
    def none(cls) -> "ChosenColumns":
        return cls(*([] for _ in cls._fields))


class _Requested(NamedTuple):
    names: Mapping[str, None]
    patterns: Sequence[str]

    @classmethod
    def of(cls, entries: Sequence[str], names: Set[str], *, may_match: bool) -> "_Requested":
        """Divide entries: one that is the name of a column is no pattern, whatever is in it."""
        literal = [x for x in entries if not may_match or x in names or not WILDCARDS & set(x)]
        odd = [x for x in literal if may_match and WILDCARDS & set(x)]
        if meant := [repr(one) for one in odd if fnmatch.filter(names - {one}, one)]:
            what = ", ".join(meant)
            _logger.warning("data.features: read as names of columns, not as patterns: %s", what)
        named = dict.fromkeys(literal)
        return cls(named, [one for one in entries if one not in named])

    def closeness(self, name: str) -> int:
        """Rate how directly a column is requested: 3 by name, 2 by pattern, 1 by ``*``, else 0."""
        if name in self.names:
            return 3
        matching = [one for one in self.patterns if fnmatch.fnmatchcase(name, one)]
        return max((1 if pattern == "*" else 2 for pattern in matching), default=0)


def select_features(
    settings: FeatureSettings, names: Sequence[str], reserved: Sequence[str], source: str
) -> ChosenColumns:
    existing = frozenset(names)
    named = partial(_Requested.of, names=existing, may_match=settings.patterns)
    # Nobody can ask for a column without a name, such as the row numbers that pandas writes.
    candidates = [name for name in names if name and name not in reserved]
    ways = (settings.numeric, settings.categorical, settings.timestamps, settings.lists)
    requested, excluded = [*map(named, ways)], named(settings.exclude)
    chosen = ChosenColumns.none()
    both = []
    for name in candidates:
        if name in settings.sequences:
            chosen.sequences.append(name)
            continue
        closeness = [way.closeness(name) for way in requested]
        if max(closeness) < 3 and (is_unnamed_index(name) or excluded.closeness(name)):
            continue
        if closeness.count(max(closeness)) == 1:
            chosen[closeness.index(max(closeness))].append(name)
        elif any(closeness):
            both.append(name)
    by_name = [*settings.sequences, *(name for way in requested for name in way.names)]
    if wrong := [name for name in by_name if name in reserved] + both:
        raise SettingsError(
            f"data.features: {', '.join(map(repr, wrong))}: a column is one of "
            f"id, label, split, numeric, categorical, timestamps, lists and sequences"
        )
    patterns = [one for way in requested for one in way.patterns]
    unmatched = [one for one in patterns if not fnmatch.filter(candidates, one)]
    unmatched += [one for one in excluded.patterns if not fnmatch.filter(existing, one)]
    absent = [name for name in excluded.names if name not in existing]
    check_columns_exist([*by_name, *absent, *unmatched], names, source)
    return chosen


class Selection(NamedTuple):
    """The columns of a source that the settings select."""

    chosen: ChosenColumns
    numeric: list[str]  # the columns of numbers that they become: parts of timestamps come last
    needed: list[str]  # all selected columns; id, label and split first

    @property
    def coded(self) -> list[str]:
        """The columns that become codes: categorical ones, then lists, then sequences."""
        return [*self.chosen.categorical, *self.chosen.lists, *self.chosen.sequences]


def select_columns(
    settings: DataSettings, source: RowSource, split_column: str | None = None
) -> Selection:
    """Find the columns that the settings name and the contract's split column.

    DataError if one is missing, SettingsError if one is requested for two purposes.
    """
    features = settings.features
    names = source.column_names()
    own = (*settings.id_columns, settings.label_column, settings.weight_column)
    if split_column is not None and split_column in own:
        raise SettingsError(f"contract.split.column: {split_column!r} is the id, label or weight")
    reserved = [name for name in (*own, split_column) if name is not None]
    chosen = ChosenColumns.none()
    if features:
        chosen = select_features(features, names, reserved, source.name)
        absent = [name for name in features.missing_texts_of if name not in names]
        check_columns_exist(absent, names, source.name)
    needed = list(dict.fromkeys([*reserved, *(name for way in chosen for name in way)]))
    check_columns_exist(needed, names, source.name)
    parts = features.timestamp_parts if features else ()
    numeric = [*chosen.numeric, *(part_name(n, p) for n in chosen.timestamps for p in parts)]
    if twice := [name for name, count in Counter(numeric).items() if count > 1]:
        raise SettingsError(
            f"data.features: {', '.join(map(repr, twice))}: parts of a timestamp have this name"
        )
    return Selection(chosen, numeric, needed)


def part_name(column: str, part: str) -> str:
    return f"{column}.{part}"


def check_columns_exist(wanted: Sequence[str], names: Sequence[str], source: str) -> None:
    """Check that each wanted column occurs exactly once; DataError names those that do not."""
    found = Counter(names)
    problems = [
        f"{source}: there is no column {name!r}{suggest(name, names)}"
        for name in wanted
        if not found[name]
    ]
    problems += [
        f"{source}: there are {found[name]} columns {name!r}" for name in wanted if found[name] > 1
    ]
    if problems:
        raise DataError("\n".join(problems))


def read_ids(column: WrittenColumn, *, may_be_floats: bool = False) -> list[str]:
    """Return the ids as written in the file; a missing id becomes the empty text.

    Whole numbers may be stored as floating-point numbers, as tables with gaps often have them,
    except those so large that neighbours run together.
    """
    if may_be_floats and pa.types.is_floating(column.cells.type):
        numbers = pc.fill_null(pc.cast(column.cells, pa.float64()), np.nan).to_numpy()
        is_missing = np.isnan(numbers)
        bits = _MANTISSA_BITS[column.cells.type.bit_width]
        is_wrong = ~is_missing & ((np.abs(numbers) > 2.0**bits) | (np.floor(numbers) != numbers))
        column.check(is_wrong, f"whole numbers up to 2^{bits}")
        whole = np.where(is_missing, 0, numbers).astype(np.int64).tolist()
        return [
            "" if missing else str(number)
            for number, missing in zip(whole, is_missing.tolist(), strict=True)
        ]
    texts: list[str] = pc.fill_null(_as_text(column), "").to_pylist()
    return texts


def read_weights(column: WrittenColumn) -> NDArray[np.float64]:
    weights = read_numbers(column).values
    is_right = (weights > 0) & (weights <= MAX_WEIGHT)
    column.check(~is_right, f"a weight above 0, at most {MAX_WEIGHT:,},")
    return weights


def read_splits(column: WrittenColumn) -> NDArray[np.int8]:
    """Return each row's split as an index into ``SPLITS``."""
    text = pc.utf8_trim_whitespace(_as_text(column))
    indices = pc.index_in(text, value_set=pa.array(SPLITS, pa.string()))
    codes = pc.fill_null(indices, -1).to_numpy()
    column.check(codes < 0, f"{', '.join(SPLITS[:-1])} or {SPLITS[-1]}")
    return np.asarray(codes, np.int8)


def read_numeric(columns: Mapping[str, WrittenColumn], gaps: Gaps) -> dict[str, Numbers]:
    """Return the columns as finite numbers, and NaN only for gaps that are kept.

    What the file stores as float32 stays float32, at half the memory. DataError has one line per
    kind of problem in each column.
    """
    problems: list[str] = []
    result: dict[str, Numbers] = {}
    for name, column in columns.items():
        values, is_unreadable = read_numbers(column)
        is_missing = np.isnan(values) & ~is_unreadable
        # Models compute in float32, where larger numbers become infinite.
        is_infinite = np.abs(values) > LARGEST_FLOAT32
        if is_unreadable.any():
            problems.append(
                f"{column.where}: expected numbers, found text in {column.list_rows(is_unreadable)}"
                f"{_advice_on_decimals(column, is_unreadable)}"
            )
        if is_infinite.any():
            problems.append(
                f"{column.where}: infinite or too large for float32 in "
                f"{column.list_rows(is_infinite)}; if such a cell means that there is no value, "
                f"name its text, such as inf, in data.features.missing_texts"
            )
        if gaps == "refused" and is_missing.any():
            problems.append(
                f"{column.where}: no number (empty or NaN) in {column.list_rows(is_missing)}; with "
                f"data.features.missing_numeric: zero, these cells are read as 0"
            )
        known = values if gaps == "nan" else np.where(is_missing, 0.0, values)
        is_small = pa.types.is_floating(column.cells.type) and column.cells.type.bit_width < 64
        result[name] = known.astype(np.float32) if is_small else known
    if problems:
        raise DataError("\n".join(problems))
    return result


def _advice_on_decimals(column: WrittenColumn, is_unreadable: NDArray[np.bool_]) -> str:
    text = clean_text(column).filter(pa.array(is_unreadable))
    fitting = [
        f"'{decimal}'"
        for decimal, pattern in NUMBERS_BY_DECIMAL.items()
        if decimal != column.decimal and pc.all(pc.match_substring_regex(text, pattern)).as_py()
    ]
    return f"; with data.source.decimal: {' or '.join(fitting)}, these are numbers" * bool(fitting)


def are_numbers(texts: Any) -> NDArray[np.bool_]:
    """Return which texts are numbers that a model can compute with."""
    values, is_unreadable = read_numbers(WrittenColumn(pa.chunked_array([texts]), "texts"))
    return ~is_unreadable & ~(np.abs(values) > LARGEST_FLOAT32)


def is_unnamed_index(name: str) -> bool:
    """Return whether pandas gave a column this name: it holds the numbers of a table's rows."""
    return re.fullmatch(_UNNAMED_INDEX, name) is not None


def read_categories(column: WrittenColumn) -> CategoricalColumn:
    """Return a column's distinct texts, and the text of each row as an index into them."""
    text = clean_text(column)
    encoded = pc.dictionary_encode(text).unify_dictionaries().combine_chunks()
    return CategoricalColumn(pc.fill_null(encoded.indices, -1).to_numpy(), encoded.dictionary)


def _as_text(column: WrittenColumn) -> ArrowColumn:
    kind, is_floating = column.cells.type, pa.types.is_floating(column.cells.type)
    if getattr(kind, "extension_name", None) == "arrow.uuid":
        texts = [None if one is None else str(one) for one in column.cells.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.string())])
    try:
        if is_floating:
            raise pa.ArrowTypeError("a floating-point number has no unique text form")
        return pc.cast(column.cells, pa.string())
    except pa.ArrowException as error:
        why = "as texts, 7.0 and 7 differ (in ids, unless contract.ids says whole_numbers: true)"
        advice = f": {why}" * is_floating
        raise DataError(
            f"{column.where}: expected text or whole numbers, not {kind}{advice}"
        ) from error


def clean_text(column: WrittenColumn) -> ArrowColumn:
    """Return text without surrounding white space, null for missing values."""
    text = pc.utf8_trim_whitespace(_as_text(column))
    is_missing = pc.is_in(text, value_set=pa.array(column.missing_texts, pa.string()))
    return pc.if_else(is_missing, pa.scalar(None, pa.string()), text)


_ASCII = str.maketrans("\u2212\uff0d\uff0b\uff0e\uff0c\u066b\u066c", "--+.,.'")
"""The signs that go with decimal digits which are none of ASCII."""


def without_units(text: ArrowColumn, units: Sequence[str]) -> ArrowColumn:
    """Return texts with digits of ASCII, and without a unit before or after them."""
    if not pc.all(pc.string_is_ascii(text)).as_py():
        found = pc.unique(text)
        plain = [
            one and re.sub(r"\d", lambda digit: str(int(digit[0])), one.translate(_ASCII))
            for one in found.to_pylist()
        ]
        text = pc.take(pa.array(plain, pa.string()), pc.index_in(text, value_set=found))
    if units:
        unit = f"(?:{'|'.join(map(re.escape, sorted(units, key=len, reverse=True)))})?"
        form = rf"^([+-]?)\s*{unit}\s*([+-]?[\d.,].*?)\s*{unit}$"
        text = pc.replace_substring_regex(text, form, r"\1\2")
    return text


def with_points(text: ArrowColumn, decimal: str) -> ArrowColumn:
    """Return numbers with a decimal point and nothing between thousands; others become none."""
    is_right = pc.match_substring_regex(text, NUMBERS_BY_DECIMAL[decimal])
    other = "." if decimal == "," else ","
    plain = pc.replace_substring_regex(text, f"[{other}{_MARKS}]", "")
    plain = pc.replace_substring(plain, ",", ".")
    return pc.if_else(is_right, plain, pc.replace_substring(text, ".", ".."))


def read_numbers(column: WrittenColumn) -> _Numbers:
    """Read a column as numbers, and say which of its cells are none."""
    cells = column.cells
    is_unreadable = np.zeros(len(cells), dtype=np.bool_)
    if pa.types.is_dictionary(cells.type):
        cells = pc.cast(cells, cells.type.value_type)
    if is_text(cells.type):
        cells = without_units(clean_text(column._replace(cells=cells)), column.units)
        cells = with_points(cells, column.decimal) if column.decimal else cells
    try:
        numbers = pc.cast(cells, pa.float64(), safe=False)
    except pa.ArrowNotImplementedError as error:
        raise DataError(f"{column.where}: expected numbers, not {cells.type}") from error
    except pa.ArrowInvalid:
        is_number = pc.match_substring_regex(cells, NUMBER)
        is_unreadable = ~pc.fill_null(is_number, True).to_numpy(zero_copy_only=False)
        readable = pc.if_else(is_number, cells, pa.scalar(None, pa.string()))
        numbers = pc.cast(readable, pa.float64())
    values = numbers.to_numpy()
    is_infinite = np.abs(values) > LARGEST_FLOAT32
    if is_infinite.any() and pa.types.is_floating(cells.type):
        texts = clean_text(column._replace(cells=pc.cast(cells, pa.string())))
        values = np.where(is_infinite & pc.is_null(texts).to_numpy(), np.nan, values)
    return _Numbers(values, is_unreadable)


def is_numeric(kind: pa.DataType) -> bool:
    """Return whether a type's cells are numbers."""
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    """Return whether a type's cells are texts, which Impala and others store as bytes."""
    if pa.types.is_fixed_size_binary(kind):
        return True
    return kind in {pa.string(), pa.large_string(), pa.binary(), pa.large_binary()}

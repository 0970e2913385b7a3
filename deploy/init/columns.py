"""Describes one column of a table: what its cells hold, how many there are of each, and its gaps.

Everything is judged by the cells' texts, as the readers of a run judge them. What is found is meant
for the table's owner only.
"""

import re
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import NUMBER

Kind = Literal["empty", "constant", "whole", "number", "time", "odd time", "text", "other"]
"""What the cells of a column hold: nothing; one value; whole numbers; numbers; dates or times (of
ISO 8601, or in another form); texts; or something that is none of these, such as a list."""

GAPS = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "none", "-", "#N/A")
"""Texts that mean "no value" where a column holds them beside other cells."""

CODE_WORDS = frozenset(
    [
        "agent",
        "app",
        "area",
        "branch",
        "brand",
        "category",
        "channel",
        "city",
        "class",
        "code",
        "country",
        "county",
        "device",
        "district",
        "id",
        "ids",
        "ip",
        "kind",
        "merchant",
        "model",
        "os",
        "plz",
        "postcode",
        "product",
        "region",
        "sector",
        "shop",
        "sku",
        "state",
        "store",
        "terminal",
        "type",
        "vendor",
        "zip",
        "zipcode",
    ]
)
"""Words in the names of columns whose whole numbers are codes and not quantities."""

_WHOLE = r"^[+-]?\d+$"
_ISO_TIME = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})?)?$"
_TIME = r"^\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T]\d{1,2}:\d{2}.*)?$|^\d{1,2}[/.]\d{1,2}[/.]\d{4}( .*)?$"
_MOST_CODES = 1000
_LEAST_REPEATS = 20
_SPARSE = 0.5


class Column(NamedTuple):
    """What one column holds."""

    name: str
    kind: Kind
    num_rows: int

    missing: int
    """Number of cells that hold no value."""

    gaps: tuple[str, ...]
    """The texts in this column that mean "no value"."""

    distinct: int
    """Number of distinct values, without gaps."""

    values: tuple[str, ...]
    """The distinct values, the most frequent first; at most ``KEPT_VALUES`` of them."""

    counts: tuple[int, ...]
    """Number of rows of each value in ``values``."""

    skewness: float
    """Third standardised moment of the numbers; 0 for other cells."""

    looks_like_codes: bool
    """Whether the whole numbers are codes, with an embedding each, and not quantities."""

    reason: str
    """Why they look like codes, in words; empty if they do not."""

    low: float = 0.0
    """The least of the numbers; 0 for other cells."""

    high: float = 0.0
    """The greatest of the numbers."""

    variance: float = 0.0
    """Of the numbers over the rows."""

    @property
    def present(self) -> int:
        """The number of cells with a value."""
        return self.num_rows - self.missing

    @property
    def is_unique(self) -> bool:
        """Whether every row has a value of its own."""
        return not self.missing and self.distinct == self.num_rows

    def in_words(self) -> str:
        """Describe the column, without any of its values."""
        what = {
            "empty": "no values",
            "constant": "the same value in every row",
            "whole": f"whole numbers, {self.distinct:,} distinct",
            "number": f"numbers, {self.distinct:,} distinct",
            "time": "dates or times",
            "odd time": "dates or times, but not as ISO 8601 writes them",
            "text": f"texts, {self.distinct:,} distinct",
            "other": "neither texts nor numbers",
        }[self.kind]
        if not self.missing or self.kind == "empty":
            return what
        shown = ", ".join("empty" if gap == "" else repr(gap) for gap in self.gaps)
        return f"{what}; {self.missing:,} gaps{f' ({shown})' if shown else ''}"


KEPT_VALUES = 200
"""Values of a column that are kept: more than any label has classes."""


def describe(name: str, cells: Any) -> Column:
    """Describe a column.

    Args:
        name: its name.
        cells: a pyarrow ChunkedArray of any type.
    """
    text = as_text(cells)
    if text is None:
        return Column(name, "other", len(cells), cells.null_count, (), 0, (), (), 0.0, False, "")
    gaps = _gaps_of(text)
    filled = without_gaps(text, gaps)
    counted = pc.value_counts(filled.drop_null())
    values, counts = counted.field("values"), counted.field("counts").to_numpy()
    kind = _kind_of(cells.type, values)
    order = np.argsort(-counts, kind="stable")[:KEPT_VALUES]
    numbers = _numbers(values) if kind in {"whole", "number"} else np.zeros(0)
    reason = _reason_for_codes(name, kind, numbers, counts)
    has_numbers = bool(len(numbers) and np.isfinite(numbers).all())
    return Column(
        name=name,
        kind=kind,
        num_rows=len(cells),
        missing=filled.null_count,
        gaps=gaps,
        distinct=len(values),
        values=tuple(values.take(pa.array(order)).to_pylist()),
        counts=tuple(counts[order].tolist()),
        skewness=_skewness(numbers, counts),
        looks_like_codes=bool(reason),
        reason=reason,
        low=float(numbers.min()) if len(numbers) else 0.0,
        high=float(numbers.max()) if len(numbers) else 0.0,
        variance=_variance(numbers, counts) if has_numbers else 0.0,
    )


def as_text(cells: Any) -> Any | None:
    """Return a column's cells as texts without surrounding white space; None if they have none."""
    kind = cells.type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return None
    try:
        return pc.utf8_trim_whitespace(pc.cast(cells, pa.string()))
    except pa.ArrowException:
        return None


def without_gaps(text: Any, gaps: tuple[str, ...]) -> Any:
    """Return the texts with null in place of every gap."""
    is_gap = pc.is_in(text, value_set=pa.array(gaps, pa.string()))
    return pc.if_else(is_gap, pa.scalar(None, pa.string()), text)


def _gaps_of(text: Any) -> tuple[str, ...]:
    present = set(pc.unique(text).to_pylist())
    return tuple(gap for gap in GAPS if gap in present)


def _kind_of(written_as: Any, values: Any) -> Kind:
    if len(values) <= 1:
        return "constant" if len(values) else "empty"
    if pa.types.is_temporal(written_as):
        return "time"
    if pa.types.is_floating(written_as) or pa.types.is_decimal(written_as):
        return "number"
    forms: tuple[tuple[str, Kind], ...] = (
        (_WHOLE, "whole"),
        (NUMBER, "number"),
        (_ISO_TIME, "time"),
        (_TIME, "odd time"),
    )
    return next((kind for form, kind in forms if _all_match(values, form)), "text")


def _all_match(values: Any, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())


def _numbers(values: Any) -> NDArray[np.float64]:
    return np.asarray(pc.cast(values, pa.float64(), safe=False).to_numpy(), np.float64)


def _variance(numbers: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    centred = numbers - np.average(numbers, weights=counts)
    return float(np.average(centred**2, weights=counts))


def _skewness(numbers: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    is_finite = np.isfinite(numbers)
    numbers, counts = numbers[is_finite], counts[: len(is_finite)][is_finite]
    if len(numbers) < 2:
        return 0.0
    centred = numbers - np.average(numbers, weights=counts)
    spread = np.sqrt(np.average(centred**2, weights=counts))
    return float(np.average((centred / spread) ** 3, weights=counts)) if spread > 0 else 0.0


def _reason_for_codes(
    name: str, kind: Kind, numbers: NDArray[np.float64], counts: NDArray[np.int64]
) -> str:
    """Say why whole numbers are codes; empty if they are quantities.

    Quantities use most of the numbers between their smallest and their largest, or are most often
    at the smallest, as counts are; codes are used again and again, and leave most numbers out.
    """
    if kind != "whole" or len(numbers) < 3 or numbers.min() < 0:
        return ""
    if CODE_WORDS & set(re.split(r"[^a-z]+", name.lower())):
        return "named like a code"
    steps = np.diff(np.unique(numbers))
    unit = float(np.gcd.reduce(steps[steps < 2**53].astype(np.int64))) or 1.0
    width = (numbers.max() - numbers.min()) / unit + 1
    is_sparse = len(numbers) / width < _SPARSE
    is_repeated = counts.sum() / len(numbers) >= _LEAST_REPEATS
    starts_highest = counts[np.argmin(numbers)] == counts.max()
    if 5 <= len(numbers) <= _MOST_CODES and is_sparse and is_repeated and not starts_highest:
        return "few of the numbers in their range are used, again and again"
    return ""

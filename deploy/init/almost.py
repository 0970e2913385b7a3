"""Finds columns of which nearly all cells are numbers or times, so that none is misread in silence.

What is found names rows and counts, and no cell.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.data.sources import list_rows

_PERCENT = r"^[+-]?\d*[.,]?\d+\s*%$"
_COMMA = r"^[+-]?(\d*|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?$"
_MARKED = r"^[+-]?(\d+|[1-9]\d{{0,2}}({0}\d{{3}})+)(\.\d+)?$"
_FORMS = (
    ("a percent sign", _PERCENT, "write the column without it, or"),
    (
        "a comma between thousands",
        _MARKED.format(","),
        'write the column without it (a decimal comma: data.source.decimal: ","), or',
    ),
    (
        "marks between thousands",
        _MARKED.format(r"[ '’\x{a0}\x{202f}]"),
        "write the column without them, or",
    ),
    ("a decimal comma", _COMMA, 'data.source.decimal: "," reads them;'),
)
"""Forms that no column of numbers has, each with what to do; of two that fit equally, the first."""

_MOST_TEXTS = 20


class Almost(NamedTuple):
    """A column that is almost of one kind."""

    in_words: str
    """How many cells are, and which rows are not."""

    others: tuple[str, ...]
    """The texts that are not; empty if they are many, or if all cells need another form."""

    remedy: str

    @classmethod
    def of(
        cls, column: CategoricalColumn, what: str, is_right: NDArray[np.bool_], remedy: str
    ) -> "Almost":
        """Describe a column of which some cells are right."""
        wrong = np.flatnonzero(column.rows_of(~is_right)) + 1
        num_cells = np.count_nonzero(column.codes >= 0)
        rest = f"; {list_rows(wrong)} {'is' if len(wrong) == 1 else 'are'} not"
        others = column.categories.filter(~is_right).to_pylist()
        return cls(
            f"{num_cells - len(wrong):,} of {num_cells:,} cells are {what}"
            f"{rest if len(wrong) else ''}",
            () if remedy or len(others) > _MOST_TEXTS else tuple(others),
            remedy or "--missing-text TEXT for a text that means no value,",
        )


def almost_all_numbers(column: CategoricalColumn, is_number: NDArray[np.bool_]) -> Almost | None:
    """Describe a column whose texts are nearly all numbers, possibly in a form that no run reads.

    Args:
        column: without gaps, and not all of them numbers.
        is_number: which of its texts a run reads as numbers.
    """
    candidates = [("numbers", is_number, "")]
    for what, pattern, remedy in _FORMS:
        others = is_number if pattern != _COMMA else False  # to which 1.5 is no number
        candidates.append(
            (f"numbers with {what}", matches(column.categories, pattern) | others, remedy)
        )
    likely = [one for one in candidates if column.is_nearly_all(one[1])]
    if not likely:
        return None
    return Almost.of(column, *max(likely, key=lambda one: column.rows_of(one[1]).sum()))


def matches(texts: Any, pattern: str) -> NDArray[np.bool_]:
    """Return which texts have a form."""
    found = pc.match_substring_regex(texts, pattern)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)

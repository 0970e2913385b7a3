"""Finds columns of which nearly all cells are numbers or times, so that none is misread in silence.

What is found names rows and counts, and no cell.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.data.sources import list_rows

_FORMS = (
    (
        "numbers with marks between thousands",
        r"^[+-]?(\d*|[1-9]\d{0,2}([ ,'’\x{a0}\x{202f}]\d{3})+)(\.\d+)?$",
        'write the column without them (decimal commas: data.source.decimal: ","), or',
    ),
    (
        "numbers with a decimal comma",
        r"^[+-]?(\d*|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?$",
        'data.source.decimal: "," reads them;',
    ),
    (
        "numbers with a percent sign",
        r"^[+-]?\d*[.,]?\d+\s*%?$",
        "write the column without it, or",
    ),
)
"""Forms that no column of numbers has, each with what to do; of those that fit equally, the first.
"""
_MOST_TEXTS = 20


class Almost(NamedTuple):
    """What nearly all cells of a column are."""

    in_words: str
    """How many cells are, and which rows are not."""

    others: tuple[str, ...]
    """The texts that are not, if these may be gaps and are few."""

    remedy: str


def almost(
    column: CategoricalColumn, what: str, is_right: NDArray[np.bool_], remedy: str = ""
) -> Almost:
    """Describe a column of which nearly all cells are right, or all in another form."""
    wrong = np.flatnonzero(column.rows_of(~is_right)) + 1
    num_cells = np.count_nonzero(column.codes >= 0)
    words = f"{num_cells - len(wrong):,} of {num_cells:,} cells are {what}"
    if len(wrong):
        words += f"; {list_rows(wrong)} {'is' if len(wrong) == 1 else 'are'} not"
    others = column.categories.filter(~is_right).to_pylist()
    may_be_gaps = not remedy and len(others) <= _MOST_TEXTS
    remedy = remedy or "--missing-text TEXT for a text that means no value,"
    return Almost(words, tuple(others) if may_be_gaps else (), remedy)


def almost_numbers(column: CategoricalColumn, is_number: NDArray[np.bool_]) -> Almost | None:
    """Describe a column if nearly all of its texts are numbers, as a run reads them or in a form.

    Args:
        column: without gaps, and not all of them numbers.
        is_number: which of its texts a run reads as numbers.
    """
    found = [("numbers", is_number, "")]
    found += [(what, matches(column.categories, form), remedy) for what, form, remedy in _FORMS]
    likely = [one for one in found if column.is_nearly_all(one[1])]
    best = max(likely, key=lambda one: column.rows_of(one[1]).sum(), default=None)
    return None if best is None else almost(column, *best)


def matches(texts: Any, pattern: str) -> NDArray[np.bool_]:
    """Return which texts have a form."""
    found = pc.match_substring_regex(texts, pattern)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)

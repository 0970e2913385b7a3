"""Functions of some rows' features, of which a linear model can be fitted that follows any shape.

    line        the feature, standardised and cut off at five standard deviations
    rank        the normal quantile of its rank, so that no outlier matters
    bend        the part of that above a quantile: a sum of them bends wherever it has to
    value       whether the feature has a certain value, where it has few: categories
    ridge       the positive part of a random combination of two or three ranks: what features tell
                only together (Rahimi and Recht, "Weighted sums of random kitchen sinks", 2008)

Labels are not asked for, so that one and the same functions serve every fold of a cross-fitted
model and every score that is to be explained. What a linear model of them costs is a product of
matrices, where trees go through all rows again for every split.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.pair_aucs import Floats
from splitveil.common.privacy.side_by_side import each

Functions = npt.NDArray[np.float32]
"""Values of functions, (functions, rows)."""

WIDTH = 512
"""Functions, if there are few features."""

_SHARE_OF_SINGLE = 0.75
"""Share of them that looks at one feature each."""
_BENDS = 7
_MOST_VALUES = 24
"""Different values up to which they count as categories."""
_FEWEST_OF_VALUE = 5
"""Rows of a value among those looked at, below which nothing is learned of it."""
_LOOKED_AT = 4_096
"""Rows whose quantiles are those of all."""
_KNOTS = 64
_FARTHEST = 5.0
_SEED = 0
_SMALLEST_SPREAD = 0.03
"""Below it, a function is not stretched to variance 1: it would be 1,000 for a handful of rows."""
_SPREAD_OF_VALUES = 0.2


class RowFunctions(NamedTuple):
    """Functions of some rows' features."""

    values: Functions
    """The first function is 1, and the others have mean 0 and variance 1, but for rare values."""
    num_lines: int
    """Functions after the first one that are lines."""
    num_single: int
    """Functions after the lines that look at one feature."""


class _Column(NamedTuple):
    """One feature of all rows."""

    line: Functions
    rank: Functions
    common_values: Floats
    """Of a category, without the most frequent one; empty for a number."""
    values: Floats
    """Empty for a number."""
    sample: Functions
    """Ranks of the rows that are looked at."""


def functions_of(features: npt.NDArray[Any], *, together: bool = True) -> RowFunctions:
    """Return the functions of each row.

    Args:
        features: (rows, features), finite.
        together: whether to add functions of several features, so that there are ``WIDTH``.

    Returns:
        The constant alone, if no feature differs between two rows.
    """
    generator = np.random.default_rng(_SEED)
    looked_at = generator.permutation(len(features))[:_LOOKED_AT]
    different = (values for values in features.T if values.min() < values.max())
    columns = each(partial(_column, looked_at), different)
    lines = [one.line for one in columns]
    single = [one for found in _single(columns) for one in found] if columns else []
    known = 1 + len(lines) + len(single)
    number = max(WIDTH - known, WIDTH // 4) if together and columns else 0
    functions = np.empty((known + number, len(features)), dtype=np.float32)
    functions[0] = 1
    for row, one in zip(functions[1:], [*lines, *single], strict=False):
        row[:] = one
    if number:
        _put_several(columns, functions[known:], generator)
    return RowFunctions(functions, len(lines), len(single))


def _column(looked_at: npt.NDArray[np.int64], feature: npt.NDArray[Any]) -> _Column:
    # Importing it takes time that only a run that is measured should pay.
    from scipy.special import ndtri  # noqa: PLC0415

    values = feature.astype(np.float64) / np.abs(feature).max()
    different, counts = np.unique(values[looked_at], return_counts=True)
    middle = (np.cumsum(counts) - counts / 2) / len(looked_at)
    knots = np.unique(np.linspace(0, len(different) - 1, _KNOTS).astype(np.int64))
    rank = _standardised(np.interp(values, different[knots], ndtri(middle[knots])))
    by_count = np.argsort(-counts, kind="stable")[1:]
    often = different[by_count[counts[by_count] >= _FEWEST_OF_VALUE]]
    line = np.clip(_standardised(values), -_FARTHEST, _FARTHEST)
    if len(different) > _MOST_VALUES:
        often, values = often[:0], values[:0]
    return _Column(line, rank, often, values, rank[looked_at])


def _single(columns: list[_Column]) -> list[list[Functions]]:
    """Return the functions of one feature each, but for its line."""
    room = int(_SHARE_OF_SINGLE * WIDTH) - 1 - 2 * len(columns)
    numbers = [one for one in columns if not len(one.common_values)]
    bends = min(_BENDS, max(0, room) // len(columns))
    of_values = max(0, room - bends * len(numbers)) // max(1, len(columns) - len(numbers))
    shares = np.arange(1, bends + 1) / (bends + 1)

    def of_column(one: _Column) -> list[Functions]:
        if len(one.common_values):
            found = [one.values == value for value in one.common_values[:of_values]]
        else:
            bent_at = np.unique(np.quantile(one.sample, shares)) if bends else ()
            found = [np.maximum(one.rank - at, 0) for at in bent_at]
        return [one.rank, *(_standardised(values, _SMALLEST_SPREAD) for values in found)]

    return each(of_column, columns)


def _put_several(
    columns: list[_Column], functions: Functions, generator: np.random.Generator
) -> None:
    """Put positive parts of random combinations into functions, (functions, rows)."""
    inputs = [one.rank for one in columns]
    for one in columns:
        inputs += [_standardised(one.values == v, _SPREAD_OF_VALUES) for v in one.common_values]
    weights = np.zeros((len(functions), len(inputs)), dtype=np.float32)
    for of_one in weights:
        together = min(int(generator.integers(2, 4)), len(inputs))
        chosen = generator.choice(len(inputs), together, replace=False)
        drawn = generator.normal(size=together)
        of_one[chosen] = drawn / np.linalg.norm(drawn)
    np.matmul(weights, np.stack(inputs), out=functions)
    shifts = generator.normal(size=len(functions)).astype(np.float32)

    def put(number: int) -> None:
        row = functions[number]
        row += shifts[number]
        _standardise(np.maximum(row, 0, out=row), row, _SMALLEST_SPREAD)

    each(put, range(len(functions)))


def _standardised(values: npt.NDArray[Any], smallest: float = 0.0) -> Functions:
    """Return values with mean 0 and variance 1, or less if they spread less than the smallest."""
    found = np.empty(len(values), dtype=np.float32)
    _standardise(values, found, smallest)
    return found


def _standardise(values: npt.NDArray[Any], out: Functions, smallest: float = 0.0) -> None:
    np.subtract(values, values.mean(dtype=np.float64), out=out, casting="same_kind")
    spread = max(float(out @ out / len(out)) ** 0.5, smallest)
    out /= np.float32(spread or 1.0)

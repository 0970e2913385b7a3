"""Values fitted on the training rows: scales, fills of gaps, and vocabularies."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.category_lists import count_members
from splitveil.common.data.columns import Numbers
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.table import Table

FIT_ROWS = 2**20

ORDERED_NUMBERS = 2**26
"""Numbers that are held at once to find medians and bins, 0.5 GiB."""

BIN_ROWS = 2**16
"""Most training rows that bins are fitted on, evenly spaced in the file if there are more."""


class Fitted:
    def __init__(self, table: Table, settings: FeatureSettings) -> None:
        self._settings = settings
        self._keeps_gaps = table.gaps == "nan"
        self._ranges = {name: _Range() for name in table.numeric}
        self._num_gaps = dict.fromkeys(table.numeric, 0)
        self._counts = {
            name: np.zeros(len(column.categories), np.int64)
            for name, column in table.categorical.items()
        }
        self._sets = {
            name: np.zeros(len(column.categories), np.int64) for name, column in table.lists.items()
        }

    def add(self, table: Table, rows: NDArray[np.int64]) -> None:
        for name, values in table.numeric.items():
            numbers = self._compressed(values[rows])
            if self._keeps_gaps:
                self._num_gaps[name] += int(np.count_nonzero(np.isnan(numbers)))
            self._ranges[name].add(self._present(numbers))
        for columns, counts in ((table.categorical, self._counts), (table.lists, self._sets)):
            for name, column in columns.items():
                codes = column.codes[rows]
                counts[name] += np.bincount(codes[codes >= 0], minlength=len(counts[name]))

    def scales(self) -> dict[str, tuple[float, float]]:
        """Return shift and scale by column."""
        return {name: _scale(found, self._settings) for name, found in self._ranges.items()}

    def fills(self, table: Table, rows: NDArray[np.int64]) -> dict[str, float]:
        """Return the number in place of a gap of each column; empty if gaps are read as 0.

        Training rows are ascending.
        """
        if table.gaps == "zero":
            return {}
        match self._settings.missing_numeric:
            case "mean" | "error":  # an error in training only
                return {name: found.mean for name, found in self._ranges.items()}
            case "median":
                columns = self._columns(table, rows)
                return {name: float(np.median(v)) if len(v) else 0.0 for name, v in columns}
            case _:
                return dict.fromkeys(self._ranges, 0.0)

    def bins(
        self, table: Table, rows: NDArray[np.int64], num_bins: int
    ) -> tuple[tuple[float, ...], ...]:
        """Return the edges of each column's bins, in the scaled unit; empty for no bins.

        Training rows are ascending.
        """
        if not num_bins:
            return ()
        some = rows[np.linspace(0, len(rows) - 1, min(len(rows), BIN_ROWS)).astype(np.int64)]
        scales = self.scales()
        found = []
        for name, values in self._columns(table, some):
            shift, scale = scales[name]
            found.append(_edges((values - shift) / scale, num_bins))
        return tuple(found)

    def bounds(self, name: str) -> dict[str, float]:
        """Return a column's range, empty if there are only gaps.

        It is rounded outwards: what a model's files hold is the number of no single row.
        """
        low, high = self._ranges[name].low, self._ranges[name].high
        if low > high:
            return {}
        width = min(high - low or abs(high) or 1.0, 1e300)
        step = 10.0 ** (math.floor(math.log10(max(width, 1e-300))) - 2)
        return {"low": math.floor(low / step) * step, "high": math.ceil(high / step) * step}

    def with_gaps(self) -> tuple[str, ...]:
        """Return the columns that had gaps which were kept."""
        return tuple(name for name, count in self._num_gaps.items() if count)

    def vocabularies(self, table: Table) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each categorical column with the categories that are frequent enough."""
        for name, counts in self._counts.items():
            kept = np.flatnonzero(counts >= self._settings.min_count)
            texts = table.categorical[name].categories.take(kept).to_pylist()
            yield name, tuple(sorted(texts))

    def members(self, table: Table) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each column of lists with the categories that are kept."""
        for name, counts in self._sets.items():
            found = count_members(table.lists[name].categories, counts)
            least = max(1, self._settings.min_count)
            frequent = [text for text, count in found.items() if count >= least]
            first = sorted(frequent, key=lambda text: (-found[text], text))
            yield name, tuple(sorted(first[: self._settings.max_list_categories]))

    def _compressed(self, values: Numbers) -> NDArray[np.float64]:
        return compress(values, signed_log1p=self._settings.signed_log1p)

    def _present(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._keeps_gaps:
            return values
        is_gap = np.isnan(values)
        if self._settings.missing_numeric == "zero":
            return np.where(is_gap, 0.0, values)
        return values[~is_gap]

    def _columns(
        self, table: Table, rows: NDArray[np.int64]
    ) -> Iterator[tuple[str, NDArray[np.float64]]]:
        names = list(table.numeric)
        at_once = max(1, ORDERED_NUMBERS // len(rows))
        for first in range(0, len(names), at_once):
            some = names[first : first + at_once]
            block = np.empty((len(some), len(rows)))
            # In parts, so that a table on disk is read once for all of these columns.
            for start in range(0, len(rows), FIT_ROWS):
                part = slice(start, start + FIT_ROWS)
                for j, name in enumerate(some):
                    block[j, part] = self._compressed(table.numeric[name][rows[part]])
            for name, values in zip(some, block, strict=True):
                yield name, self._present(values)


def _edges(values: NDArray[np.float64], num_bins: int) -> tuple[float, ...]:
    different = np.unique(values)
    if len(different) <= num_bins + 1:
        return tuple(different.tolist()) or (0.0,)
    return tuple(np.unique(np.quantile(different, np.linspace(0, 1, num_bins + 1))).tolist())


def compress(values: Numbers, *, signed_log1p: bool) -> NDArray[np.float64]:
    """Return sign(x) log(1 + |x|) if the settings say so, in float64."""
    wide = values.astype(np.float64, copy=False)
    return np.sign(wide) * np.log1p(np.abs(wide)) if signed_log1p else wide


class _Range:
    """Accumulates minimum, maximum, mean and squared deviations of numbers that come in parts.

    For two parts with n and m numbers and means a and b, the mean changes by (b - a) m / (n + m),
    and the sum of the squared deviations grows by (b - a)^2 n m / (n + m) beyond the sum of both
    parts (Chan, Golub and LeVeque, 1979).
    """

    def __init__(self) -> None:
        self.low = math.inf
        self.high = -math.inf
        self.mean = 0.0
        self._squares = 0.0
        self._count = 0

    def add(self, values: NDArray[np.float64]) -> None:
        if not len(values):
            return
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        mean, count = float(values.mean()), len(values)
        difference, total = mean - self.mean, self._count + count
        self._squares += float(np.square(values - mean).sum())
        self._squares += difference**2 * self._count * count / total
        self.mean += difference * count / total
        self._count = total

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self._count)


def _scale(found: _Range, settings: FeatureSettings) -> tuple[float, float]:
    if settings.numeric_scaling == "none" or found.low > found.high:  # nothing but gaps
        return 0.0, 1.0
    if found.low == found.high:
        # The standard deviation would consist of rounding errors and blow up other values.
        return found.low, 1.0
    if settings.numeric_scaling == "min_max":
        return found.low, found.high - found.low
    # The squares of numbers below 1e-154 are 0, and then so is the deviation.
    scale = found.deviation or found.high - found.low
    return found.mean, scale

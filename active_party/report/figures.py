"""Figures that a report computes from a run's series: windows, epochs, and comparison to chance."""

import math
from typing import NamedTuple

import numpy as np

from splitveil.active_party.report.run_files import LeakSeries, Numbers

MIN_WINDOW = 15  # smallest number of batches for the quantiles of a window
MAX_WINDOWS = 40
LOW, HIGH = 0.1, 0.9  # the quantiles that bound a band
ABSENT = "–"
STANDARD_ERRORS = 4.0
"""Number of standard errors by which a mean must exceed the mean of random scores, as for the leak
alarm."""


class TableRow(NamedTuple):
    """One row of a table."""

    cells: tuple[str, ...]
    is_strong: bool = False  # whether its first number is written in bold


class Windows(NamedTuple):
    """Quantiles over consecutive batches, one entry per window."""

    steps: Numbers
    low: Numbers
    median: Numbers
    high: Numbers


class MeasuredAttack(NamedTuple):
    """One attack on single batches of one layer, over the whole run."""

    party: str
    layer: str
    attack: str
    batches: int
    mean: float
    q95: float
    last_epoch: float
    worst_epoch: float  # mean of the epoch with the highest mean
    random_mean: float
    random_q95: float
    beats_chance: bool
    """Whether its mean exceeds the mean of random scores by more than chance explains."""


def windows(steps: Numbers, values: Numbers) -> Windows:
    """Summarise a series window by window; all windows hold about the same number of batches."""
    count = max(1, min(MAX_WINDOWS, len(values) // MIN_WINDOW))
    middles, rows = [], []
    for where in np.array_split(np.arange(len(values)), count):
        middles.append(float(steps[where].mean()))
        rows.append(np.nanquantile(values[where], (LOW, 0.5, HIGH)))
    low, median, high = np.array(rows).T
    return Windows(np.array(middles), low, median, high)


def epoch_means(series: LeakSeries) -> tuple[Numbers, Numbers]:
    """Return the epochs, and the mean leak AUC over the batches of each."""
    epochs = np.unique(series.epochs)
    return epochs, np.array([series.leak[series.epochs == epoch].mean() for epoch in epochs])


def finding_of(series: LeakSeries) -> MeasuredAttack:
    """Summarise an attack over the run."""
    gains = series.leak - series.random
    _, means = epoch_means(series)
    enough = len(gains) > 1
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if enough else math.inf
    return MeasuredAttack(
        series.party,
        series.layer,
        series.attack,
        len(gains),
        float(series.leak.mean()),
        float(np.quantile(series.leak, 0.95)),
        float(means[-1]),
        float(means.max()),
        float(series.random.mean()),
        float(np.quantile(series.random, 0.95)),
        beats_chance=float(gains.mean()) > STANDARD_ERRORS * error,
    )


def figure(value: float | None, digits: int = 3) -> str:
    """Format a figure; a dash stands for a missing one."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """Format a count; a dash stands for a missing one."""
    return ABSENT if value is None else f"{value:,}"

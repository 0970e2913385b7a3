"""Figures that a report computes: of a run's series, and of its predictions of the test rows."""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from splitveil.active_party.report.run_files import LeakSeries, Numbers
from splitveil.active_party.training.evaluation import StoredPredictions
from splitveil.common.privacy.adjusted_auc import placements
from splitveil.common.privacy.figures import STANDARD_ERRORS

MIN_WINDOW = 15  # smallest number of batches for the quantiles of a window
MAX_WINDOWS = 40
LOW, HIGH = 0.1, 0.9  # the quantiles that bound a band
ABSENT = "–"
_NORMAL_975 = 1.959963984540054
_CLOSE = 1e-4  # difference of an AUC from the recorded one that rounding may make


class TableRow(NamedTuple):
    """One row of a table."""

    cells: tuple[str, ...]
    is_strong: bool = False  # whether its first number is written in bold


class Estimate(NamedTuple):
    """A test AUC with its 95 % interval (DeLong et al., Biometrics 44, 1988)."""

    value: float
    low: float
    high: float

    def in_words(self, digits: int = 4) -> str:
        form = f".{digits}f"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


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
    beats_chance: bool  # whether its mean exceeds random scores' by more than chance explains


def windows(steps: Numbers, values: Numbers) -> Windows:
    """Summarise a series window by window; all windows hold about the same number of batches."""
    count = max(1, min(MAX_WINDOWS, len(values) // MIN_WINDOW))
    middles, rows = [], []
    for where in np.array_split(np.arange(len(values)), count):
        middles.append(float(steps[where].mean()))
        rows.append(np.nanquantile(values[where], (LOW, 0.5, HIGH)))
    low, median, high = np.array(rows).T
    return Windows(np.array(middles), low, median, high)


def finding_of(series: LeakSeries) -> MeasuredAttack:
    """Summarise an attack over the run."""
    gains = series.leak - series.random
    means = [series.leak[series.epochs == epoch].mean() for epoch in np.unique(series.epochs)]
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
        float(max(means)),
        float(series.random.mean()),
        float(np.quantile(series.random, 0.95)),
        beats_chance=float(gains.mean()) > STANDARD_ERRORS * error,
    )


def estimate_of(recorded: float, predictions: StoredPredictions | None) -> Estimate | None:
    """Return the recorded AUC of a run with its interval; None where that is not known.

    With several classes it is the mean over the classes, each against the rest.
    """
    if predictions is None:
        return None
    labels, logits = predictions.labels, predictions.logits
    scores = {1: logits} if logits.ndim == 1 else dict(enumerate(softmax(logits, axis=1).T))
    members = {one: labels == one for one in scores}
    measured = [one for one, of in members.items() if min(of.sum(), (~of).sum()) > 1]
    if not measured:
        return None
    # The sum of the squared terms, one for each row, is the variance.
    auc, terms = 0.0, np.zeros(len(labels))
    for one in measured:
        placed = placements(scores[one], members[one])
        auc += placed.auc / len(measured)
        for rows, of in zip((members[one], ~members[one]), placed[:2], strict=True):
            size = len(of) * (len(of) - 1.0)
            terms[rows] += (of - placed.auc) / math.sqrt(size) / len(measured)
    half = _NORMAL_975 * math.sqrt(float(terms @ terms))
    if abs(auc - recorded) > _CLOSE:
        return None
    return Estimate(auc, max(auc - half, 0.0), min(auc + half, 1.0))


def figure(value: float | None, digits: int = 3) -> str:
    """Format a figure; a dash stands for a missing one."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """Format a count; a dash stands for a missing one."""
    return ABSENT if value is None else f"{value:,}"

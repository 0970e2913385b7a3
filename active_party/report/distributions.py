"""The panels of gradients by class: norm and direction, before and after the defense, step by step.

The papers' picture of a leak: two classes whose histograms do not overlap.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from splitveil.active_party.monitor.distributions import COSINE, LOG10_NORM
from splitveil.active_party.report.panels import Panel
from splitveil.active_party.report.run_files import ClassHistogram, Numbers
from splitveil.active_party.report.svg import Axis, Chart, Steps, round_axis

SIDES = ("before", "after")
_WORDS = {LOG10_NORM: "Norm", COSINE: "Direction"}
_SIZE = (280.0, 185.0)
_FEWEST_BINS, _MOST_BINS = 10, 40
_WIDTHS = (1, 2, 4, 5, 8, 10, 20)
"""Numbers of bins that may be merged into one: divisors of the cosine's 40 bins."""
_MANTISSAS = (1, 2, 5)
_MOST_NORM_TICKS = 4
_ROOM = 0.15
"""Smallest margin on either side of the norms, in decades."""
_NORMAL_Q975 = 1.959964
"""The absolute value of a standard normal draw lies below this with probability 0.95."""


class StepRow(NamedTuple):
    title: str
    panels: list[Panel]


def step_rows(histograms: Sequence[ClassHistogram]) -> list[StepRow]:
    """Return rows of panels of the first, the middle and the last batch, all on the same axes."""
    axes = _axes(histograms)
    counted = list(dict.fromkeys((one.epoch, one.step) for one in histograms))
    steps = dict.fromkeys(counted[at] for at in (0, len(counted) // 2, -1) if counted)
    return [
        StepRow(
            _title(epoch, step, histograms),
            [panel for one in histograms if one.step == step for panel in _panels(one, axes)],
        )
        for epoch, step in steps
    ]


def sent_panels(runs: Sequence[tuple[str, Sequence[ClassHistogram]]]) -> list[Panel]:
    """Return norm and cosine after the defense of several runs, at the last step counted."""
    shown = [(name, one) for name, of_run in runs for one in of_run if one.step == of_run[-1].step]
    axes = _axes([one for _, one in shown])
    panels = []
    for name, one in shown:
        panel = _panel(one, "after", axes)
        what = _WORDS[one.figure].lower()
        panels.append(panel._replace(title=name, note=f"{what}, {panel.note}"))
    return panels


def auc_of_counts(negatives: Numbers, positives: Numbers) -> float:
    """Return the leak AUC of a figure, at the resolution of its bins."""
    below = np.cumsum(negatives) - negatives
    wins = float((positives * (below + negatives / 2)).sum())
    auc = wins / float(positives.sum() * negatives.sum())
    return max(auc, 1 - auc)


def random_q95(num_negatives: float, num_positives: float) -> float:
    """Return the bound below which the leak AUC of random scores stays in 95 % of such batches.

    The normal approximation of the rank-sum statistic, whose variance is (n + p + 1) / (12 n p).
    """
    variance = (num_negatives + num_positives + 1) / (12 * num_negatives * num_positives)
    return min(1.0, 0.5 + _NORMAL_Q975 * math.sqrt(variance))


def _panels(histogram: ClassHistogram, axes: Mapping[str, Axis]) -> Iterator[Panel]:
    """Yield what was before the defense only if the defense changed it."""
    for side in SIDES if _is_changed(histogram) else SIDES[1:]:
        yield _panel(histogram, side, axes)


def _is_changed(histogram: ClassHistogram) -> bool:
    """Return whether the defense changes gradients, and not only labels before there are any."""
    before, after = (
        [histogram.counts[f"{side}/{c}"] for c in ("negative", "positive")] for side in SIDES
    )
    return not all(map(np.array_equal, before, after))


def _panel(histogram: ClassHistogram, side: str, axes: Mapping[str, Axis]) -> Panel:
    negatives, positives = (histogram.counts[f"{side}/{c}"] for c in ("negative", "positive"))
    counts = [negatives, positives]
    if histogram.figure == LOG10_NORM:
        # Before and after may lie decades apart: each side's bins are as fine as its range allows.
        edges, counts = _occupied(histogram.edges, counts)
    else:
        edges = histogram.edges
    edges, (negative, positive) = _merged(edges, counts)
    shares = [100 * negative / negative.sum(), 100 * positive / positive.sum()]
    x = axes[histogram.figure]
    y = _share_axis(np.concatenate(shares))
    title = f"{_WORDS[histogram.figure]}, {side}"
    marks = [
        _steps(edges, share, style)
        for share, style in zip(shares, ("negative", "positive"), strict=True)
    ]
    described = f"{title.lower()} the defense, at step {histogram.step + 1}: share of each class"
    note = f"leak AUC {auc_of_counts(negatives, positives):.3f}"
    return Panel(title, Chart(described, x, y, marks, *_SIZE).svg(), note)


def _steps(edges: Numbers, heights: Numbers, style: str) -> Steps:
    edges, (heights,) = _occupied(edges, [heights])
    return Steps(edges, heights, style)


def _title(epoch: int, step: int, histograms: Sequence[ClassHistogram]) -> str:
    counts = next(one.counts for one in histograms if one.step == step)
    negatives, positives = (int(counts[f"before/{c}"].sum()) for c in ("negative", "positive"))
    return (
        f"Step {step + 1:,} (epoch {epoch + 1}): {positives:,} positives, {negatives:,} negatives; "
        f"95 % of random scores below {random_q95(negatives, positives):.3f}"
    )


def _share_axis(shares: Numbers) -> Axis:
    covering = round_axis("% of class", shares, from_zero=True)
    # Paper has room only for these digits.
    half = (covering.high / 2,) if covering.high % 2 == 0 else ()
    ticks = (0.0, *half, covering.high)
    return covering._replace(ticks=ticks, names=[f"{tick:g}" for tick in ticks])


def _axes(histograms: Sequence[ClassHistogram]) -> dict[str, Axis]:
    axes = {COSINE: Axis("cosine to the positives' mean", -1, 1, (-1, 0, 1))}
    edges = [one.edges for one in histograms if one.figure == LOG10_NORM]
    if edges:
        everything = np.concatenate(edges)
        axes[LOG10_NORM] = _norm_axis(float(everything.min()), float(everything.max()))
    return axes


def _norm_axis(low: float, high: float) -> Axis:
    """Return an axis of norms on a logarithmic scale, whose values are logarithms."""
    low, high = low - _ROOM, high + _ROOM
    decades = range(math.floor(low), math.ceil(high) + 1)
    exact = [(math.log10(m) + decade, m, decade) for decade in decades for m in _MANTISSAS]
    ticks = [tick for tick in exact if low <= tick[0] <= high]
    if len(ticks) > _MOST_NORM_TICKS:
        ticks = [tick for tick in ticks if tick[1] == 1]
    ticks = ticks[:: math.ceil(len(ticks) / _MOST_NORM_TICKS)]
    names = [f"{m if m > 1 else ''}{'·' * (m > 1)}10{_raised(decade)}" for _, m, decade in ticks]
    return Axis("gradient norm", low, high, [value for value, _, _ in ticks], names)


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _occupied(edges: Numbers, counts: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Drop the empty bins before the first and after the last occupied one."""
    filled = np.flatnonzero(np.sum(counts, axis=0))
    first, last = int(filled[0]), int(filled[-1])
    return edges[first : last + 2], [of_class[first : last + 1] for of_class in counts]


def _merged(edges: Numbers, counts: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Merge neighbouring bins until there are only as many as the smaller class can fill."""
    examples = min(float(of_class.sum()) for of_class in counts)
    most = min(_MOST_BINS, max(_FEWEST_BINS, round(2 * math.sqrt(examples))))
    bins = len(edges) - 1
    width = next((w for w in _WIDTHS if bins <= w * most), _WIDTHS[-1])
    padding = -bins % width
    of_bin = (edges[-1] - edges[0]) / bins
    joined = edges[0] + of_bin * np.arange(0, bins + padding + 1, width)
    return joined, [np.pad(of, (0, padding)).reshape(-1, width).sum(axis=1) for of in counts]

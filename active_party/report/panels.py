"""The charts of a report, each with its title."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from splitveil.active_party.report import run_files
from splitveil.active_party.report.svg import Axis, Band, Chart, Dot, Line, Mark, Rule, round_axis
from splitveil.common.privacy.attacks import WITHOUT_GRADIENTS, is_oracle
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import Spread
from splitveil.common.record.assessment import LeakAssessment
from splitveil.common.record.run_record import LedgerLine
from splitveil.common.text.wording import auc_at_most

_AUC_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_LEAK_AXIS = Axis("leak AUC", 0.5, 1.0, _AUC_TICKS)
_LOSS = "loss, nats per example"
_AUC = "Test AUC"
_SMALL = (330.0, 225.0)
_WIDE = (960.0, 300.0)
_LEAST_AUC_SPAN = 0.05
MIN_WINDOW = 15  # smallest number of batches for the quantiles of a window
MAX_WINDOWS = 40
LOW, HIGH = 0.1, 0.9  # the quantiles that bound a band
NUM_STYLES = 8  # colours for runs, or layers, in one chart: the classes ``s0`` and so on


class Windows(NamedTuple):
    """Quantiles over consecutive batches, one entry per window."""

    steps: run_files.Numbers
    low: run_files.Numbers
    median: run_files.Numbers
    high: run_files.Numbers


class Panel(NamedTuple):
    title: str
    chart: Markup
    note: str = ""


def windows(steps: run_files.Numbers, values: run_files.Numbers) -> Windows:
    """Summarise a series window by window; all windows hold about the same number of batches."""
    count = max(1, min(MAX_WINDOWS, len(values) // MIN_WINDOW))
    middles, rows = [], []
    for where in np.array_split(np.arange(len(values)), count):
        middles.append(float(steps[where].mean()))
        rows.append(np.nanquantile(values[where], (LOW, 0.5, HIGH)))
    low, median, high = np.array(rows).T
    return Windows(np.array(middles), low, median, high)


def training_panels(run: run_files.RunFiles) -> list[Panel]:
    """Return loss and test AUC or RMSE over epochs; empty before the first epoch has ended."""
    lines = run_files.test_lines(run)
    if not lines:
        return []
    epochs = run_files.column(line.epoch for line in lines) + 1
    training = run_files.column(line.train_loss for line in lines)
    losses = [
        Line(epochs, training, "muted dashed", "training"),
        Line(
            epochs,
            run_files.column(line.figures.loss for line in lines),
            "utility",
            "test",
            markers=True,
        ),
    ]
    if lines[-1].figures.rmse is not None:  # in shares of the squared range, and without an AUC
        constant, found = (
            run_files.column(getattr(line.figures, name) for line in lines)
            for name in ("constant_rmse", "rmse")
        )
        errors = [
            Line(epochs, constant, "muted dashed", "constant"),
            Line(epochs, found, "utility", "test", markers=True),
        ]
        in_shares = figure_panel("Mean squared error, share of the squared range", losses)
        return [in_shares, figure_panel("Test RMSE", errors)]
    auc = run_files.column(line.figures.auc for line in lines)
    value = f"{auc[-1]:.3f}" if math.isfinite(auc[-1]) else ""
    aucs = [Line(epochs, auc, "utility", value, markers=True)]
    return [figure_panel("Loss", losses, _LOSS), figure_panel(_AUC, aucs)]


def figure_panel(title: str, lines: Sequence[Line], unit: str | None = None) -> Panel:
    """Return a figure over epochs; a test AUC has an axis of its own span."""
    values = np.concatenate([line.y for line in lines])
    if title == _AUC:
        described, y = "test AUC", round_axis("test AUC", values, least_span=_LEAST_AUC_SPAN)
    else:
        described, y = title, round_axis(unit or title.lower(), values, from_zero=True)
    x = _epoch_axis([line.x for line in lines])
    return Panel(f"{title} by epoch", Chart(f"{described} over epochs", x, y, lines).svg())


def leak_panels(
    run: run_files.RunFiles, series: Sequence[run_files.LeakSeries], feature_auc: float | None
) -> list[Panel]:
    """Return one panel per attack, with a line for each layer, and those of random scores."""
    panels = []
    layers = list(dict.fromkeys(one.layer for one in series))
    for attack in dict.fromkeys(one.attack for one in series):
        chosen = [one for one in series if one.attack == attack]
        random = windows(chosen[0].steps, chosen[0].random)
        marks: list[Mark] = [
            Band(random.steps, random.low, random.high, "chance"),
            Line(random.steps, random.median, "chance dashed"),
        ]
        if feature_auc is not None:
            marks.append(Rule(feature_auc, "baseline"))
        # More names than two would leave no room for the lines; the legend has them all.
        styled = [
            (f"s{layers.index(one.layer) % NUM_STYLES}", one.layer * (len(layers) == 2), one)
            for one in chosen
        ]
        for style, label, one in styled:
            leak = windows(one.steps, one.leak)
            marks.append(Band(leak.steps, leak.low, leak.high, style))
            marks.append(Line(leak.steps, leak.median, style, label))
        last = max(1.0, *(float(one.steps.max()) for one in chosen))
        x = Axis(f"training step ({run_files.steps_per_epoch_of(run)} per epoch)", 0.0, last)
        remark = "oracle" if is_oracle(attack) else ""
        if attack in WITHOUT_GRADIENTS:
            remark = "baseline, without gradients"
        described = f"raw leak AUC of {attack} over training steps"
        chart = Chart(described, x, _LEAK_AXIS, marks, *_SMALL)
        panels.append(Panel(attack, chart.svg(), remark))
    return panels


def ledger_panel(run: run_files.RunFiles, assessment: LeakAssessment) -> Panel | None:
    """Return the ledger over epochs beside the strongest attack; None if it bounds nothing."""
    lines = run.active.metrics.of(LedgerLine)
    if not lines or assessment.adversary is None or not assessment.has_gradients:
        return None
    epochs = run_files.column(line.epoch for line in lines) + 1
    estimates = [line.bounds.estimate for line in lines]
    marks = [
        *_peer_marks(epochs, [line.bounds.by_peers() for line in lines]),
        *_bound_marks(epochs, "estimate", estimates, "{:.3f}".format),
    ]
    if (best := assessment.strongest) is not None:
        label = f"strongest attack ({best.leak.value:.3f})"
        marks.append(Rule(best.leak.value, "measured dashed", label))
    if isinstance(budget := run.active.setting("run_budget", "leak_auc"), int | float):
        marks.append(Rule(float(budget), "limit", f"budget ({budget:g})"))
    described = "leak AUC that the ledger allows for over epochs, and the strongest attack"
    chart = Chart(described, _epoch_axis([epochs]), _LEAK_AXIS, marks, *_WIDE)
    title = "Leak AUC beyond features of all answers so far, and the strongest attack"
    return Panel(title, chart.svg())


def shared_ledger_panel(runs: Sequence[tuple[str, run_files.RunFiles]]) -> Panel | None:
    """Return the bounds for anybody of several runs, by colour, by epoch; None without any."""
    marks = []
    for style, run in runs:
        lines = run.active.metrics.of(LedgerLine)
        values = run_files.column(line.bounds.anybody.max for line in lines)
        if (values < 1).any():
            epochs = run_files.column(line.epoch for line in lines) + 1
            marks.append(Line(epochs, values, style, auc_at_most(values[-1]), True, auc_at_most))
    if not marks:
        return None
    x = _epoch_axis([mark.x for mark in marks])
    chart = Chart("leak AUC that anybody may reach", x, _LEAK_AXIS, marks, *_WIDE)
    return Panel("Bound for anybody by epoch", chart.svg())


def trade_off(dots: Sequence[Dot]) -> Markup | None:
    """Return test AUC against the leak AUC of the strongest attack, one point per run."""
    if not dots:
        return None
    y = round_axis("test AUC", np.array([dot.y for dot in dots]), least_span=_LEAST_AUC_SPAN)
    x = Axis("strongest attack, feature-adjusted leak AUC", 0.5, 1.0, _AUC_TICKS)
    return Chart("test AUC against leak AUC, one point per run", x, y, dots, *_WIDE).svg()


def _peer_marks(
    epochs: run_files.Numbers, ledgers: Sequence[Mapping[Adversary, Spread]]
) -> Iterator[Mark]:
    recorded = [
        (peers, [bounds[peers] for bounds in ledgers])
        for peers in Adversary
        if any(math.isfinite(bounds[peers].max) for bounds in ledgers)
    ]
    for peers, spreads in recorded:
        last = spreads[-1].max
        if last < 1 or peers is recorded[-1][0]:
            yield from _bound_marks(epochs, "guarantee", spreads, auc_at_most, f"{peers}")
            return


def _bound_marks(
    epochs: run_files.Numbers,
    style: str,
    spreads: Sequence[Spread],
    written: Callable[[float], str],
    name: str | None = None,
) -> Iterator[Mark]:
    largest = run_files.column(spread.max for spread in spreads)
    yield Band(epochs, run_files.column(spread.mean for spread in spreads), largest, style)
    label = f"{name or style} ({written(largest[-1])})"
    yield Line(epochs, largest, style, label, True, written)


def _epoch_axis(epochs: Sequence[run_files.Numbers]) -> Axis:
    last = max(2, *(int(one.max(initial=1)) for one in epochs))
    unit = math.ceil(last / 8)
    ticks = [1, *(tick for tick in range(unit, last + 1, unit) if tick > 1)]
    return Axis("epochs trained", 1, last, ticks)

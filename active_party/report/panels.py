"""The charts of a report, each with its title."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from splitveil.active_party.report.bounds import prior_of
from splitveil.active_party.report.figures import epoch_means, finding_of, strongest, windows
from splitveil.active_party.report.run_files import (
    LeakSeries,
    Numbers,
    RunFiles,
    accumulated_series,
    column,
    steps_per_epoch_of,
    test_lines,
)
from splitveil.active_party.report.svg import Axis, Band, Chart, Dot, Line, Mark, Rule, round_axis
from splitveil.active_party.report.verdict import RunLevel, is_oracle
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import WITHOUT_GRADIENTS
from splitveil.common.record.figures import SpreadFigures
from splitveil.common.record.lines import LedgerLine
from splitveil.common.text.upper_bounds import at_most, auc_at_most

_AUC_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_LEAK_AXIS = Axis("leak AUC", 0.5, 1.0, _AUC_TICKS)
_LOSS = "loss, nats per example"
_AUC = "Test AUC"
_SMALL = (330.0, 225.0)
_WIDE = (960.0, 300.0)
_LEAST_AUC_SPAN = 0.05
NUM_STYLES = 8
"""Colours for runs, or layers, in one chart: the classes ``s0`` and so on."""


class Panel(NamedTuple):
    title: str
    chart: Markup
    note: str = ""


class Coloured(NamedTuple):
    """One of the runs in a shared chart, with the CSS class of its colour."""

    style: str
    run: RunFiles
    series: Sequence[LeakSeries]


def training_panels(run: RunFiles) -> list[Panel]:
    """Return loss and test AUC over epochs; empty before the first epoch has ended."""
    lines = test_lines(run)
    if not lines:
        return []
    epochs = column(line.epoch for line in lines) + 1
    training = column(line.train_loss for line in lines)
    losses = [
        Line(epochs, training, "muted dashed", "training"),
        Line(epochs, column(line.loss for line in lines), "utility", "test", markers=True),
    ]
    if lines[-1].number is not None:  # in shares of the squared range, and without an AUC
        return [figure_panel("Mean squared error, share of the squared range", losses)]
    auc = column(line.auc for line in lines)
    value = f"{auc[-1]:.3f}" if math.isfinite(auc[-1]) else ""
    aucs = [Line(epochs, auc, "utility", value, markers=True)]
    return [figure_panel("Loss", losses, _LOSS), figure_panel(_AUC, aucs)]


def shared_training_panels(runs: Sequence[Coloured]) -> list[Panel]:
    """Return the test loss and test AUC of several runs."""
    losses, aucs = [], []
    for style, run, _ in runs:
        lines = test_lines(run)
        epochs = column(line.epoch for line in lines) + 1
        losses.append(Line(epochs, column(line.loss for line in lines), style, markers=True))
        aucs.append(Line(epochs, column(line.auc for line in lines), style, markers=True))
    if not any(len(line.x) for line in losses):
        return []
    return [figure_panel("Test loss", losses, _LOSS), figure_panel(_AUC, aucs)]


def figure_panel(title: str, lines: Sequence[Line], unit: str | None = None) -> Panel:
    """Return a figure over epochs; a test AUC has an axis of its own span."""
    values = np.concatenate([line.y for line in lines])
    if title == _AUC:
        described, y = "test AUC", round_axis("test AUC", values, least_span=_LEAST_AUC_SPAN)
    else:
        described, y = title, round_axis(unit or title.lower(), values, from_zero=True)
    x = _epoch_axis([line.x for line in lines])
    return Panel(f"{title} by epoch", Chart(f"{described} over epochs", x, y, lines).svg())


def leak_panel(run: RunFiles, series: LeakSeries) -> Panel:
    """Return one attack's leak AUC over steps, with the leak AUC of random scores."""
    described = f"leak AUC of {series.attack} at layer {series.layer} over training steps"
    marks = [*_chance(series), *_yardsticks(run, series)]
    return _leak_panel(described, marks, [("measured", "", series)], _steps_of(run))


def layer_panels(run: RunFiles, series: Sequence[LeakSeries]) -> list[Panel]:
    """Return one panel per attack, with a line for each layer."""
    panels = []
    layers = list(dict.fromkeys(one.layer for one in series))
    for attack in dict.fromkeys(one.attack for one in series):
        chosen = [one for one in series if one.attack == attack]
        described = f"leak AUC of {attack} over training steps, layer by layer"
        marks = [*_chance(chosen[0]), *_yardsticks(run, chosen[0])]
        styled = [(f"s{layers.index(o.layer) % NUM_STYLES}", o.layer, o) for o in chosen]
        panels.append(_leak_panel(described, marks, styled, _steps_of(run)))
    return panels


def shared_leak_panel(runs: Sequence[Coloured], layer: str, attack: str) -> Panel:
    """Return one attack's leak AUC over steps in several runs, at least one of which has it."""
    chosen = [
        (run.style, "", series)
        for run in runs
        for series in run.series
        if (series.layer, series.attack) == (layer, attack)
    ]
    first = chosen[0][2]
    random = windows(first.steps, first.random)
    chance = Line(random.steps, random.median, "chance dashed")
    described = f"leak AUC of {attack} at layer {layer}"
    return _leak_panel(described, [chance], chosen, "training step")


def _leak_panel(
    described: str,
    marks: Sequence[Mark],
    styled: Sequence[tuple[str, str, LeakSeries]],
    step_label: str,
) -> Panel:
    """Return an attack's leak AUC over steps above other marks; each series has style and label."""
    drawn = list(marks)
    for style, label, one in styled:
        leak = windows(one.steps, one.leak)
        drawn.append(Band(leak.steps, leak.low, leak.high, style))
        drawn.append(Line(leak.steps, leak.median, style, label))
    last = max(1.0, *(float(one.steps.max()) for _, _, one in styled))
    attack = styled[0][2].attack
    chart = Chart(described, Axis(step_label, 0.0, last), _LEAK_AXIS, drawn, *_SMALL)
    return Panel(attack, chart.svg(), _remark(attack))


def ledger_panels(
    run: RunFiles, series: Sequence[LeakSeries], accumulated: Sequence[RunLevel]
) -> list[Panel]:
    """Return the ledger over epochs against the measured leak, and the divergence charged."""
    lines = run.active.metrics.of(LedgerLine)
    if not lines:
        return []
    epochs = column(line.epoch for line in lines) + 1
    marks = [
        *_peer_marks(epochs, [line.bounds.by_peers() for line in lines]),
        *_bound_marks(
            epochs, "estimate", [line.bounds.estimate for line in lines], "{:.3f}".format
        ),
    ]
    chart = Chart(
        "leak AUC that the ledger allows for over epochs, and what was measured",
        _epoch_axis([epochs]),
        _LEAK_AXIS,
        [
            *marks,
            *_measured(run, series, accumulated),
            *_baseline(run),
            *_limit(run.active.setting("run_budget", "leak_auc")),
        ],
        *_WIDE,
    )
    panels = [Panel("Leak AUC of all answers so far, against what attacks measured", chart.svg())]
    largest = column(line.bounds.sum_kl.max for line in lines)
    if np.isfinite(largest).any():
        mean = column(line.bounds.sum_kl.mean for line in lines)
        panels.append(
            _sum_kl_panel(epochs, largest, mean, run.active.setting("run_budget", "sum_kl"))
        )
    return panels


def shared_ledger_panel(runs: Sequence[Coloured]) -> Panel | None:
    """Return the bounds for anybody of several runs' ledgers by epoch; None if there are none."""
    marks = []
    for style, run, _ in runs:
        lines = run.active.metrics.of(LedgerLine)
        values = column(line.bounds.anybody.max for line in lines)
        if np.isfinite(values).any():
            epochs = column(line.epoch for line in lines) + 1
            marks.append(Line(epochs, values, style, auc_at_most(values[-1]), True, auc_at_most))
    if not marks:
        return None
    x = _epoch_axis([mark.x for mark in marks])
    chart = Chart("leak AUC that anybody may reach", x, _LEAK_AXIS, marks, *_WIDE)
    return Panel("Bound for anybody by epoch", chart.svg())


def trade_off(dots: Sequence[Dot], measured: str) -> Markup | None:
    """Return test AUC against leak AUC, one point per run."""
    if not dots:
        return None
    y = round_axis("test AUC", np.array([dot.y for dot in dots]), least_span=_LEAST_AUC_SPAN)
    x = Axis(f"leak AUC, {measured}", 0.5, 1.0, _AUC_TICKS)
    return Chart("test AUC against leak AUC, one point per run", x, y, dots, *_WIDE).svg()


def _peer_marks(
    epochs: Numbers, ledgers: Sequence[Mapping[Adversary, SpreadFigures]]
) -> Iterator[Mark]:
    """Yield the bound of the strongest adversary class for whom there is one, over epochs."""
    recorded = [
        (peers, [bounds[peers] for bounds in ledgers])
        for peers in Adversary
        if any(bounds[peers].max is not None for bounds in ledgers)
    ]
    for peers, spreads in recorded:
        last = spreads[-1].max
        if (last is not None and last < 1) or peers is recorded[-1][0]:
            yield from _bound_marks(epochs, "guarantee", spreads, auc_at_most, f"{peers}")
            return


def _bound_marks(
    epochs: Numbers,
    style: str,
    spreads: Sequence[SpreadFigures],
    written: Callable[[float], str],
    name: str | None = None,
) -> Iterator[Mark]:
    """Yield one bound over epochs, from its mean over the examples to its largest."""
    largest = column(spread.max for spread in spreads)
    yield Band(epochs, column(spread.mean for spread in spreads), largest, style)
    label = f"{name or style} ({written(largest[-1])})"
    yield Line(epochs, largest, style, label, True, written)


def _sum_kl_panel(epochs: Numbers, largest: Numbers, mean: Numbers, budget: object) -> Panel:
    marks: list[Mark] = [
        Band(epochs, mean, largest, "guarantee"),
        Line(epochs, mean, "guarantee dashed", f"mean ({at_most(mean[-1])})"),
        Line(epochs, largest, "guarantee", f"largest ({at_most(largest[-1])})", True, at_most),
    ]
    limits = list(_limit(budget))
    covered = np.append(largest, [limit.y for limit in limits])
    y = round_axis("sum_kl, nats", covered, from_zero=True)
    marks += limits
    chart = Chart("divergence charged over epochs", _epoch_axis([epochs]), y, marks, *_WIDE)
    return Panel("Divergence charged to one example (sum_kl)", chart.svg())


def _measured(
    run: RunFiles, series: Sequence[LeakSeries], accumulated: Sequence[RunLevel]
) -> Iterator[Mark]:
    """Yield the strongest attack on one batch, and the strongest on all epochs so far."""
    best = strongest([finding_of(one) for one in series])
    for one in series:
        if best is not None and (one.layer, one.attack) == (best.layer, best.attack):
            epochs, means = epoch_means(one)
            label = f"{one.attack}, one batch ({means[-1]:.3f})"
            yield Line(epochs + 1, means, "measured dashed", label, markers=True)
    top = max(accumulated, key=lambda one: one.leak_auc, default=None)
    by_epoch = accumulated_series(run)
    if by_epoch:
        (_, attack), (epochs, leak) = max(by_epoch.items(), key=lambda item: _last(item[1][1]))
        yield Line(epochs + 1, leak, "measured", f"{attack} ({_last(leak):.3f})", markers=True)
    if top is not None and (top.layer, top.attack) not in by_epoch:
        yield Rule(top.leak_auc, "measured dashed", f"{top.attack} ({top.leak_auc:.3f})")


def _last(values: Numbers) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else 0.0


def _baseline(run: RunFiles) -> Iterator[Rule]:
    prior = prior_of(run)
    if prior is not None:
        yield Rule(prior.leak_auc, "baseline", f"attacker's features ({prior.leak_auc:.3f})")


def _limit(budget: object) -> Iterator[Rule]:
    if isinstance(budget, int | float):
        yield Rule(float(budget), "limit", f"budget ({budget:g})")


def _chance(series: LeakSeries) -> Iterator[Mark]:
    random = windows(series.steps, series.random)
    yield Band(random.steps, random.low, random.high, "chance")
    yield Line(random.steps, random.median, "chance dashed")


def _yardsticks(run: RunFiles, series: LeakSeries) -> Iterator[Rule]:
    """Yield the level of random scores on most batches, and of the attacker's own features."""
    yield Rule(float(np.quantile(series.random, 0.95)), "floor")
    prior = prior_of(run)
    if prior is not None:
        yield Rule(prior.leak_auc, "baseline")


def _steps_of(run: RunFiles) -> str:
    return f"training step ({steps_per_epoch_of(run)} per epoch)"


def _remark(attack: str) -> str:
    if attack in WITHOUT_GRADIENTS:
        return "baseline, without gradients"
    return "oracle" if is_oracle(attack) else ""


def _epoch_axis(epochs: Sequence[Numbers]) -> Axis:
    last = max(2, *(int(one.max(initial=1)) for one in epochs))
    unit = math.ceil(last / 8)
    ticks = [1, *(tick for tick in range(unit, last + 1, unit) if tick > 1)]
    return Axis("epochs trained", 1, last, ticks)

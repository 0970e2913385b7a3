"""Draws an experiment's plots: trade-off curves, and the leak over the course of a run."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.experiments.cells import folder_name
from splitveil.experiments.collection import FigureRow
from splitveil.experiments.settings import (
    ClassesPlot,
    CoursePlot,
    EpochPlot,
    Plot,
    SweepPlot,
    TradeOffPlot,
)
from splitveil.experiments.table import differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_MARKERS = "osD^vPX*"
_OF_CLASSES = {"norm": "norm of the gradient", "error": "|p - y|", "slope": "norm of the slope"}

Panel = tuple[str, str]
"""Layer and attack."""


class PlottingUnavailable(SettingsError):
    """The plotting library is missing; everything except the plots works without it."""


class Point(NamedTuple):
    x: float
    x_sd: float
    y: float
    y_sd: float
    name: str = ""
    """The value of the swept setting."""


def draw(plots: Iterable[Plot], rows: Sequence[FigureRow], folder: Path) -> list[Path]:
    drawn = []
    for number, plot in enumerate(plots, start=1):
        for dataset in dict.fromkeys(row.dataset for row in rows):
            found = [row for row in rows if row.dataset == dataset]
            path = folder / f"{number}-{plot.kind}-{folder_name(dataset)}.svg"
            if panels := list(_panels(plot, dataset, found)):
                _save(panels, path, dataset)
                drawn.append(path)
    return drawn


def trade_off(plot: TradeOffPlot, rows: Sequence[FigureRow]) -> dict[Panel, dict[str, list[Point]]]:
    """Return panel -> series -> points, in the order of the sweeps in the experiment's file."""
    utility = _utility(plot, rows)
    leak: dict[Panel, dict[tuple[str, str], dict[int, float]]] = {}
    for panel, row in _of_the_best_witness(rows, plot.leak, plot.attacks):
        if row.variant != plot.floor and utility.get(row.variant):
            variants = leak.setdefault(panel, {})
            variants.setdefault((row.series, row.variant), {})[row.seed] = row.value
    curves: dict[Panel, dict[str, list[Point]]] = {}
    for panel, by_variant in leak.items():
        for (series, variant), values in by_variant.items():
            at = (*_mean_and_sd(utility[variant].values()), *_mean_and_sd(values.values()))
            point = Point(*at, variant.removeprefix(series).strip())
            curves.setdefault(panel, {}).setdefault(series, []).append(point)
    return curves


def floor(plot: TradeOffPlot, rows: Sequence[FigureRow]) -> float | None:
    """Return the utility that is reached without any gradient; None if it was not measured."""
    found = _utility(plot, rows).get(plot.floor or "")
    return statistics.mean(found.values()) if found else None


def _utility(plot: TradeOffPlot, rows: Sequence[FigureRow]) -> dict[str, dict[int, float]]:
    found = _by_seed(row for row in rows if row.statistic == plot.utility and row.attack is None)
    if plot.less is None:
        return found
    subtracted = found.get(plot.less, {})
    return {variant: differences(values, subtracted) for variant, values in found.items()}


def course(plot: CoursePlot, rows: Sequence[FigureRow]) -> dict[Panel, dict[str, list[Point]]]:
    """Return panel -> variant -> points over steps, from 0, or epochs, from 1."""
    found: dict[Panel, dict[str, dict[int, list[float]]]] = {}
    over_steps = plot.over == "steps"
    statistic = "step_leak" if over_steps else "epoch_leak"
    for panel, row in _of_the_best_witness(rows, statistic, plot.attacks):
        at = (row.step or 0) if over_steps else (row.epoch or 0) + 1
        lines = found.setdefault(panel, {}).setdefault(row.variant, {})
        lines.setdefault(at, []).append(row.value)
    return {
        panel: {variant: _line(values) for variant, values in variants.items()}
        for panel, variants in found.items()
    }


def epochs(
    plot: EpochPlot | ClassesPlot, rows: Sequence[FigureRow]
) -> dict[str, dict[str, list[Point]]]:
    """Return panel -> line -> points over epochs, from 1: a line is a variant or a class."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        match plot:
            case EpochPlot(statistic=row.statistic):
                panel, line = _words(row.statistic.removeprefix("epoch_")), row.variant
            case ClassesPlot() if row.statistic[6:-4] in _OF_CLASSES:
                panel = f"{row.variant}: {_OF_CLASSES[row.statistic[6:-4]]}"
                line = f"{row.attack}, {int(row.statistic[-2:])} %"
            case _:
                continue
        of_line = found.setdefault(panel, {}).setdefault(line, {})
        of_line.setdefault((row.epoch or 0) + 1, []).append(row.value)
    return {
        panel: {line: _line(values) for line, values in lines.items()}
        for panel, lines in found.items()
    }


def sweep(plot: SweepPlot, rows: Sequence[FigureRow]) -> dict[str, list[Point]]:
    """Return series -> points with standard errors over the swept value, infinity without one."""
    by_statistic = {
        statistic: _by_seed(row for row in rows if row.statistic == statistic)
        for statistic in (plot.statistic, "test_auc")
    }
    plain = by_statistic["test_auc"]
    subtracted = plain.get(plot.less or "", {})
    found: dict[str, list[Point]] = defaultdict(list)
    variants = {row.variant: (row.series, row.setting) for row in rows}
    for variant, (series, setting) in variants.items():
        values = by_statistic[plot.statistic].get(variant) or plain.get(variant, {})
        if plot.less is not None:
            values = differences(values, subtracted)
        if values and variant != plot.less:
            mean, sd = _mean_and_sd(values.values())
            at = math.inf if setting is None else setting
            found[series].append(Point(at, 0.0, mean, sd / math.sqrt(len(values))))
    return {series: sorted(points) for series, points in found.items()}


class _Panel(NamedTuple):
    title: str
    x_name: str
    y_name: str
    draw: Callable[["Axes"], None]


def _panels(plot: Plot, dataset: str, rows: Sequence[FigureRow]) -> Iterator[_Panel]:
    match plot:
        case TradeOffPlot():
            names = (_utility_words(plot.utility, plot.less), f"leak AUC, {_words(plot.leak)}")
            line = (floor(plot, rows), plot.floor or "")
            for (layer, attack), curves in trade_off(plot, rows).items():
                yield _Panel(f"{attack}, {layer}", *names, partial(_draw_points, curves, *line))
        case CoursePlot():
            names = (plot.over.removesuffix("s"), "leak AUC")
            for (layer, attack), lines in course(plot, rows).items():
                yield _Panel(f"{attack}, {layer}", *names, partial(_draw_lines, lines))
        case SweepPlot():
            curves = sweep(plot, rows)
            if curves and (not plot.datasets or dataset in plot.datasets):
                names = (plot.axis, _utility_words(plot.statistic, plot.less))
                yield _Panel("", *names, partial(_draw_sweep, curves))
        case EpochPlot() | ClassesPlot():
            for panel, lines in epochs(plot, rows).items():
                yield _Panel(panel, "epoch", panel, partial(_draw_lines, lines))


def _of_the_best_witness(
    rows: Sequence[FigureRow], statistic: str, attacks: Sequence[str]
) -> Iterator[tuple[Panel, FigureRow]]:
    """Yield one party's figures for each attack: the active party's, whose oracles know more.

    At layers below the cut only the passive party sees the gradients; if there is more than one
    passive party, each has its own layers.
    """
    found = [row for row in rows if row.statistic == statistic]
    active = {(row.layer, row.attack) for row in found if row.party == "active"}
    for row in found:
        if row.layer is None or row.attack is None or (attacks and row.attack not in attacks):
            continue
        if row.party == "active" or (row.layer, row.attack) not in active:
            is_named = row.party not in {"active", "passive"}
            yield (f"{row.layer}, {row.party}" if is_named else row.layer, row.attack), row


def _by_seed(rows: Iterable[FigureRow]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row.variant][row.seed] = row.value
    return found


def _line(values: dict[int, list[float]]) -> list[Point]:
    return [Point(float(at), 0.0, *_mean_and_sd(found)) for at, found in sorted(values.items())]


def _mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def _save(panels: Sequence[_Panel], path: Path, title: str) -> None:
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise PlottingUnavailable(
            "the plots were left out because matplotlib is missing: "
            "pip install 'splitveil[experiments]'"
        ) from error

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "splitveil"  # equal figures give equal files
    mpl.rcParams["svg.fonttype"] = "none"  # keeps text searchable
    from matplotlib import pyplot  # noqa: PLC0415

    columns = min(len(panels), _COLUMNS)
    lines = -(-len(panels) // columns)
    size = (4.2 * columns + 2.0, 3.4 * lines)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    named: dict[str, Any] = {}  # not every panel has every curve
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x_name)
        axes.set_ylabel(panel.y_name)
        if "leak" in panel.y_name:  # else the data decide
            axes.set_ylim(0.45, 1.02)
        axes.grid(alpha=0.25)
        panel.draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(list(named.values()), list(named), loc="center right", frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0, 1 - 2.0 / size[0], 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _words(statistic: str) -> str:
    return statistic.replace("_", " ").replace("auc", "AUC").replace("q95", "95 % of batches")


def _utility_words(statistic: str, less: str | None) -> str:
    return _words(statistic) + ("" if less is None else f", less that of {less}")


def _draw_points(
    curves: dict[str, list[Point]], utility: float | None, floor_name: str, axes: "Axes"
) -> None:
    for (series, points), marker in zip(curves.items(), cycle(_MARKERS), strict=False):
        x, x_sd, y, y_sd, names = zip(*points, strict=True)
        axes.errorbar(
            x, y, xerr=x_sd, yerr=y_sd, marker=marker, markersize=4, elinewidth=0.6, label=series
        )
        for at_x, at_y, name in zip(x, y, names, strict=True):
            axes.annotate(name, (at_x, at_y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    if utility is None:
        return
    left, right = axes.get_xlim()
    # A note on its direction instead of a line that would squeeze the rest of the panel.
    if left - (right - left) <= utility <= right:
        axes.axvline(utility, color="grey", linestyle="--", linewidth=1, label=floor_name)
    else:
        note = f"← {floor_name}: {utility:.2f}"
        axes.annotate(note, (0.02, 0.03), xycoords="axes fraction", fontsize=7)


def _draw_sweep(curves: dict[str, list[Point]], axes: "Axes") -> None:
    for (series, points), marker in zip(curves.items(), cycle(_MARKERS), strict=False):
        x, _, y, y_sd, _ = zip(*points, strict=True)
        if math.isfinite(x[0]):
            axes.errorbar(x, y, yerr=y_sd, marker=marker, markersize=4, linewidth=1, label=series)
        else:
            axes.axhline(y[0], color="grey", linestyle="--", linewidth=1)
            place = (0.98, y[0])
            axes.annotate(series, place, xycoords=("axes fraction", "data"), ha="right", fontsize=6)


def _draw_lines(lines: dict[str, list[Point]], axes: "Axes") -> None:
    for name, points in lines.items():
        x, _, y, y_sd, _ = zip(*points, strict=True)
        drawn = axes.plot(x, y, label=name, linewidth=1.2)
        below = [mean - sd for mean, sd in zip(y, y_sd, strict=True)]
        above = [mean + sd for mean, sd in zip(y, y_sd, strict=True)]
        axes.fill_between(x, below, above, color=drawn[0].get_color(), alpha=0.15, linewidth=0)

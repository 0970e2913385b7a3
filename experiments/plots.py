"""Draws an experiment's plots: trade-off curves, and the leak over the course of a run."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.experiments.cells import folder_name
from splitveil.experiments.collection import Row
from splitveil.experiments.settings import CoursePlot, EpochPlot, Plot, SweepPlot, TradeOffPlot
from splitveil.experiments.table import differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_MARKERS = "osD^vPX*"

Panel = tuple[str, str]
"""Layer and attack."""


class PlottingUnavailable(SettingsError):
    """The plotting library is missing; everything except the plots works without it."""


class Point(NamedTuple):
    """A point of a curve: means and standard deviations over the seeds."""

    x: float
    x_sd: float
    y: float
    y_sd: float
    name: str = ""
    """The value of the swept setting."""


def draw(plots: Iterable[Plot], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every plot for every data set as SVG, and return the paths.

    Raises:
        PlottingUnavailable: matplotlib is not installed.
    """
    drawn = []
    for number, plot in enumerate(plots, start=1):
        for dataset in dict.fromkeys(row.dataset for row in rows):
            found = [row for row in rows if row.dataset == dataset]
            path = folder / f"{number}-{plot.kind}-{folder_name(dataset)}.svg"
            if _draw(plot, dataset, found, path):
                drawn.append(path)
    return drawn


def trade_off(plot: TradeOffPlot, rows: Sequence[Row]) -> dict[Panel, dict[str, list[Point]]]:
    """Return panel -> series -> points, in the order of the sweeps in the experiment's file."""
    utility = _utility(plot, rows)
    leak: dict[Panel, dict[str, dict[str, dict[int, float]]]] = {}
    for row in _of_the_best_witness(row for row in rows if row.statistic == plot.leak):
        if row.layer is None or row.attack is None or _is_left_out(row.attack, plot.attacks):
            continue
        if row.variant == plot.floor:
            continue
        series = leak.setdefault((row.layer, row.attack), {}).setdefault(row.series, {})
        series.setdefault(row.variant, {})[row.seed] = row.value
    return {
        panel: {
            series: [
                Point(
                    *_mean_and_sd(utility[variant].values()),
                    *_mean_and_sd(values.values()),
                    variant.removeprefix(series).strip(),
                )
                for variant, values in variants.items()
                if utility.get(variant)
            ]
            for series, variants in by_series.items()
        }
        for panel, by_series in leak.items()
    }


def floor(plot: TradeOffPlot, rows: Sequence[Row]) -> float | None:
    """Return the utility that is reached without any gradient; None if it was not measured."""
    found = _utility(plot, rows).get(plot.floor or "")
    return statistics.mean(found.values()) if found else None


def _utility(plot: TradeOffPlot, rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return variant -> seed -> utility, after the plot's subtraction."""
    found = _by_seed(row for row in rows if row.statistic == plot.utility and row.attack is None)
    if plot.less is None:
        return found
    subtracted = found.get(plot.less, {})
    return {variant: differences(values, subtracted) for variant, values in found.items()}


def course(plot: CoursePlot, rows: Sequence[Row]) -> dict[Panel, dict[str, list[Point]]]:
    """Return panel -> variant -> points over steps, from 0, or epochs, from 1."""
    wanted = "step_leak" if plot.over == "steps" else "epoch_leak"
    found: dict[Panel, dict[str, dict[int, list[float]]]] = {}
    for row in _of_the_best_witness(row for row in rows if row.statistic == wanted):
        epoch = None if row.epoch is None else row.epoch + 1  # plots count epochs from 1
        at = row.step if plot.over == "steps" else epoch
        if at is None or row.layer is None or row.attack is None:
            continue
        if not _is_left_out(row.attack, plot.attacks):
            lines = found.setdefault((row.layer, row.attack), {}).setdefault(row.variant, {})
            lines.setdefault(at, []).append(row.value)
    return {
        panel: {variant: _line(values) for variant, values in variants.items()}
        for panel, variants in found.items()
    }


def epochs(plot: EpochPlot, rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Return variant -> points over epochs, counted from 1."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.statistic == plot.statistic and row.epoch is not None:
            found[row.variant][row.epoch + 1].append(row.value)
    return {variant: _line(values) for variant, values in found.items()}


def sweep(plot: SweepPlot, rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Return series -> points over the swept value; one point at infinity without such a value.

    Points have standard errors in place of deviations.
    """
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


def _draw(plot: Plot, dataset: str, rows: Sequence[Row], path: Path) -> bool:
    match plot:
        case TradeOffPlot():
            panels = trade_off(plot, rows)
            less = "" if plot.less is None else f", less that of {plot.less}"
            axes_names = (_words(plot.utility) + less, f"leak AUC, {_words(plot.leak)}")
            with _panels(len(panels), path, dataset) as all_axes:
                for axes, ((layer, attack), curves) in zip(all_axes, panels.items(), strict=True):
                    _decorate(axes, f"{attack}, {layer}", *axes_names)
                    _draw_points(axes, curves)
                    _draw_floor(axes, floor(plot, rows), plot.floor or "")
            return bool(panels)
        case CoursePlot():
            panels = course(plot, rows)
            with _panels(len(panels), path, dataset) as all_axes:
                for axes, ((layer, attack), lines) in zip(all_axes, panels.items(), strict=True):
                    _decorate(axes, f"{attack}, {layer}", plot.over.removesuffix("s"), "leak AUC")
                    _draw_lines(axes, lines)
            return bool(panels)
        case SweepPlot():
            is_drawn = not plot.datasets or dataset in plot.datasets
            curves = sweep(plot, rows) if is_drawn else {}
            with _panels(min(len(curves), 1), path, dataset) as all_axes:
                for axes in all_axes:
                    less = "" if plot.less is None else f", less that of {plot.less}"
                    _decorate(axes, "", plot.axis, _words(plot.statistic) + less)
                    _draw_sweep(axes, curves)
            return bool(curves)
        case EpochPlot():
            lines = epochs(plot, rows)
            with _panels(min(len(lines), 1), path, dataset) as all_axes:
                for axes in all_axes:
                    words = _words(plot.statistic.removeprefix("epoch_"))
                    _decorate(axes, words, "epoch", words)
                    _draw_lines(axes, lines)
            return bool(lines)


def _of_the_best_witness(rows: Iterable[Row]) -> list[Row]:
    """Keep one party's figures for each attack: the active party's, whose oracles know more.

    At layers below the cut only the passive party sees the gradients; if there is more than one
    passive party, each has its own layers.
    """
    found = list(rows)
    active = {(row.layer, row.attack) for row in found if row.party == "active"}
    return [
        _with_party_in_layer(row)
        for row in found
        if row.party == "active" or (row.layer, row.attack) not in active
    ]


def _with_party_in_layer(row: Row) -> Row:
    if row.layer is None or row.party in {"active", "passive"}:
        return row
    return row._replace(layer=f"{row.layer}, {row.party}")


def _is_left_out(attack: str, chosen: Sequence[str]) -> bool:
    return bool(chosen) and attack not in chosen


def _by_seed(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row.variant][row.seed] = row.value
    return found


def _line(values: dict[int, list[float]]) -> list[Point]:
    return [Point(float(at), 0.0, *_mean_and_sd(found)) for at, found in sorted(values.items())]


def _mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0


@contextmanager
def _panels(count: int, path: Path, title: str) -> Iterator[list["Axes"]]:
    """Yield the panels of a new figure, and save it when they are drawn; no figure for 0 panels."""
    if not count:
        yield []
        return
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

    columns = min(count, _COLUMNS)
    lines = -(-count // columns)
    size = (4.2 * columns + 2.0, 3.4 * lines)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    axes = [one for line in grid for one in line]
    for unused in axes[count:]:
        unused.set_axis_off()
    yield axes[:count]
    # Not every panel has every curve.
    named = {
        n: h for one in axes[:count] for h, n in zip(*one.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="center right", frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0, 1 - 2.0 / size[0], 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _words(statistic: str) -> str:
    return statistic.replace("_", " ").replace("auc", "AUC").replace("q95", "95 % of batches")


def _decorate(axes: "Axes", title: str, x_name: str, y_name: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    if "leak" in y_name:  # else the data decide
        axes.set_ylim(0.45, 1.02)
    axes.grid(alpha=0.25)


def _draw_points(axes: "Axes", curves: dict[str, list[Point]]) -> None:
    drawn = {series: points for series, points in curves.items() if points}
    for (series, points), marker in zip(drawn.items(), cycle(_MARKERS), strict=False):
        x, x_sd, y, y_sd, names = zip(*points, strict=True)
        axes.errorbar(
            x, y, xerr=x_sd, yerr=y_sd, marker=marker, markersize=4, elinewidth=0.6, label=series
        )
        for at_x, at_y, name in zip(x, y, names, strict=True):
            axes.annotate(name, (at_x, at_y), xytext=(4, 4), textcoords="offset points", fontsize=7)


def _draw_sweep(axes: "Axes", curves: dict[str, list[Point]]) -> None:
    for (series, points), marker in zip(curves.items(), cycle(_MARKERS), strict=False):
        x, _, y, y_sd, _ = zip(*points, strict=True)
        if math.isfinite(x[0]):
            axes.errorbar(x, y, yerr=y_sd, marker=marker, markersize=4, linewidth=1, label=series)
        else:
            axes.axhline(y[0], color="grey", linestyle="--", linewidth=1)
            place = (0.98, y[0])
            axes.annotate(series, place, xycoords=("axes fraction", "data"), ha="right", fontsize=6)


def _draw_floor(axes: "Axes", utility: float | None, name: str) -> None:
    """Draw a line, or a note on its direction if the line would squeeze the rest of the panel."""
    if utility is None:
        return
    left, right = axes.get_xlim()
    if left - (right - left) <= utility <= right:
        axes.axvline(utility, color="grey", linestyle="--", linewidth=1, label=name)
    else:
        axes.annotate(
            f"← {name}: {utility:.2f}", (0.02, 0.03), xycoords="axes fraction", fontsize=7
        )


def _draw_lines(axes: "Axes", lines: dict[str, list[Point]]) -> None:
    for name, points in lines.items():
        x, _, y, y_sd, _ = zip(*points, strict=True)
        drawn = axes.plot(x, y, label=name, linewidth=1.2)
        below = [mean - sd for mean, sd in zip(y, y_sd, strict=True)]
        above = [mean + sd for mean, sd in zip(y, y_sd, strict=True)]
        axes.fill_between(x, below, above, color=drawn[0].get_color(), alpha=0.15, linewidth=0)

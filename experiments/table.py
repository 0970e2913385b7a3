"""Writes an experiment's Markdown tables: mean and spread over seeds, beside published figures."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from splitveil.experiments.collection import FigureRow
from splitveil.experiments.settings import Experiment, Figure, Spread

Values = Mapping[tuple[str, str], Sequence[float]]
"""Data set and variant -> one value per seed."""


def markdown(
    name: str, experiment: Experiment, rows: Sequence[FigureRow], circumstances: Mapping[str, str]
) -> str:
    """Return the page: the question, one table per data set, and the circumstances of the runs.

    A figure that was neither measured nor published for a data set has no column there. Another
    size than the full one is not compared with what was published.
    """
    if any(row.size != "full" for row in rows):
        experiment = experiment.model_copy(update={"published": None})
    lines = [f"# {experiment.title}", "", experiment.about.strip(), ""]
    lines += _tables(experiment, rows)
    if experiment.published is not None:
        lines += [f"Published: {experiment.published.source}", ""]
    lines += [_spread_note(rows, experiment.spread), ""]
    if left_out := sum(row.value for row in rows if row.statistic == "left_out_batches"):
        lines.append(f"The audits left {left_out:.0f} batches out.\n")
    command = circumstances.get("command", f"python -m splitveil.experiments run {name}")
    facts = [f"`{command}`", f"size {', '.join(sorted({row.size for row in rows}))}"]
    facts += [f"{key} {value}" for key, value in circumstances.items() if key != "command"]
    lines.append("; ".join(facts))
    return "\n".join(lines) + "\n"


def values_of(rows: Iterable[FigureRow], figure: Figure) -> Values:
    whose = (figure.party, figure.layer, figure.attack)
    measured: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if (row.party, row.layer, row.attack) == whose:
            measured[row.dataset, row.variant, row.statistic][row.seed] = row.value
    values: dict[tuple[str, str], Sequence[float]] = {}
    for (dataset, variant, statistic), by_seed in list(measured.items()):
        if statistic == figure.statistic:
            other = (dataset, figure.less or "", figure.less_statistic or statistic)
            left = by_seed if figure.less is None else differences(by_seed, measured[other])
            values[dataset, variant] = list(left.values())
    return values


def differences(values: Mapping[int, float], subtracted: Mapping[int, float]) -> dict[int, float]:
    return {seed: value - subtracted[seed] for seed, value in values.items() if seed in subtracted}


def spread(values: Sequence[float], kind: Spread = "deviation") -> str:
    """Format the mean over the seeds and its standard error, or the standard deviation."""
    if not values:
        return "-"
    mean = _figure(statistics.mean(values))
    if len(values) < 2:
        return mean
    divisor = math.sqrt(len(values)) if kind == "error" else 1.0
    return f"{mean} ± {_figure(statistics.stdev(values) / divisor)}"


def _tables(experiment: Experiment, rows: Sequence[FigureRow]) -> list[str]:
    found = {title: values_of(rows, figure) for title, figure in experiment.figures.items()}
    lines = []
    for dataset in experiment.datasets:
        seeds: dict[str, set[int]] = defaultdict(set)
        for row in rows:
            if row.dataset == dataset:
                seeds[row.variant].add(row.seed)
        measured = {variant: len(of_variant) for variant, of_variant in seeds.items()}
        lines += [f"## {dataset}", ""]
        if measured:
            lines += [*_table(experiment, dataset, measured, found), ""]
        else:
            lines += ["Not run.", ""]
    return lines


def _table(
    experiment: Experiment, dataset: str, measured: Mapping[str, int], found: Mapping[str, Values]
) -> list[str]:
    published = experiment.published.values.get(dataset, {}) if experiment.published else {}
    compared = {figure for values in published.values() for figure in values}
    shown = {
        name: figure
        for name, figure in experiment.figures.items()
        if name in compared or any(found[name].get((dataset, row)) for row in measured)
    }
    header = ["variant"]
    for name, figure in shown.items():
        header += [figure.title or name, *(["published"] if name in compared else [])]
    # Where rows differ in their seeds, so do their differences from another row.
    shows_seeds = len(set(measured.values())) > 1
    header += ["seeds"] if shows_seeds else []
    lines = [_row(header), "|" + "---|" * len(header)]
    for variant in dict.fromkeys([*measured, *published]):  # some are only in the publication
        cells = [variant]
        for name in shown:
            cells.append(spread(found[name].get((dataset, variant), ()), experiment.spread))
            if name in compared:
                value = published.get(variant, {}).get(name)
                cells.append("" if value is None else _figure(value))
        cells += [str(measured.get(variant, ""))] if shows_seeds else []
        lines.append(_row(cells))
    return lines


def _spread_note(rows: Sequence[FigureRow], kind: Spread) -> str:
    by_row: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        by_row[row.dataset, row.variant].add(row.seed)
    counts = sorted({len(seeds) for seeds in by_row.values()})
    if counts[-1:] < [2]:
        return "One seed: no spread."
    words = " or ".join(str(count) for count in counts)
    return f"Mean ± standard {kind} over {words} seeds."


def _figure(value: float) -> str:
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""The parts of a report about labels that are numbers: figures and attacks.

The attacks on classes do not apply: an AUC asks how well positives and negatives are separated. A
leak AUC on this page is only ever the ledger's: that of distinguishing the two ends of the range.
"""

from collections.abc import Iterator, Mapping

from splitveil.active_party.report.figures import ABSENT, TableRow, count, figure
from splitveil.active_party.report.panels import Panel, figure_panel
from splitveil.active_party.report.run_files import RunFiles, column, num_classes, test_lines
from splitveil.active_party.report.svg import Line
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.privacy.figures import NumberBeyond, NumberLeak

_NEEDS = {
    "top_direction": "nothing",
    "informed": "the model's predictions and slopes (evaluation only)",
    "accumulated_top_direction": "nothing",
    "accumulated_ridge_40": "40 labels of the run, and its own activations",
}


def is_of_numbers(run: RunFiles) -> bool:
    return num_classes(run) == ONE_NUMBER


def number_rows(run: RunFiles) -> Iterator[TableRow]:
    """Yield the attacks of a run: R2 beyond features and its interval, then other figures of R2."""
    for attack, found in run.active.summary.of_leak.of_numbers.items():
        beyond, is_clear = (ABSENT, ABSENT), False
        if found.beyond is not None:
            beyond = (figure(found.beyond.r2), interval(found.beyond))
            is_clear = found.beyond.low > 0
        others = map(figure, (found.r2, found.q95, found.last_epoch, found.random))
        needs = _NEEDS.get(attack, "not known here")
        yield TableRow((attack, needs, *beyond, *others, count(found.examples)), is_clear)


def number_panels(run: RunFiles) -> list[Panel]:
    """Return the test RMSE over epochs beside that of the constant prediction."""
    lines = [line for line in test_lines(run) if line.number is not None]
    if not lines:
        return []
    epochs = column(line.epoch for line in lines) + 1
    found = column(line.number and line.number.rmse for line in lines)
    constant = column(line.number and line.number.constant_rmse for line in lines)
    return [
        figure_panel(
            "Test RMSE",
            [
                Line(epochs, constant, "muted dashed", "constant"),
                Line(epochs, found, "utility", "test", markers=True),
            ],
        )
    ]


def interval(found: NumberBeyond) -> str:
    return f"{figure(found.low)} to {figure(found.high)}"


def strongest_beyond(measured: Mapping[str, NumberLeak]) -> tuple[str, NumberBeyond] | None:
    found = [(name, one.beyond) for name, one in measured.items() if one.beyond is not None]
    return max(found, key=lambda item: item[1].r2, default=None)

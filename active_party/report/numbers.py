"""The parts of a report about labels that are numbers: figures, attacks, and the verdict on them.

The attacks on classes do not apply: an AUC asks how well positives and negatives are separated. A
leak AUC on this page is only ever the ledger's: that of telling the two ends of the range apart.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from splitveil.active_party.report.bounds import bounds_of, guarantee_of, in_short
from splitveil.active_party.report.figures import ABSENT, TableRow, count, figure
from splitveil.active_party.report.panels import Panel, figure_panel
from splitveil.active_party.report.run_files import RunFiles, column, num_classes, test_lines
from splitveil.active_party.report.svg import Line
from splitveil.active_party.report.verdict import RECOVERED, WEAK_GUARANTEE, Level, Verdict
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.record.figures import NumberBeyond, NumberLeak

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
            is_clear = found.beyond.is_clear
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


def judge_numbers(run: RunFiles) -> Verdict:
    """Judge a run by what its gradients explain of the labels, and by the bounds of its ledger."""
    measured = run.active.summary.of_leak.of_numbers
    bounds = bounds_of(run)
    strongest = strongest_attack(measured)
    if strongest is None:
        return Verdict("unknown", f"No attack was run; {in_short(bounds)}.")
    attack, found = strongest
    with_features = f"{attack} explains {found.r2:.1%} of the labels' variance from the gradients"
    with_features += f" (it needs to know: {_NEEDS.get(attack, 'not known here')})"
    said = with_features
    beyond = strongest_beyond(measured)
    if beyond is not None:
        attack, share = beyond
        said = (
            f"{attack} explains {share.r2:.1%} (95 % interval: {interval(share)}) of the labels' "
            f"variance which features leave (it needs to know: "
            f"{_NEEDS.get(attack, 'not known here')})"
        )
    verdict = Verdict(
        _level(measured, found), f"{said}; {in_short(bounds)}.", with_features=with_features
    )
    if guarantee_of(run) <= WEAK_GUARANTEE:  # features reveal the rest
        badge = "Bounded beyond the features"
        return replace(verdict, level="bounded", in_few_words=badge)
    return verdict


def _level(measured: Mapping[str, NumberLeak], strongest: NumberLeak) -> Level:
    """Return the level of a run without a bound: by figures beyond features, if there are any."""
    beyond = [one.beyond for one in measured.values() if one.beyond is not None]
    if max((one.r2 for one in beyond), default=strongest.r2) >= RECOVERED:
        return "recovered"
    return "leaking" if not beyond or any(one.is_clear for one in beyond) else "unbounded"


def interval(found: NumberBeyond) -> str:
    return f"{figure(found.low)} to {figure(found.high)}"


def strongest_beyond(measured: Mapping[str, NumberLeak]) -> tuple[str, NumberBeyond] | None:
    found = [(name, one.beyond) for name, one in measured.items() if one.beyond is not None]
    return max(found, key=lambda item: item[1].r2, default=None)


def strongest_attack(measured: Mapping[str, NumberLeak]) -> tuple[str, NumberLeak] | None:
    return max(measured.items(), key=lambda item: item[1].r2, default=None)

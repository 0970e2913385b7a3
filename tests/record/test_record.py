"""The record of a run: its form in the files, read back as written, or refused with a message."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from splitveil.common.errors import SettingsError
from splitveil.common.privacy import figures
from splitveil.common.record import run_record as record
from splitveil.common.record.run_record import (
    METRICS,
    SUMMARY,
    find_ledger_ahead,
    find_summary,
    read_metrics,
    read_summary,
    write_ledger_ahead,
    write_summary,
)
from splitveil.common.record.transcript import TranscriptEnd
from splitveil.common.text.values import from_form
from tests.support.records import append_lines

SPREADS = {
    "sum_kl": (0.25, 0.125, 0.0625),
    "estimate": (0.625, 0.5625, 0.53125),
    "anybody": (1.0, 1.0, 0.9375),
    "honest_but_curious": (0.8125, 0.75, 0.71875),
    "knows_class_means_only": (0.75, 0.6875, 0.65625),
}
_spreads: Any = [figures.Spread(*spread) for spread in SPREADS.values()]
BOUNDS: figures.LeakBounds = partial(
    figures.LeakBounds, epsilon=1.5, mu_knows_class_means_only=0.5
)(*_spreads)
LEDGER_FORM = {
    f"{name}_{part}": value
    for name, spread in SPREADS.items()
    for part, value in zip(("max", "q95", "mean"), spread, strict=True)
} | {"epsilon": 1.5, "mu_knows_class_means_only": 0.5}
NORM = figures.AttackFigure("cut", "norm", 0.75)
ELSEWHERE = figures.AttackFigure("ads/bank: first", "spectral", None)


def form(
    kind: str, step: int | None = None, epoch: int | None = 1, /, **more: Any
) -> dict[str, Any]:
    return {"kind": kind, "epoch": epoch, "step": step, **more}


MEASURED = figures.PredictionFigures(0.5, 0.75, 0.125)
OF_NUMBERS = figures.PredictionFigures(
    0.5, rmse=2.0, mae=1.5, r2=0.75, constant_rmse=4.0, constant_mae=3.0
)
EVALUATED = {"loss": 0.5, "auc": 0.75, "calibration_error": 0.125, "train_loss": 0.25}


LINES: Mapping[str, tuple[record.Line, dict[str, Any]]] = {
    "alignment": (record.AlignmentLine(569), form("alignment", None, None, aligned_rows=569)),
    "training": (
        record.TrainingLine(1, 2, 0.5, 0.25),
        form("train", 2, loss=0.5, noise_power=0.25),
    ),
    "leak": (
        record.LeakLine(1, 2, (NORM, ELSEWHERE), 0.5),
        form("leak", 2)
        | {"cut/norm_leak_auc": 0.75, "ads/bank: first/spectral_leak_auc": None}
        | {"random_leak_auc": 0.5},
    ),
    "epoch leak": (
        record.EpochLeakLine(1, (NORM, ELSEWHERE)),
        form("epoch_leak") | {"cut/norm": 0.75, "ads/bank: first/spectral": None},
    ),
    "leak of numbers": (
        record.NumberLeakLine(1, {"informed": 0.75, "top_direction": None}),
        form("epoch_leak_of_numbers", informed_r2=0.75, top_direction_r2=None),
    ),
    "ledger": (record.LedgerLine(1, BOUNDS), form("ledger", **LEDGER_FORM)),
    "evaluation": (
        record.EvaluationLine(1, "validation", MEASURED, 0.25),
        form("validation", **EVALUATED),
    ),
    "evaluation by class": (
        record.EvaluationLine(
            1,
            "test",
            replace(MEASURED, accuracy=0.875, average_precision=0.625),
            0.25,
            {"van": 0.75, "a/b": None},
        ),
        form("test", loss=0.5, auc=0.75, calibration_error=0.125, average_precision=0.625)
        | {"accuracy": 0.875, "train_loss": 0.25, "auc/van": 0.75, "auc/a/b": None},
    ),
    "evaluation of numbers": (
        record.EvaluationLine(1, "test", OF_NUMBERS, 0.25),
        form("test", loss=0.5, rmse=2.0, mae=1.5, r2=0.75, constant_rmse=4.0, constant_mae=3.0)
        | {"train_loss": 0.25},
    ),
    "alarm": (
        record.AlarmLine(1, NORM, 0.125, 0.625),
        form("leak_alarm") | {"cut/norm": 0.75, "margin": 0.125, "bound": 0.625},
    ),
}


def test_every_type_of_line_has_its_form_below() -> None:
    assert {type(line) for line, _ in LINES.values()} == set(get_args(record.Line))


@pytest.mark.parametrize("name", LINES)
def test_a_line_has_its_form_in_the_file_and_is_read_back(tmp_path: Path, name: str) -> None:
    line, written_form = LINES[name]
    append_lines(tmp_path, line, time_s=0.12345678)
    written = (tmp_path / METRICS).read_text()
    assert written == json.dumps({"time_s": 0.123457} | written_form) + "\n"
    (found,) = read_metrics(tmp_path).timed
    assert found == (0.123457, line)


CLASSES = figures.ClassFigures(("van", "bus"), 0.75, 0.5, {"van": 0.75}, {"van": 0.5})
LEAK = figures.LeakFigures(
    batches={"cut": {"norm": figures.BatchFigures(0.75, 0.625, 0.5625, 0.5)}},
    worst_epoch={"cut": {"norm": 0.6875}},
    run_level={
        "cut": {"accumulated_cosine": figures.RunFigures(0.75, 0.625, 0.875, 569, 0.25, 0.5, None)}
    },
    beyond=figures.BeyondFigures(
        {"norm": figures.AdjustedFigures(0.625, 0.5, 0.75)},
        {"accumulated_cosine": figures.AdvantageFigures(0.125, 0.0, 0.25, 0.625)},
        figures.EpsilonBound(
            *(1.5, "norm", 40, 38, 100, 0.95, 1e-05, 0.125),
            stated=1.0,
            stated_for="anybody",
            p_value_of_stated=0.25,
        ),
        *(569, 0.875),
    ),
    counts=figures.BatchCounts(42, 1, 2),
)
LEAK_FORM: dict[str, Any] = json.loads(
    """
{"adjusted_leak": {"norm": {"value": 0.625, "low": 0.5, "high": 0.75}},
 "leak_advantage": {"accumulated_cosine": {"value": 0.125, "low": 0.0, "high": 0.25,
                                           "prior": 0.625}},
 "epsilon_lower_bound_details": {"epsilon": 1.5, "attack": "norm", "guesses": 40, "correct": 38,
                                 "pairs": 100, "confidence": 0.95, "delta": 1e-05,
                                 "p_value": 0.125, "stated": 1.0, "stated_for": "anybody",
                                 "p_value_of_stated": 0.25},
 "adjusted_rows": 569, "feature_auc": 0.875, "epsilon_lower_bound": 1.5,
 "leak": {"cut": {"norm": {"q95": 0.75, "mean": 0.625, "last_epoch": 0.5625, "random_q95": 0.5}}},
 "leak_worst_epoch": {"cut": {"norm": 0.6875}},
 "leak_run_level": {"cut": {"accumulated_cosine": {"auc": 0.75, "low": 0.625, "high": 0.875,
                                                   "examples": 569, "tpr_at_per_mille": 0.25,
                                                   "tpr_at_percent": 0.5,
                                                   "precision_at_100": null,
                                                   "over_features": null}}},
 "leak_batches": {"observed": 42, "skipped_one_class": 1, "left_out": 2}}
"""
)
CLASSES_FORM: dict[str, Any] = json.loads(
    """
{"leak": {}, "leak_worst_epoch": {}, "leak_run_level": {},
 "leak_classes": {"cut": {"norm": {"worst_pair": ["van", "bus"], "worst_pair_auc": 0.75,
                                   "worst_pair_random": 0.5, "classes": {"van": 0.75},
                                   "random": {"van": 0.5}}}},
 "leak_run_level_classes": {"cut": {"norm": {"worst_pair": ["van", "bus"],
                                             "classes": {"van": 0.75}}}},
 "leak_batches": {"observed": null, "skipped_one_class": null, "left_out": null}}
"""
)
COUNTS = {"aligned_rows": 569, "epochs": 2, "steps": 30, "steps_per_s": 12.5}
TESTED = {"test_loss": 0.5, "test_auc": 0.75, "test_calibration_error": 0.125}
MODEL = TESTED | {"train_loss": 0.25}
DEFENSE = {"name": "marvell", "noise": "fresh"}
WITHOUT_STEPS: dict[str, Any] = {
    "defense": DEFENSE,
    "ledger": None,
    "bounds": [],
    "refused_messages": {},
}

SUMMARIES: Mapping[str, tuple[record.Summary, dict[str, Any]]] = {
    "active": (
        record.Summary(
            counts=record.RunCounts(569, 2, 30, 12.5),
            active=record.ActiveFigures(
                model=record.ModelFigures(
                    MEASURED, 0.25, MEASURED, figures.PredictionFigures(auc=0.625)
                ),
                defense=DEFENSE,
                ledger=BOUNDS,
                refused_messages={"too-large": 1},
                earlier_answers=record.EarlierAnswers(9, BOUNDS),
                leak_alarms=1,
            ),
            leak=LEAK,
            transcript=TranscriptEnd(7, "ab"),
        ),
        COUNTS
        | MODEL
        | {f"{name}_refit": figure for name, figure in TESTED.items()}
        | {"test_loss_alone": None, "test_auc_alone": 0.625}
        | {"defense": DEFENSE, "ledger": LEDGER_FORM}
        | {
            "bounds": [
                {"adversary": "anybody", "leak_auc": 1.0, "mu": None},
                {"adversary": "honest-but-curious", "leak_auc": 0.8125, "mu": None},
                {"adversary": "knows class means only", "leak_auc": 0.75, "mu": 0.5},
            ]
        }
        | {"refused_messages": {"too-large": 1}}
        | {"earlier_answers": {"examples": 9, **LEDGER_FORM}}
        | {"leak_alarms": 1}
        | LEAK_FORM
        | {"transcript": {"entries": 7, "last_link": "ab"}},
    ),
    "active without a step": (
        record.Summary(
            counts=record.RunCounts(569, 0, 0, None),
            active=record.ActiveFigures(model=record.ModelFigures(), defense=DEFENSE),
        ),
        {"aligned_rows": 569, "epochs": 0, "steps": 0, "steps_per_s": None}
        | {"test_loss": None, "train_loss": None}
        | WITHOUT_STEPS,
    ),
    "active with several classes": (
        record.Summary(
            counts=record.RunCounts(569, 2, 30, 12.5),
            active=record.ActiveFigures(
                model=record.ModelFigures(
                    replace(MEASURED, accuracy=0.875, auc_by_class={"van": 0.75}), 0.25
                ),
                defense=DEFENSE,
            ),
            leak=figures.LeakFigures(
                by_class={"cut": {"norm": CLASSES}},
                run_level_by_class={
                    "cut": {"norm": figures.ClassFigures(("van", "bus"), classes={"van": 0.75})}
                },
            ),
        ),
        COUNTS
        | TESTED
        | {"test_accuracy": 0.875, "test_auc_by_class": {"van": 0.75}, "train_loss": 0.25}
        | WITHOUT_STEPS
        | CLASSES_FORM,
    ),
    "passive": (
        record.Summary(
            counts=record.RunCounts(569, 2, 30, 12.5),
            leak=LEAK,
        ),
        COUNTS | LEAK_FORM,
    ),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_has_its_form_in_the_file_and_is_read_back(tmp_path: Path, name: str) -> None:
    summary, written_form = SUMMARIES[name]
    write_summary(tmp_path, summary)
    assert (tmp_path / SUMMARY).read_text() == json.dumps(written_form, indent=2) + "\n"
    assert read_summary(tmp_path) == summary


def test_figures_that_are_not_finite_become_null_and_are_read_as_absent(tmp_path: Path) -> None:
    model = record.ModelFigures(figures.PredictionFigures(auc=math.nan), math.inf)
    write_summary(tmp_path, record.Summary(active=record.ActiveFigures(model=model)))
    append_lines(tmp_path, record.TrainingLine(0, 0, loss=math.nan, noise_power=-math.inf))
    assert read_summary(tmp_path).of_active.model == record.ModelFigures()
    assert read_metrics(tmp_path).of(record.TrainingLine) == [record.TrainingLine(0, 0, None, None)]


def test_lines_that_are_cut_off_or_unknown_are_left_out(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"kind": "of later", "epoch": 1}\n[1]\n{"kind": "tr\n')
    append_lines(tmp_path, record.AlignmentLine(7))
    with (tmp_path / METRICS).open("a") as metrics:
        metrics.write('{"time_s": 1, "kind": "train", "epo')
    assert [line for _, line in read_metrics(tmp_path).timed] == [record.AlignmentLine(7)]


def test_what_attacks_explain_of_numbers_beyond_features_is_read_as_it_was_written() -> None:
    beyond = figures.NumberBeyond(0.25, 0.0, 0.5)
    leak = figures.LeakFigures(
        of_numbers={
            "informed": figures.NumberLeak(0.75, 0.875, 0.5, 0.125, None, beyond),
            "top_direction": figures.NumberLeak(0.5),
        }
    )
    (written,) = leak.form().values()
    assert written["informed"]["beyond"] == {"r2": 0.25, "low": 0.0, "high": 0.5}
    assert written["top_direction"]["beyond"] is None
    assert from_form(figures.LeakFigures, {"leak_of_numbers": written}) == leak
    del written["informed"]["beyond"]["low"]  # of a file that somebody has changed
    found = from_form(figures.LeakFigures, {"leak_of_numbers": written})
    assert found.of_numbers["informed"].beyond is None


def test_a_folder_without_a_record_is_empty_and_its_ledger_can_be_written_ahead(
    tmp_path: Path,
) -> None:
    assert read_metrics(tmp_path).timed == []
    assert find_summary(tmp_path) is None
    with pytest.raises(SettingsError, match=r"summary\.json: expected the summary of a run"):
        read_summary(tmp_path)
    assert find_ledger_ahead(tmp_path) is None
    write_ledger_ahead(tmp_path, BOUNDS)
    assert find_ledger_ahead(tmp_path) == BOUNDS


def test_a_damaged_record_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text('{"steps": 3')
    with pytest.raises(SettingsError, match=r"summary\.json: not valid JSON"):
        read_summary(tmp_path)
    (tmp_path / METRICS).write_bytes(b'{}\n{"kind": "\xff"}\n')
    with pytest.raises(SettingsError, match=r"metrics\.jsonl: line 2 is damaged: it is not UTF-8$"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("version", [1, 2, 0, "1", None, [1]])
def test_a_record_of_another_format_than_the_first_is_refused(
    tmp_path: Path, version: object
) -> None:
    (tmp_path / SUMMARY).write_text(json.dumps({"format": version, "steps": 3}))
    (tmp_path / METRICS).write_text(json.dumps({"kind": "format", "format": version}) + "\n")
    append_lines(tmp_path, record.AlignmentLine(7))
    if version == 1:
        assert read_summary(tmp_path).counts.steps == 3
        assert read_metrics(tmp_path).of(record.AlignmentLine) == [record.AlignmentLine(7)]
    else:
        for read in (read_summary, read_metrics):
            with pytest.raises(SettingsError, match="by another version of splitveil"):
                read(tmp_path)

"""Labels that are numbers within bounds: reading, settings, training, figures, resuming."""

import json
import math
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from splitveil import plan, simulate
from splitveil.active_party.commands.plan import show
from splitveil.active_party.report import write_comparison, write_report
from splitveil.active_party.training.label_kinds import LossWeights, NumberLabels
from splitveil.common.data.settings import DataSettings, LabelRange
from splitveil.common.data.table import Table, read_table
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.record.assessment import assess
from splitveil.common.record.run_record import read_summary
from splitveil.common.settings import validate
from tests.support.runs import build_parties, run_in_process
from tests.support.simulation import read_settings
from tests.support.tables import HIGH, LOW, number_tables, write_numbers

RANGE = {"low": 0, "high": 100}
SEEDED = ["insecure_nonce_seed=1"]


def read(folder: Path, labels: str, **values: Any) -> Table:
    (folder / "rows.csv").write_text("y\n" + "\n".join(labels.split()) + "\n")
    given = {"source": {"kind": "csv", "path": "rows.csv"}, "label_column": "y"}
    settings = validate(DataSettings, given | {"label_range": RANGE} | values, "settings")
    return read_table(settings, folder)


def test_labels_are_read_as_shares_of_their_range(tmp_path: Path) -> None:
    table = read(tmp_path, "0 25 100 1e1")
    assert table.labels is not None
    assert table.labels.tolist() == [0.0, 0.25, 1.0, np.float32(0.1)]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("5 -1 7 100.5", "rows 2, 4 (2 in all)"),
        ("5 NaN 7", "row 2"),
        ("5 forty-two 7", "row 2"),
        ("5 inf 7", "row 2"),
        ('5 "" 7', "row 2"),
        ("7 7 7", "all 3 are the same"),
        ("100 100", "all 2 are the same"),
        ("31", "all 1 are the same"),
    ],
)
def test_labels_that_cannot_be_used_are_refused_without_being_quoted(
    tmp_path: Path, labels: str, said: str
) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path, labels)
    text = str(refused.value).replace(str(tmp_path), "")
    assert said in text
    assert not any(label in text for label in ("-1", "100.5", "forty-two", "31", "7 "))


def test_a_label_outside_is_clipped_where_the_settings_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = read(tmp_path, "5 -1 7 100.5", label_range=RANGE | {"outside": "clipped"})
    assert table.labels is not None
    assert table.labels.tolist() == [np.float32(0.05), 0.0, np.float32(0.07), 1.0]
    assert "2 of 4 labels lie outside 0 to 100" in caplog.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"label_range": {"low": 3, "high": 3}}, "expected low below high, got 3 and 3"),
        ({"label_range": {"low": 3, "high": -1}}, "expected low below high"),
        ({"label_range": {"low": 3, "high": math.inf}}, "finite"),
        ({"label_range": {"low": "zero", "high": 1}}, "low"),
        ({"label_range": {"low": -1e308, "high": 1e308}}, "whose width is a finite number"),
        ({"label_range": {"low": 3}}, "high"),
        ({"classes": 3}, "classes is for classes"),
        ({"positive_label": "yes"}, "positive_label is for classes"),
        ({"class_weights": (1, 2)}, "class_weights is for classes"),
        ({"label_column": None, "features": {"numeric": "x"}}, "label_range needs"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], said: str) -> None:
    given = {"source": {"kind": "csv", "path": "rows.csv"}, "label_column": "y"}
    with pytest.raises(SettingsError, match=said):
        validate(DataSettings, given | {"label_range": RANGE} | values, "settings")


CLASSES_ALONE = [
    "{name: iso}",
    "{name: marvell}",
    "{name: max_norm}",
    "{name: max_norm_positive}",
    "{name: gafm}",
    "{name: noisy_label, mechanism: {kind: alibi, epsilon: 1}}",
    "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 1}}",
    "{name: noisy_label, mechanism: {kind: gaussian, posterior: model}}",
]


@pytest.mark.parametrize("defense", CLASSES_ALONE)
def test_a_defense_for_classes_is_refused_and_names_those_for_numbers(
    tmp_path: Path, defense: str
) -> None:
    write_numbers(tmp_path)
    with pytest.raises(SettingsError, match=r"for classes alone.*with data.label_range expected"):
        build_parties(tmp_path, [f"defense={defense}"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("report={min_test_auc: 0.7}", "report.min_test_auc"),
        (
            "leak_monitor={attacks: [norm, cosine]}",
            "leak_monitor.attacks: they distinguish classes",
        ),
    ],
)
def test_what_measures_classes_is_refused(tmp_path: Path, override: str, said: str) -> None:
    write_numbers(tmp_path)
    with pytest.raises(SettingsError, match=said):
        build_parties(tmp_path, [override])


def test_the_attacks_of_numbers_run_where_none_are_named(tmp_path: Path) -> None:
    write_numbers(tmp_path)
    settings = read_settings(tmp_path, []).active
    written_out = settings.model_dump() | {"base_dir": settings.base_dir}
    assert type(settings).model_validate(written_out).leak_monitor == settings.leak_monitor


def test_figures_are_those_of_an_independent_computation() -> None:
    generator = np.random.default_rng(1)
    labels, outputs = generator.random(500), generator.normal(scale=0.4, size=500)
    kind = NumberLabels(LabelRange(low=LOW, high=HIGH), 0.25)
    found = kind.measure(torch.from_numpy(outputs), torch.from_numpy(labels))
    predicted, true = LOW + 100 * np.clip(outputs + 0.5, 0, 1), LOW + 100 * labels
    assert found.rmse == pytest.approx(np.sqrt(np.mean((predicted - true) ** 2)))
    assert found.mae == pytest.approx(np.mean(np.abs(predicted - true)))
    assert found.r2 == pytest.approx(1 - np.mean((predicted - true) ** 2) / np.var(true), abs=1e-9)
    assert found.constant_rmse == pytest.approx(np.sqrt(np.mean((5 - true) ** 2)))
    assert found.constant_mae == pytest.approx(np.mean(np.abs(5 - true)))
    assert found.auc is None
    assert math.isnan(kind.measure(torch.zeros(1), torch.zeros(1)).agreement)


def test_the_gradient_is_that_of_the_mean_squared_error() -> None:
    kind = NumberLabels(LabelRange(low=0, high=1))
    outputs = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    labels, weights = torch.tensor([0.1, 0.4, 0.8]), torch.tensor([1.0, 2.0, 0.5])
    kind.loss(outputs, labels, LossWeights(weights)).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    expected = weights * 2 * (outputs.detach() + 0.5 - labels) / 3
    torch.testing.assert_close(outputs.grad, expected)


QUICK = {
    "contract.epochs": 12,
    "active.optimizer.learning_rate": 0.005,
    "passive.optimizer.learning_rate": 0.005,
}


def simulated(
    runs: Path, rows: int, parties: int = 1, **chosen: Any
) -> tuple[Path, dict[str, Any]]:
    active, passive = number_tables(rows, parties=parties)
    (run,) = simulate(
        active=active,
        passive=passive,
        label="amount",
        label_range=(LOW, HIGH),
        threads=1,
        runs=runs,
        **chosen,
    )
    return run.path, json.loads((run.path / "active" / "summary.json").read_text())


def test_a_model_learns_numbers_and_every_figure_stands_beside_the_constant(tmp_path: Path) -> None:
    path, summary = simulated(tmp_path, 1000, settings=QUICK)
    assert summary["test_r2"] > 0.75
    assert summary["test_rmse"] < 0.5 * summary["test_constant_rmse"]
    assert summary["test_mae"] < 0.5 * summary["test_constant_mae"]
    assert not {"test_auc", "test_calibration_error"} & set(summary)
    attacks = summary["leak_of_numbers"]
    assert attacks["informed"]["r2"] > 0.99
    assert attacks["accumulated_ridge_40"]["r2"] > 0.3
    assert attacks["informed"]["beyond"]["r2"] > 0.9
    assert attacks["accumulated_top_direction"]["beyond"]["low"] > 0.5
    assert not {name for name in summary if name.startswith("leak") and "auc" in name}
    lines = [
        json.loads(line) for line in (path / "active" / "metrics.jsonl").read_text().splitlines()
    ]
    tested = [line for line in lines if line["kind"] == "test"]
    assert len(tested) == 12
    assert tested[-1]["rmse"] == summary["test_rmse"]
    assert "auc" not in tested[-1]


def test_noisy_labels_tell_no_more_of_numbers_than_their_bound(tmp_path: Path) -> None:
    """With twice the range as noise, at most 7.1 % of the variance that features leave."""
    defense = {"name": "noisy_label"}
    _, summary = simulated(tmp_path, 2000, defense=defense, settings=QUICK)
    attacks = summary["leak_of_numbers"]
    measured = {name: one["beyond"]["r2"] for name, one in attacks.items() if one["beyond"]}
    assert set(measured) == {"informed", "accumulated_top_direction", "accumulated_ridge_40"}
    assert max(measured.values()) < 0.1


def test_early_stopping_looks_at_the_validation_error(tmp_path: Path) -> None:
    write_numbers(tmp_path)
    split = ["contract.split={kind: hash, train: 0.6, validation: 0.2, test: 0.2}"]
    both = [*split, "contract.epochs=40", "optimizer.learning_rate=0.1"]
    stopping = [*both, "early_stopping_epochs=2", *SEEDED]
    parties = build_parties(tmp_path, stopping, [*both, "insecure_nonce_seed=2"])
    run_in_process(parties)
    errors = [
        one.figures.form()["rmse"]
        for one in parties.active.evaluations
        if one.split == "validation"
    ]
    best = errors.index(min(errors))
    assert 0 < best < 37
    assert len(errors) == best + 3


@pytest.mark.parametrize("defense", ["none", "noisy_label"])
def test_the_report_has_figures_of_numbers_and_no_auc_of_classes(
    tmp_path: Path, defense: str
) -> None:
    settings = {"contract.epochs": 2, "active.serving.fallback": True}
    path, _ = simulated(tmp_path, 300, defense=defense, settings=settings)
    page = (write_report(path)).read_text()
    assert "test RMSE, both companies' data" in unescape(page)
    assert "better than the active party alone" in page
    assert "end of the range" in page
    assert "R2 beyond features" in page
    assert "of the variance that features leave" in page
    assert not any(text in page for text in ("Test AUC", "test AUC", "positives", "Gradients by"))
    assert "Labels recovered" in page if defense == "none" else "No target set" in page
    both = write_comparison([path, path], tmp_path / "both.html").read_text()
    assert "test RMSE" in both
    found = assess(read_summary(path / "active"))
    assert found.is_recovered == (defense == "none")
    said = found.in_words.partition("; bound: ")[0]
    assert said.startswith("explains ")
    assert said in both
    assert said in page


def test_several_feature_owners_and_the_bound_for_anybody(tmp_path: Path) -> None:
    defense = {"name": "noisy_label", "mechanism": {"kind": "gaussian", "noise_ratio": 1}}
    _, summary = simulated(
        tmp_path, 500, parties=2, defense=defense, settings={"contract.epochs": 3}
    )
    bounds = {one["adversary"]: one["leak_auc"] for one in summary["bounds"]}
    assert bounds["anybody"] == pytest.approx(0.76025, abs=1e-5)


def test_a_plan_says_what_the_bound_is_about() -> None:
    active, _ = number_tables(4000)
    planned = plan(
        active=active,
        label="amount",
        label_range=(LOW, HIGH),
        defense={"name": "noisy_label"},
        target_leak_auc=0.6,
    )
    text = str(planned)
    assert "numbers from -20 to 80" in text
    assert "the two ends of their range" in text
    assert "positive" not in text
    show(planned.figures, console := Console(record=True, width=250), details=False)
    assert "the two ends of their range" in console.export_text()

"""The report decides: pass or fail against a target, the next step, and its price."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from splitveil.active_party.commands.program import main
from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.active_party.defenses.projected.label_utility import label_utility
from splitveil.active_party.report import read_run, write_comparison, write_report
from splitveil.active_party.report.decision import Decision, decide
from splitveil.active_party.report.figures import finding_of
from splitveil.active_party.report.run_files import leak_series
from splitveil.active_party.report.verdict import run_levels
from splitveil.active_party.training.evaluation import read_predictions
from splitveil.common.errors import SettingsError
from splitveil.common.record.figures import (
    AdjustedFigures,
    BeyondFigures,
    EpsilonFigures,
    LeakFigures,
    LedgerFigures,
    SpreadFigures,
)
from splitveil.common.record.lines import AlignmentLine, LeakLine, LedgerLine
from splitveil.common.record.run_record import write_summary
from splitveil.common.record.summary import (
    ActiveFigures,
    ModelFigures,
    Provenance,
    RunCounts,
    Summary,
)
from tests.support.records import append_lines

ALIGNED = 10_000
TEST_ROWS = 2_000


def bounded(auc: float) -> LedgerFigures:
    """Return a ledger whose bound for anybody, and so for all, is an AUC."""
    spread = SpreadFigures(auc, auc, auc)
    return LedgerFigures(SpreadFigures(0.1, 0.1, 0.1), spread, spread, spread, spread)


def write_run(
    folder: Path,
    *,
    bound: float | None = 0.6,
    leak: Mapping[str, AdjustedFigures] | None = None,
    settings: Mapping[str, Any] | None = None,
    model: ModelFigures | None = None,
    first_id: int = 0,
    noise_seed: int = 1,
) -> Path:
    """Write the active party's files of a run that has ended."""
    active = folder / "active"
    (active / "checkpoint").mkdir(parents=True)
    append_lines(active, AlignmentLine(ALIGNED), LeakLine(0, 0, (), 0.55))
    values = {
        "contract": {
            "run_name": folder.name,
            "cut_shape": [16],
            "epochs": 5,
            "split": {"kind": "hash", "train": 0.8, "test": 0.2},
        },
        "defense": {"name": "projected_labels", "strength": {"leak_auc": 0.6}},
    }
    (active / "settings.yaml").write_text(yaml.safe_dump(values | dict(settings or {})))
    auc = _write_predictions(active, first_id, noise_seed)
    figures = ActiveFigures(
        model=model or ModelFigures(test_auc=auc),
        ledger=None if bound is None else bounded(bound),
    )
    guessed = EpsilonFigures(1.5, "norm", 400, 350, 1000, 0.95, 1e-5, 0.0) if leak else None
    beyond = BeyondFigures(adjusted=dict(leak or {}), epsilon=guessed)
    summary = Summary(
        counts=RunCounts(ALIGNED, 5, 50),
        active=figures,
        leak=LeakFigures(beyond=beyond),
        version="1.2.3",
        provenance=Provenance("2026-01-02T03:04:05+00:00", "alpha", "Linux", "3.12.1", "2.11.0"),
    )
    write_summary(active, summary)
    return folder


def _write_predictions(active: Path, first_id: int, noise_seed: int) -> float:
    generator = torch.Generator().manual_seed(noise_seed)
    labels = (torch.arange(TEST_ROWS) % 5 == 0).float()
    logits = labels + torch.randn(TEST_ROWS, generator=generator)
    ids = [[0] * 12 + list((first_id + row).to_bytes(4, "big")) for row in range(TEST_ROWS)]
    tensors = {
        "ids": torch.tensor(ids, dtype=torch.uint8),
        "logits": logits,
        "labels": labels,
        "training_rows": torch.zeros(16, dtype=torch.uint8),
    }
    save_file(tensors, active / "checkpoint" / "test_predictions.safetensors")
    wins = logits[labels == 1][:, None] > logits[labels == 0]
    return float(wins.double().mean())


def decision_of(folder: Path, target: float | None = None) -> Decision:
    run = read_run(folder)
    if target is not None:
        run = run.with_target(target)
    return decide(run, [finding_of(one) for one in leak_series(run)], run_levels(run))


def outcomes(decision: Decision) -> dict[str, str]:
    return {check.name: check.outcome for check in decision.checks}


def test_a_bound_at_the_target_passes_and_one_above_it_fails(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", bound=0.6)
    assert decision_of(run, 0.6).outcome == "pass"
    assert decision_of(run, 0.61).outcome == "pass"
    missed = decision_of(run, 0.599)
    assert missed.outcome == "fail"
    assert outcomes(missed)["bound for anybody"] == "fail"


def test_a_run_without_a_bound_fails_however_little_was_measured(tmp_path: Path) -> None:
    low = {"norm": AdjustedFigures(0.51, 0.49, 0.53)}
    decision = decision_of(write_run(tmp_path / "run", bound=1.0, leak=low), 0.6)
    assert outcomes(decision) == {
        "bound for anybody": "fail",
        "measured attacks": "pass",
        "attacks below the stated bounds": "pass",
    }
    assert decision.outcome == "fail"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (AdjustedFigures(0.7, 0.68, 0.72), "fail"),
        (AdjustedFigures(0.61, 0.57, 0.65), "open"),
        (AdjustedFigures(0.59, 0.57, 0.61), "open"),
        (AdjustedFigures(0.55, 0.53, 0.57), "pass"),
    ],
)
def test_a_measured_attack_is_held_against_the_target_with_its_interval(
    tmp_path: Path, found: AdjustedFigures, expected: str
) -> None:
    run = write_run(tmp_path / "run", bound=0.6, leak={"norm": found})
    decision = decision_of(run, 0.6)
    assert outcomes(decision)["measured attacks"] == expected
    # A bound speaks for an attack whose interval is too wide; it cannot for one that passes it.
    assert decision.outcome == ("fail" if expected == "fail" else "pass")


def test_the_next_step_is_a_setting_with_the_price_of_plan(tmp_path: Path) -> None:
    marvell = {"defense": {"name": "marvell"}}
    decision = decision_of(write_run(tmp_path / "run", bound=1.0, settings=marvell), 0.65)
    (step,) = decision.steps
    assert yaml.safe_load(step.setting) == {
        "defense": {"name": "projected_labels", "strength": {"leak_auc": 0.65}}
    }
    worth = label_utility(8_000, 0.2, mu_of_leak_auc(0.65), 96)
    assert f"8,000 training rows teach at most what {worth.rows:,.0f} rows" in step.price
    assert "has a test AUC of 0.7" in step.price
    prices = {price.leak_auc: price for price in decision.prices}
    assert prices[0.65].is_target
    assert prices[0.65].rows == pytest.approx(worth.rows)
    assert [price.share for price in decision.prices] == sorted(p.share for p in decision.prices)


def test_a_weaker_strength_of_the_same_defense_keeps_its_other_settings(tmp_path: Path) -> None:
    own = {"defense": {"name": "projected_labels", "strength": {"leak_auc": 0.7}, "rank": 32}}
    decision = decision_of(write_run(tmp_path / "run", bound=0.7, settings=own), 0.6)
    (step,) = decision.steps
    assert yaml.safe_load(step.setting)["defense"] == {
        "name": "projected_labels",
        "strength": {"leak_auc": 0.6},
        "rank": 32,
    }


def test_what_leaves_no_bound_has_to_go_first(tmp_path: Path) -> None:
    loose = {"allow_audits": True, "leak_gate": {"action": "stop"}}
    decision = decision_of(write_run(tmp_path / "run", bound=1.0, settings=loose), 0.6)
    settings = [step.setting for step in decision.steps]
    assert settings[:2] == ["allow_audits: false", "leak_gate: {action: warn}"]


def test_without_a_target_no_run_passes_and_a_budget_is_a_target(tmp_path: Path) -> None:
    decision = decision_of(write_run(tmp_path / "a"))
    assert (decision.word, decision.has_target) == ("no target", False)
    assert "report.target_leak_auc" in decision.headline
    budget = {"run_budget": {"leak_auc": 0.62}}
    assert decision_of(write_run(tmp_path / "b", settings=budget)).outcome == "pass"
    own = budget | {"report": {"target_leak_auc": 0.55}}
    assert decision_of(write_run(tmp_path / "c", settings=own)).outcome == "fail"


@pytest.mark.parametrize(("least", "expected"), [(0.7, "pass"), (0.76, "open"), (0.85, "fail")])
def test_a_smallest_test_auc_is_held_against_its_interval(
    tmp_path: Path, least: float, expected: str
) -> None:
    """The AUC is .76 with a standard error of .013."""
    settings = {"report": {"target_leak_auc": 0.6, "min_test_auc": least}}
    decision = decision_of(write_run(tmp_path / "run", settings=settings))
    assert outcomes(decision)["test AUC"] == expected
    assert decision.outcome == expected


def test_a_joint_model_no_better_than_the_active_party_alone_fails(tmp_path: Path) -> None:
    for number, (alone, expected) in enumerate([(0.7, "pass"), (0.8, "fail")]):
        model = ModelFigures(test_auc=0.75, test_auc_alone=alone)
        run = write_run(tmp_path / f"run-{number}", model=model)
        assert decision_of(run, 0.6).outcome == expected
        page = write_report(run).read_text(encoding="utf-8")
        assert f"the active party alone: {alone:.3f}" in page


def test_an_attack_above_a_bound_for_anybody_fails_the_run(tmp_path: Path) -> None:
    high = {"norm": AdjustedFigures(0.9, 0.88, 0.92)}
    decision = decision_of(write_run(tmp_path / "run", bound=0.6, leak=high), 0.95)
    assert outcomes(decision)["attacks below the stated bounds"] == "fail"
    assert decision.outcome == "fail"
    assert "use no bound of this run" in decision.steps[0].why


def test_the_command_takes_a_target_and_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = (str(write_run(tmp_path / name)) for name in "ab")

    def run(*arguments: str) -> int | str | None:
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        return ended.value.code

    assert run(a, "--target-leak-auc", "0.55", "--json") == 0
    page = Path(json.loads(capsys.readouterr().out)["report"]).read_text(encoding="utf-8")
    assert "does not meet the target of leak AUC 0.55" in page
    assert run(a, "--target-leak-auc", "1.5") == 2
    assert run(a, b, "--target-leak-auc", "0.6") == 2
    assert run(a, b) == 0
    assert (tmp_path / "comparison.html").is_file()
    assert run(a) == 0
    assert (tmp_path / "a" / "active" / "report.html").is_file()
    assert run("--compare", a, b, "--output", str(tmp_path / "two.html")) == 0
    assert "2 runs side by side" in (tmp_path / "two.html").read_text(encoding="utf-8")
    for wrong in ((), (str(tmp_path),), ("--compare", a), (a, "--compare", a, b)):
        assert run(*wrong) == 2


def test_a_comparison_has_paired_intervals_where_the_test_rows_are_shared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a")
    same = write_run(tmp_path / "b", noise_seed=2)
    other = write_run(tmp_path / "c", first_id=500)
    page = write_comparison([first, same], tmp_path / "same.html").read_text(encoding="utf-8")
    assert f"the same {TEST_ROWS:,} test rows, and the same training rows" in page
    assert "not comparable" not in page
    page = write_comparison([first, same, other], tmp_path / "o.html").read_text(encoding="utf-8")
    assert f"run 3: the test rows differ: {TEST_ROWS - 500:,} are common to both" in page
    assert "not comparable" in page


def test_damaged_predictions_are_refused_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "active" / "checkpoint" / "test_predictions.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(SettingsError, match="predictions of the test rows cannot be read"):
        read_predictions(run / "active")
    path.unlink()
    assert read_predictions(run / "active") is None
    write_report(run)


def test_the_page_says_where_its_figures_come_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    page = write_report(run).read_text(encoding="utf-8")
    for expected in ("2026-01-02 03:04:05 UTC", "1.2.3", "3.12.1, 2.11.0", ">alpha<"):
        assert expected in page
    found = read_run(run).active.summary
    assert found.provenance is not None
    nameless = replace(found, provenance=found.provenance._replace(host=None))
    write_summary(run / "active", nameless)
    page = write_report(run).read_text(encoding="utf-8")
    assert ">alpha<" not in page
    assert "not shown (report.show_host)" in page


def test_no_page_prints_a_bound_below_its_value(tmp_path: Path) -> None:
    """A bound of .60004 is .601 wherever it stands: in words, tiles, checks, tables and charts."""
    runs = [write_run(tmp_path / name, bound=0.60004) for name in "ab"]
    for run in runs:
        append_lines(run / "active", *(LedgerLine(epoch, bounded(0.60004)) for epoch in range(2)))
    pages = [write_report(runs[0]), write_comparison(runs, tmp_path / "c.html")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        # The estimate beside it is no bound.
        assert text.count("0.601") > 3
        found = [line for line in text.splitlines() if "0.600" in line]
        assert all("stimate" in line for line in found), found

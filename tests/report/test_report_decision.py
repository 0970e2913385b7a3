"""The report decides: pass or fail against a target, the next step, and its price."""

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from splitveil.active_party.commands.program import main
from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.active_party.report import read_run, write_comparison, write_report
from splitveil.active_party.report.verdict import Verdict, verdict_of
from splitveil.active_party.training.evaluation import read_predictions
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.figures import (
    AdjustedFigures,
    BeyondFigures,
    LeakBounds,
    LeakFigures,
    PredictionFigures,
    Spread,
)
from splitveil.common.record.run_record import (
    ActiveFigures,
    AlignmentLine,
    LeakLine,
    LedgerLine,
    ModelFigures,
    Provenance,
    RunCounts,
    Summary,
    write_summary,
)
from tests.support.commands import exit_code_of
from tests.support.records import append_lines

ALIGNED = 10_000
LITTLE = {"norm": AdjustedFigures(0.52, 0.5, 0.54)}
TEST_ROWS = 2_000


def bounded(auc: float) -> LeakBounds:
    """Return a ledger whose bounds for all peers are an AUC."""
    spread = Spread(auc, auc, auc)
    return LeakBounds(Spread(0.1, 0.1, 0.1), spread, spread, spread, spread)


def write_run(
    folder: Path,
    *,
    bound: float | None = 0.6,
    leak: Mapping[str, AdjustedFigures] | None = LITTLE,
    settings: Mapping[str, Any] | None = None,
    model: ModelFigures | None = None,
    first_id: int = 0,
    noise_seed: int = 1,
) -> Path:
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
        "defense": {"name": "noisy_label"},
    }
    (active / "settings.yaml").write_text(yaml.safe_dump(values | dict(settings or {})))
    auc = _write_predictions(active, first_id, noise_seed)
    figures = ActiveFigures(
        model=model or ModelFigures(PredictionFigures(auc=auc)),
        ledger=None if bound is None else bounded(bound),
    )
    beyond = BeyondFigures(adjusted=dict(leak or {}))
    summary = Summary(
        counts=RunCounts(ALIGNED, 5, 50),
        active=figures,
        leak=LeakFigures(beyond=beyond),
        version="1.2.3",
        provenance=Provenance("2026-01-02T03:04:05+00:00", "Linux", "3.12.1", "2.11.0", "a T4"),
    )
    write_summary(active, summary)
    return folder


def _write_predictions(active: Path, first_id: int, noise_seed: int) -> float:
    """Write what the model predicts of the test rows, and return its AUC, which is about .76."""
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
    return float((logits[labels == 1][:, None] > logits[labels == 0]).double().mean())


def decision_of(folder: Path, target: float | None = None) -> Verdict:
    run = read_run(folder)
    if target is not None:
        run = run.with_target(target)
    return verdict_of(run)


def outcomes(decision: Verdict) -> dict[str, str]:
    return {check.name: check.outcome for check in decision.checks}


@pytest.mark.parametrize(
    ("bound", "interval", "target", "check", "expected"),
    [
        (0.6, (0.52, 0.5, 0.54), 0.6, "bound for anybody", "pass"),
        (0.6, (0.52, 0.5, 0.54), 0.61, "bound for anybody", "pass"),
        (0.6, (0.52, 0.5, 0.54), 0.599, "bound for anybody", "fail"),
        (0.6, None, 0.6, "measured attacks", "open"),  # nothing passes that was not measured
        (1.0, (0.51, 0.49, 0.53), 0.6, "bound for anybody", "fail"),  # however little was measured
        (0.6, (0.7, 0.68, 0.72), 0.6, "measured attacks", "fail"),
        # A bound speaks for an attack whose interval is too wide; it cannot for one that passes it.
        (0.6, (0.61, 0.57, 0.65), 0.6, "measured attacks", "open"),
        (0.6, (0.59, 0.57, 0.61), 0.6, "measured attacks", "open"),
        (0.6, (0.55, 0.53, 0.57), 0.6, "measured attacks", "pass"),
        (0.6, (0.9, 0.88, 0.92), 0.95, "attacks below the stated bounds", "fail"),
    ],
)
def test_bounds_and_measured_attacks_are_held_against_the_target(
    tmp_path: Path,
    bound: float,
    interval: tuple[float, float, float] | None,
    target: float,
    check: str,
    expected: str,
) -> None:
    leak = None if interval is None else {"norm": AdjustedFigures(*interval)}
    own = {"defense": {"name": "custom", "module": "own:Own"}}
    run = write_run(tmp_path / "own", bound=bound, leak=leak, settings=own)
    decision = decision_of(run, target)
    assert outcomes(decision)[check] == expected
    not_measured = "open" if interval is None else "pass"
    assert decision.outcome == ("fail" if expected == "fail" else not_measured)
    is_above = interval is not None and interval[1] > bound
    assert ("use no bound of this run" in str(decision.steps)) is is_above
    # A bound that is proved speaks for what cannot be separated from features.
    proved = decision_of(write_run(tmp_path / "proved", bound=bound, leak=leak), target)
    assert "use no bound of this run" not in str(proved.steps)
    below = "pass" if interval is not None and bound < 1 else None  # else there is no check
    assert outcomes(proved).get("attacks below the stated bounds") == below
    assert proved.outcome == ("pass" if is_above else decision.outcome)


def test_the_next_step_is_a_setting_that_bounds_the_leak_at_the_target(tmp_path: Path) -> None:
    marvell = {"defense": {"name": "marvell"}}
    decision = decision_of(write_run(tmp_path / "run", bound=1.0, settings=marvell), 0.65)
    (step,) = decision.steps
    gaussian = {"kind": "gaussian", "noise_ratio": math.ceil(1000 / mu_of_leak_auc(0.65)) / 1000}
    noisy = {"name": "noisy_label", "mechanism": gaussian}
    assert yaml.safe_load(step.setting) == {"defense": noisy}
    assert "has a test AUC of 0.7" in step.price
    own = {"name": "noisy_label", "mechanism": {"kind": "laplace", "epsilon": 3}}
    (step,) = decision_of(
        write_run(tmp_path / "b", bound=0.7, settings={"defense": own}), 0.65
    ).steps
    found = yaml.safe_load(step.setting)["defense"]["mechanism"]
    assert found["kind"] == "laplace"
    assert found["epsilon"] < 3


def test_what_leaves_no_bound_has_to_go_first(tmp_path: Path) -> None:
    loose = {"initial_weights": "runs/monday/active/checkpoint"}
    decision = decision_of(write_run(tmp_path / "run", bound=1.0, settings=loose), 0.6)
    settings = [step.setting for step in decision.steps]
    assert settings[0] == "initial_weights: null"
    assert "true labels" not in decision.steps[0].why  # noisy ones are as likely


BUDGET = {"run_budget": {"leak_auc": 0.62}}


def test_too_low_a_test_auc_asks_for_more_rows_to_learn_from(tmp_path: Path) -> None:
    settings = {"report": {"target_leak_auc": 0.6, "min_test_auc": 0.76}}
    step = decision_of(write_run(tmp_path / "run", settings=settings)).steps[-1]
    assert "more aligned rows" in step.setting
    assert "test rows" not in f"{step.why} {step.price}"


def test_what_was_not_measured_or_has_not_ended_passes_nothing(tmp_path: Path) -> None:
    settings = {"report": {"target_leak_auc": 0.6, "min_test_auc": 0.7}}
    run = write_run(tmp_path / "run", settings=settings, model=ModelFigures())
    decision = decision_of(run)
    assert (decision.outcome, outcomes(decision)["test AUC"]) == ("open", "open")
    (run / "active" / "summary.json").unlink()
    append_lines(run / "active", LedgerLine(0, bounded(0.6)))
    decision = decision_of(run)
    assert outcomes(decision)["the run has ended"] == decision.outcome == "open"


WORSE, ALONE = PredictionFigures(auc=0.75), PredictionFigures(auc=0.8)


@pytest.mark.parametrize(
    ("settings", "model", "expected"),
    [
        (BUDGET, None, "pass"),
        (BUDGET | {"report": {"target_leak_auc": 0.55}}, None, "fail"),
        # The test AUC is .76 with a standard error of .013.
        ({"report": {"target_leak_auc": 0.6, "min_test_auc": 0.7}}, None, "pass"),
        ({"report": {"target_leak_auc": 0.6, "min_test_auc": 0.76}}, None, "open"),
        ({"report": {"target_leak_auc": 0.6, "min_test_auc": 0.85}}, None, "fail"),
        # The joint model has to be better than that of the active party alone.
        (
            BUDGET,
            ModelFigures(
                PredictionFigures(None, 0.75, 0.125, 0.375), alone=PredictionFigures(auc=0.7)
            ),
            "pass",
        ),
        (
            BUDGET,
            ModelFigures(WORSE, alone=ALONE),
            "fail",
        ),
        # Where the refitted one predicts, it is not judged by the other.
        (BUDGET, ModelFigures(WORSE, refit=PredictionFigures(auc=0.85), alone=ALONE), "open"),
        (BUDGET, ModelFigures(WORSE, refit=PredictionFigures(auc=0.79), alone=ALONE), "fail"),
        (BUDGET, ModelFigures(PredictionFigures(auc=0.85), refit=WORSE, alone=ALONE), "open"),
        (
            BUDGET | {"inference": {"model": "trained"}},
            ModelFigures(WORSE, refit=PredictionFigures(auc=0.85), alone=ALONE),
            "fail",
        ),
    ],
)
def test_settings_say_what_a_run_has_to_reach(
    tmp_path: Path, settings: dict[str, Any], model: ModelFigures | None, expected: str
) -> None:
    run = write_run(tmp_path / "run", settings=settings, model=model)
    decision = decision_of(run)
    assert decision.outcome == expected
    if "min_test_auc" in str(settings):
        assert outcomes(decision)["test AUC"] == expected
    if model is not None and model.alone is not None:
        screen, page = write_report(run).read_text(encoding="utf-8").split('<details id="details">')
        assert f">our own data only</th><td>{model.alone.auc:.3f}</td>" in screen
        assert not {"PR-AUC", "ECE"} & set(re.findall("[A-Z-]+", screen))
        shown = "(PR-AUC)</th><td>0.375</td>", "(ECE)</th><td>0.125</td>"
        has_it = model.test.average_precision is not None
        assert [one in page for one in shown] == [has_it, has_it]


@pytest.mark.parametrize(
    ("release", "bound", "said"),
    [
        (None, 0.5, "Nothing that depends on a label was sent."),
        ("noisy_labels", 0.6, "A noisy label of each training row was sent, and no gradient to"),
        ("noisy_sums", 0.6, "Sums of the training rows' labels with noise were sent, and no grad"),
        ("noisy_labels", None, "There was no gradient to attack."),  # the run was stopped
    ],
)
def test_a_run_without_gradients_says_what_it_sent_in_their_place(
    tmp_path: Path, release: str | None, bound: float | None, said: str
) -> None:
    settings = {"contract": {"exchange": "one_shot", "release": release}}
    decision = decision_of(write_run(tmp_path / "run", settings=settings, bound=bound), 0.6)
    assert decision.strongest.startswith(said)


def test_a_gain_within_the_interval_of_chance_is_not_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings=BUDGET)
    joint = read_run(run).active.summary.of_active.model.test.auc
    assert joint is not None
    for name, less, badge in (("close", 0.01, "No gain shown"), ("far", 0.1, "Meets the target")):
        model = ModelFigures(
            PredictionFigures(auc=joint), alone=PredictionFigures(auc=joint - less)
        )
        found = decision_of(write_run(tmp_path / name, settings=BUDGET, model=model))
        assert found.badge == badge
        assert (found.outcome == "pass") is (less == 0.1)
    model = ModelFigures(PredictionFigures(auc=joint), alone=PredictionFigures(auc=joint - 0.01))
    for release, score in ((None, "a score, "), ("noisy_labels", "")):
        contract = {"exchange": "one_shot", "release": release}
        run = write_run(tmp_path / f"{release}", settings={"contract": contract}, model=model)
        step = decision_of(run, 0.6).steps[-1]
        assert step.setting == f"(more aligned rows, {score}or no joint run)"
        assert ("bottom_model: {kind: score}" in step.why) is (release is None)


def test_without_a_target_no_run_passes(tmp_path: Path) -> None:
    decision = decision_of(write_run(tmp_path / "a"))
    assert (decision.outcome, decision.badge) == ("unknown", "No target set")
    assert "target_leak_auc" in decision.steps[0].setting


def test_the_command_takes_a_target_and_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = (str(write_run(tmp_path / name)) for name in "ab")

    run = partial(exit_code_of, main, "report")
    assert run(a, "--target-leak-auc", "0.55", "--json") == 0
    page = Path(json.loads(capsys.readouterr().out)["report"]).read_text(encoding="utf-8")
    assert "does not meet all that is asked: bound for anybody" in page
    assert run(a, "--target-leak-auc", "1.5") == 2
    assert run(a, b, "--target-leak-auc", "0.6") == 2
    assert run(a, b) == 0
    assert (tmp_path / "comparison.html").is_file()
    assert run(a) == 0
    assert (tmp_path / "a" / "active" / "report.html").is_file()
    capsys.readouterr()
    assert run(a, b, "--output", str(tmp_path / "two.html")) == 0
    assert "labels: attack" in capsys.readouterr().out
    assert "2 runs side by side" in (tmp_path / "two.html").read_text(encoding="utf-8")
    assert run(str(tmp_path)) == 2


def test_a_comparison_says_whether_the_test_rows_are_the_same(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a")
    same = write_run(tmp_path / "b", noise_seed=2)
    other = write_run(tmp_path / "c", first_id=500)
    for runs, are_same in (([first, same], True), ([first, same, other], False)):
        page = write_comparison(runs, tmp_path / "page.html").read_text(encoding="utf-8")
        assert ("All runs have the same test rows" in page) == are_same
        assert ("The test rows of the runs differ" in page) != are_same


def test_the_page_names_the_test_auc_of_an_undefended_run_on_the_same_rows(tmp_path: Path) -> None:
    undefended = {"defense": {"name": "none"}}
    run = write_run(tmp_path / "run")
    write_run(tmp_path / "other", settings=undefended, first_id=500)  # other test rows
    assert "both, without a defense" not in write_report(run).read_text(encoding="utf-8")
    model = ModelFigures(PredictionFigures(auc=0.8123))
    beside = write_run(tmp_path / "undefended", settings=undefended, model=model, noise_seed=2)
    said = ">both, without a defense</th><td>0.812</td>"
    assert said in write_report(run).read_text(encoding="utf-8")
    assert said not in write_report(beside).read_text(encoding="utf-8")
    (tmp_path / "other" / "active" / "settings.yaml").write_text("a: [")  # damaged
    assert "without a defense" not in write_report(run).read_text(encoding="utf-8")


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
    for expected in ("2026-01-02 03:04:05 UTC", "1.2.3", "3.12.1, 2.11.0", "a T4"):
        assert expected in page


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

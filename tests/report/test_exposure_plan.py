"""What the passive party's plan says before a run, and what it refuses."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import splitveil
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.passive_party import exposure_plan, feature_exposure
from splitveil.passive_party.assembly import BottomBuilder
from splitveil.passive_party.commands.program import main
from splitveil.passive_party.exposure_plan import (
    ExposurePlan,
    check_exposure,
    exposure_plan_of,
    remedy_of,
)
from splitveil.passive_party.feature_exposure import Sample, measure_exposure
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.settings import PassiveSettings
from tests.support.commands import exit_code_of

ROWS = 800
NUMBERS = ("copy*", "noise*", "same")


@pytest.fixture(autouse=True)
def few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure_plan, "WIDTHS", (1, 4, 16))
    monkeypatch.setattr(feature_exposure, "_EPOCHS", 15)


def settings_file(
    folder: Path,
    *,
    rows: int = ROWS,
    columns: Sequence[str] = NUMBERS,
    kind: str = "pca",
    **contract: Any,
) -> Path:
    """Write a table of five copies of a number, five noises, a category and a constant."""
    drawn = np.random.default_rng(1)
    number = drawn.normal(size=rows)
    table = {f"copy{i}": number for i in range(5)} | {
        f"noise{i}": drawn.normal(size=rows) for i in range(5)
    }
    table |= {"kind": np.array(["a", "b"])[(number > 0).astype(int)], "same": np.ones(rows)}
    lines = [",".join(["id", "split", *table])]
    for row in range(rows):
        split = "test" if row % 8 == 0 else "train"
        cells = ["rare" if split == "test" and k == "kind" else v[row] for k, v in table.items()]
        lines.append(",".join(map(str, [row, split, *cells])))
    (folder / "table.csv").write_text("\n".join(lines))
    contract = {
        "run_name": "planned",
        "cut_shape": [2],
        "batch_size": 32,
        "epochs": 1,
        "exchange": "one_shot",
        "split": {"kind": "column", "column": "split"},
    } | contract
    settings = {
        "contract": contract,
        "security": {"mode": "insecure"},
        "data": {
            "source": {"kind": "csv", "path": "table.csv"},
            "id_column": "id",
            "features": {
                "numeric": list(columns),
                "categorical": ["kind"] if columns == NUMBERS else [],
            },
        },
        "bottom_model": {"kind": kind},
        "optimizer": {"kind": "adam", "learning_rate": 0.01},
    }
    (folder / "passive.yaml").write_text(yaml.safe_dump(settings))
    return folder / "passive.yaml"


def planned(path: Path, *overrides: str) -> ExposurePlan:
    settings = load_party_settings(PassiveSettings, path, overrides)
    return exposure_plan_of(settings, PartyData.of(settings))


def disclosed(plan: ExposurePlan, width: int) -> dict[str, float]:
    return {one.name: one.gain_fraction for one in plan.exposures[width].columns}


def test_what_components_carry_is_disclosed_and_noise_that_they_leave_out_is_not(
    tmp_path: Path,
) -> None:
    """The first component is the copied number; each further one carries more of the noises."""
    plan = planned(settings_file(tmp_path))
    assert [*plan.exposures] == [1, 2, 4, 16]
    of_one, of_most = disclosed(plan, 1), disclosed(plan, 16)
    assert min(of_one[f"copy{i}"] for i in range(5)) > 0.9
    assert of_one["kind"] > 0.9
    assert max(of_one[f"noise{i}"] for i in range(5)) < 0.15
    assert min(of_most[f"noise{i}"] for i in range(5)) > 0.6
    assert plan.exposures[1].unjudged == ("same",)
    assert plan.exposures[1].disclosure < plan.own.disclosure < plan.exposures[16].disclosure


def test_one_score_that_is_fitted_to_a_column_gives_that_column_away(tmp_path: Path) -> None:
    path = settings_file(tmp_path, kind="score", cut_shape=[1], release="noisy_labels")
    plan = planned(path)
    aimed = {one.name: one.gain_fraction for one in plan.by_score}
    assert min(aimed.values()) > 0.7
    assert plan.target in aimed
    assert disclosed(plan, 1)[plan.target] > 0.9
    others = [name for name in aimed if name.startswith("noise") and name != plan.target]
    assert max(disclosed(plan, 1)[name] for name in others) < 0.15


def test_each_of_several_scores_gives_a_column_away(tmp_path: Path) -> None:
    """Labels of three classes are two scores, which a label owner may aim at two columns."""
    path = settings_file(tmp_path, kind="score", cut_shape=[2], release="noisy_labels")
    of_one, of_two = planned(path), planned(path, "contract.scores=2")
    assert [*of_two.exposures] == [2, 4, 16]
    first, second = of_two.target.split(" and ")
    assert first == of_one.target
    assert disclosed(of_two, 2)[second] > 0.9
    assert of_two.own.disclosure > of_one.own.disclosure


def test_the_command_prints_widths_against_columns_and_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = settings_file(tmp_path, cut_shape=[16])
    assert exit_code_of(main, "plan", path) == 0
    printed = capsys.readouterr().out
    assert "16*" in printed
    assert "mean disclosure" in printed
    assert "number per row instead of 16 (contract.cut_shape): noise" in printed
    assert "Not measured: same." in printed
    assert exit_code_of(main, "plan", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["width"] == 16


def test_a_run_above_the_limit_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens: without the check, this run would wait for the active party."""
    path = settings_file(tmp_path, cut_shape=[16])
    limit = planned(path).exposures[4].disclosure + 0.001
    runs = ["--runs", tmp_path / "runs", "--set", "connect=127.0.0.1:9"]
    for command in ("check", "run"):
        assert exit_code_of(main, command, path, *runs, "--set", f"max_exposure={limit}") == 2
        assert "contract.cut_shape: [4] discloses" in caplog.text + capsys.readouterr().err
        caplog.clear()
    settings = load_party_settings(PassiveSettings, path, ["max_exposure=0.01"])
    with pytest.raises(SettingsError, match=r"even 1 number per row .* out of data.features"):
        check_exposure(settings, PartyData.of(settings))
    settings = load_party_settings(PassiveSettings, path, ["max_exposure=1"])
    check_exposure(settings, PartyData.of(settings))


@pytest.mark.parametrize("kind", ["pca", "score"])
def test_a_width_above_the_rank_is_refused_before_anything_is_sent(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens: without the check, this run would wait for the active party."""
    path = settings_file(
        tmp_path,
        columns=("copy0",),
        kind=kind,
        cut_shape=[17],
        release="noisy_labels" if kind == "score" else None,
    )
    runs = ["--runs", tmp_path / "runs", "--set", "connect=127.0.0.1:9"]
    assert exit_code_of(main, "run", path, *runs) == 2
    said = caplog.text + capsys.readouterr().err
    assert "have 16 independent directions; expected contract.cut_shape of at most [16]" in said


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"rows": 50}, DataError, "43 rows are too few .* at least 50"),
        ({"columns": ("copy0",), "cut_shape": [20]}, SettingsError, "independent directions"),
    ],
)
def test_what_cannot_be_measured_is_said(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        planned(settings_file(tmp_path, **given))


def test_one_column_has_the_widths_of_its_rank(tmp_path: Path) -> None:
    plan = planned(settings_file(tmp_path, columns=("copy0",)))
    assert [*plan.exposures] == [1, 2, 4, 16]


def test_a_model_that_learns_is_measured_before_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = settings_file(tmp_path, kind="mlp", exchange="gradients")
    assert exit_code_of(main, "plan", path) == 0
    printed = capsys.readouterr().out
    assert "measured before it trains" in printed
    in_python = splitveil.exposure_plan(tmp_path)
    assert str(in_python).split("\n")[0] in printed
    assert {*in_python.frame().columns} == {"width", "column", "right", "without", "disclosure"}


def test_the_columns_of_all_epochs_together_are_given_away_where_each_alone_hides_some(
    tmp_path: Path,
) -> None:
    """A model that sends another column in every epoch is counted as all that it has sent."""
    path = settings_file(tmp_path, kind="mlp", exchange="gradients", epochs=5, cut_shape=[1])
    settings = load_party_settings(PassiveSettings, path)
    data = PartyData.of(settings)
    rows = AlignedRows.derive(
        settings.contract, bytes(32), data.ids, np.arange(ROWS), data.table.splits
    )
    noises = torch.stack(
        [torch.from_numpy(data.table.numeric[f"noise{i}"][rows.file_rows]) for i in range(5)]
    )
    with ExitStack() as opened:
        recorder, state = None, None
        for epoch in range(5):
            if epoch in {0, 3}:  # the process is restarted
                state = None if recorder is None else recorder.state_dict()
                opened.close()
                made = PassiveRecorder(settings, tmp_path, data.ids, None)
                recorder = opened.enter_context(made)
                recorder.on_aligned(rows, bytes(32))
                if state is not None:
                    recorder.load_state_dict(state)
            assert recorder is not None
            for batch in np.array_split(rows.splits["train"], 20):
                sent = noises[epoch, torch.from_numpy(batch)][:, None].float()
                recorder.on_step(
                    Batch(epoch, "train", 0, batch, bytes(16), False, False), sent, sent, {}
                )
        assert recorder is not None
        builder = BottomBuilder(settings, data, torch.device("cpu"))
        trainer, encoder = builder(rows), builder.encoder
        assert encoder is not None
        sample, of_epochs = recorder.sample, recorder.sent_in_epochs()
        end = measure_exposure(trainer, encoder, ROWS, sample)
        every = measure_exposure(trainer, encoder, ROWS, sample, of_epochs)
    assert end is not None
    assert every is not None
    of_end, of_all = ({c.name: c.gain_fraction for c in one.columns} for one in (end, every))
    assert max(of_end[f"noise{i}"] for i in range(5)) < 0.6
    assert min(of_all[f"noise{i}"] for i in range(5)) > 0.8
    assert every.epochs == every.dimensions == 5


def test_the_page_names_fewer_numbers_with_what_they_would_have_given_away(tmp_path: Path) -> None:
    settings = load_party_settings(PassiveSettings, settings_file(tmp_path, cut_shape=[16]))
    data = PartyData.of(settings)
    rows = AlignedRows.derive(
        settings.contract, bytes(32), data.ids, np.arange(ROWS), data.table.splits
    )
    builder = BottomBuilder(settings, data, torch.device("cpu"))
    sample = Sample.draw(rows.splits["train"], ROWS)
    trainer = builder(rows)
    assert builder.encoder is not None
    assert sample is not None
    found = measure_exposure(trainer, builder.encoder, ROWS, sample)
    assert found is not None
    said = remedy_of(settings, trainer, builder.encoder, sample, found)
    assert "1 number per row instead of 16 (contract.cut_shape): noise" in said
    assert f"from {found.disclosure:.2f} to " in said

"""Experiments: the meaning of their files, the choice of cells, and the figures."""

import io
import json
import math
import os
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pyarrow import parquet
from torch import Tensor, nn

from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import DataError, Interrupted, SettingsError
from splitveil.common.models.dense import WideDeepTop
from splitveil.common.privacy import leakage
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.figures import (
    AttackFigure,
    BatchFigures,
    LeakFigures,
    PredictionFigures,
    RunFigures,
)
from splitveil.common.privacy.observation import cross_scores
from splitveil.common.record.run_folder import claimed
from splitveil.common.record.run_record import (
    METRICS,
    ActiveFigures,
    EpochLeakLine,
    EvaluationLine,
    LeakLine,
    ModelFigures,
    RunCounts,
    Summary,
    write_summary,
)
from splitveil.deploy import flights
from splitveil.experiments.__main__ import main
from splitveil.experiments.cells import (
    PREPARED,
    Cell,
    Choice,
    passive_parties,
    plan,
    problems,
    with_folders,
)
from splitveil.experiments.collection import BESIDE_LOGIT, FigureRow, collect, read_rows, write_rows
from splitveil.experiments.execution import Ending, is_finished, run_cells
from splitveil.experiments.models import (
    DeepBesideLogit,
    GreyImageBottom,
    WideDeepBelowCut,
    WideDeepBesideLogit,
    mean_hard,
    median_hard,
)
from splitveil.experiments.plots import Point, course, epochs, floor, sweep, trade_off
from splitveil.experiments.preparation import prepare
from splitveil.experiments.settings import (
    ClassesPlot,
    CoursePlot,
    EpochPlot,
    Experiment,
    Figure,
    SweepPlot,
    TradeOffPlot,
    experiment_names,
    load_experiment,
    overlaid,
)
from splitveil.experiments.table import markdown, values_of
from tests.support.records import append_lines

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
TINY: dict[str, Any] = {
    "title": "Tiny",
    "about": "A smoke run.",
    "seeds": 2,
    "datasets": {"cancer": {"example": str(EXAMPLES / "breast_cancer")}},
    "variants": {
        "none": {"active": {"defense": {"name": "none"}}},
        "marvell": {
            "active": {"defense": {"name": "marvell"}},
            "sweep": {"active.defense.strength.power_ratio": [1, 4]},
        },
    },
    "sizes": {"quick": {"seeds": 1, "contract": {"epochs": 2}}},
    "figures": {
        "test_auc": {"statistic": "test_auc"},
        "norm": {"statistic": "q95", "layer": "cut", "attack": "norm"},
    },
    "published": {"source": "a paper", "values": {"cancer": {"marvell 4": {"norm": 0.6}}}},
}


def tiny(**changes: Any) -> Experiment:
    return Experiment.model_validate(TINY | changes)


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | changes, sort_keys=False))
    return path


def cells_of(experiment: Experiment, choice: Choice | None = None) -> list[Cell]:
    return plan(experiment, Path(), choice or Choice())


@pytest.mark.parametrize("name", experiment_names())
def test_whatever_cannot_run_says_what_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in a shipped file would be another problem than a missing file."""
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    _, experiment, base_dir = load_experiment(name)
    for size in ("full", *experiment.sizes):
        planned = plan(experiment, base_dir, Choice(size, seeds=1))
        # The values of a sweep differ in one number.
        cells = list({(cell.dataset, cell.series): cell for cell in planned}.values())
        assert cells
        found = [problem for cell in cells for problem in problems(cell, tmp_path / "prepared")]
        assert [problem for problem in found if not problem.startswith("needs the file ")] == []


def test_a_sweep_of_guarantees_sets_the_strength_that_each_needs() -> None:
    def found(defense: dict[str, Any], **contract: int) -> list[tuple[str, dict[str, Any]]]:
        variant = {
            "active": {"defense": defense},
            "contract": contract,
            "sweep": {"guarantee": [0.55, 0.6]},
        }
        experiment = tiny(variants={"bounded": variant}, published=None)
        cells = cells_of(experiment, Choice(seeds=1))
        return [(cell.variant, cell.settings["active"]["defense"]) for cell in cells]

    for auc, (name, noisy) in zip((0.55, 0.6), found({"name": "noisy_label"}), strict=True):
        assert name == f"bounded {auc}"
        assert 1 / noisy["mechanism"]["noise_ratio"] == pytest.approx(mu_of_leak_auc(auc))
    with pytest.raises(SettingsError, match="no strength of marvell holds against every peer"):
        found({"name": "marvell"})
    wrong = {"name": "noisy_label", "ranks": 5}  # reported with the cell's other problems
    assert found(wrong) == [("bounded 0.55", wrong), ("bounded 0.6", wrong)]


def test_a_cell_is_another_when_any_setting_is() -> None:
    cells = cells_of(tiny())
    rows = ["none", "marvell 1", "marvell 4"]
    assert [cell.name for cell in cells] == [f"cancer, {r}, seed {s}" for s in (0, 1) for r in rows]
    digests = {cell.digest for cell in cells}
    assert len(digests) == 6
    last = cells[-1].settings
    assert last["active"]["model_seed"] == last["passive"]["model_seed"] == 1
    assert last["active"]["insecure_nonce_seed"] != last["passive"]["insecure_nonce_seed"]
    assert "insecure_noise_seed" not in last["active"]["defense"]  # seeds repeat no noise
    assert digests == {cell.digest for cell in cells_of(tiny())}
    changed = cells_of(tiny(), Choice(overrides=("active.optimizer.learning_rate=0.5",)))
    assert not digests & {cell.digest for cell in changed}
    assert digests == {cell.digest for cell in cells_of(tiny(figures=TINY["figures"], about="x"))}


def test_only_chooses_rows_variants_and_data_sets() -> None:
    def chosen(*only: str) -> list[str]:
        return [cell.variant for cell in cells_of(tiny(), Choice(seeds=1, only=only))]

    assert chosen("marvell") == ["marvell 1", "marvell 4"]
    assert chosen("none", "cancer/marvell 4") == ["none", "marvell 4"]
    assert chosen("cancer") == ["none", "marvell 1", "marvell 4"]
    with pytest.raises(SettingsError, match=r"no 'marvel'; did you mean 'marvell'"):
        chosen("marvel")


def test_a_size_changes_settings_and_seeds_below_the_variants() -> None:
    swept = {"sweep": {"contract.epochs": [1, 4], "contract.batch_size": [16, 32]}}
    cells = cells_of(tiny(variants={"none": {}, "x": swept}, published=None), Choice("quick"))
    sizes = [(c.variant, c.seed, c.settings["contract"]["epochs"]) for c in cells]
    expected = [("x 1 16", 0, 1), ("x 1 32", 0, 1), ("x 4 16", 0, 4), ("x 4 32", 0, 4)]
    assert sizes == [("none", 0, 2), *expected]
    assert cells[2].settings["contract"]["batch_size"] == 32
    with pytest.raises(SettingsError, match="--size slow"):
        cells_of(tiny(), Choice("slow"))


def test_another_kind_replaces_a_section_and_the_same_kind_changes_it() -> None:
    base = {"model": {"kind": "mlp", "hidden": [4], "dropout": 0.1}, "seed": 1}
    assert overlaid(base, {"model": {"kind": "mlp", "hidden": [8]}}) == {
        "model": {"kind": "mlp", "hidden": [8], "dropout": 0.1},
        "seed": 1,
    }
    conv = {"kind": "conv", "channels": [2]}
    assert overlaid(base, {"model": conv}) == {"model": conv, "seed": 1}
    assert base["model"] == {"kind": "mlp", "hidden": [4], "dropout": 0.1}


def test_a_data_set_like_another_has_its_settings_but_for_its_own(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "base.yaml")
    own = {"like": str(tmp_path / "base.yaml"), "contract": {"epochs": 7}}
    path = write(tmp_path, datasets={"cancer": own}, published=None)
    _, experiment, base_dir = load_experiment(str(path))
    found = plan(experiment, base_dir, Choice(seeds=1))[0].settings
    expected = cells_of(tiny(), Choice(seeds=1))[0].settings
    assert found == {**expected, "contract": {**expected["contract"], "epochs": 7}}
    path = write(tmp_path, datasets={"another": own}, published=None)
    with pytest.raises(SettingsError, match=r"datasets.another.like: .* has no such data set"):
        load_experiment(str(path))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"published": {"source": "x", "values": {"cancer": {"marvell 9": {}}}}}, "marvell 9"),
        ({"published": {"source": "x", "values": {"cancer": {"none": {"nrm": 1}}}}}, "nrm"),
        ({"variants": {"iso": {"sweep": {"defense.ratio": [1]}}}}, "expected active"),
        ({"variants": {"iso": {"sweep": {"guarantee": [0.6, 1.0]}}}}, "above 0.5 and below 1"),
        ({"figures": {"norm": {"statistic": "q95", "layer": "cut"}}}, "a layer and an attack"),
        (
            {"datasets": {"cancer": {"after": "wednesday"}}},
            r"cancer\.after: .* earlier in the file",
        ),
    ],
)
def test_a_name_that_is_nowhere_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tiny(**changes)


def test_a_prepared_table_s_folder_is_no_part_of_a_digest() -> None:
    path = {"active": {"data": {"source": {"kind": "csv", "path": "${PREPARED}/a.csv"}}}}
    cell = cells_of(tiny(variants={"none": path}, published=None), Choice(seeds=1))[0]
    replaced = with_folders(cell.settings, {PREPARED: Path("/some/where")})
    assert replaced["active"]["data"]["source"]["path"] == "/some/where/a.csv"
    assert "/some/where" not in json.dumps(cell.settings)


def test_what_cannot_run_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"active": {"defense": {"name": "no such thing"}}}
    path = write(tmp_path, variants={"wrong": wrong, "wrong again": wrong}, published=None)
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 2
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "cannot run" in line]
    assert said.startswith("cannot run cancer, wrong, wrong again: active: defense")
    assert not (tmp_path / "out").exists()


def test_an_experiment_that_runs_already_is_not_run_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher(tmp_path, monkeypatch, "exit 3")
    command = ["run", str(write(tmp_path, published=None)), "--output", str(tmp_path / "out")]
    with claimed(tmp_path / "out" / "tiny", "taken"):
        assert main(command) == 2
    assert "another process is running this experiment" in capsys.readouterr().err
    assert main(command) == 3  # it runs now, and its launcher fails


CANCER = {"kind": "sklearn", "dataset": "breast_cancer"}
LABS: dict[str, Any] = {
    "contract": {
        "passive_parties": ["passive_a", "passive_b"],
        "cut_shape": [2],
        "batch_size": 64,
        "epochs": 1,
    },
    "active": {
        "data": {"source": CANCER, "id_column": "id", "label_column": "malignant"},
        "defense": {"name": "none"},
        "top_model": {"kind": "mlp", "hidden": [4]},
        "optimizer": {"kind": "adam", "learning_rate": 0.01},
    },
    "passive": {
        "data": {"source": CANCER, "id_column": "id", "features": {"numeric": "mean_*"}},
        "bottom_model": {"kind": "mlp", "hidden": [4]},
        "optimizer": {"kind": "adam", "learning_rate": 0.01},
    },
    "passives": {"passive_a": {}, "passive_b": {"data": {"features": {"numeric": "worst_*"}}}},
}


def labs(**changes: Any) -> Experiment:
    return tiny(datasets={"labs": LABS | changes}, variants={"none": {}}, published=None)


def test_each_of_several_passive_parties_has_settings_of_its_own() -> None:
    first, second = cells_of(labs())
    parties = passive_parties(first.settings)
    assert list(parties) == ["passive_a", "passive_b"]
    assert [own["party"] for own in parties.values()] == ["passive_a", "passive_b"]
    numeric = [own["data"]["features"]["numeric"] for own in parties.values()]
    assert numeric == ["mean_*", "worst_*"]
    assert {own["bottom_model"]["kind"] for own in parties.values()} == {"mlp"}
    nonces = [
        own["insecure_nonce_seed"]
        for cell in (first, second)
        for own in (cell.settings["active"], *passive_parties(cell.settings).values())
    ]
    assert len(set(nonces)) == 6
    assert problems(first, Path()) == []


def test_mistakes_in_one_passive_party_s_settings_are_named() -> None:
    misspelt = {"passive_a": {}, "passive_b": {"bottom_modl": {"kind": "mlp"}}}
    (found, *_) = problems(cells_of(labs(passives=misspelt))[0], Path())
    assert "passive_b: bottom_modl: unknown setting" in found
    (found,) = problems(cells_of(labs(passives={"passive_a": {}}))[0], Path())
    assert found == "passives: expected settings for passive_b, got none"
    with pytest.raises(ValueError, match="means"):
        labs(passives={"means": {}})


def chain(**changes: Any) -> Experiment:
    cancer = TINY["datasets"]["cancer"]
    days = {"monday": cancer, "tuesday": cancer | {"after": "monday"}}
    return tiny(datasets=days | changes, published=None)


def test_a_day_begins_with_the_weights_of_the_day_before_of_its_variant_and_seed() -> None:
    found = {(cell.dataset, cell.variant, cell.seed): cell for cell in cells_of(chain())}
    tuesday = found["tuesday", "marvell 4", 1]
    assert tuesday.after == found["monday", "marvell 4", 1]
    weights = [tuesday.settings[party]["initial_weights"] for party in ("active", "passive")]
    assert weights == ["${EARLIER}/active/checkpoint", "${EARLIER}/passive/checkpoint"]
    assert tuesday.settings["active"]["earlier_ledgers"] == ["${EARLIER}/active/checkpoint"]
    monday = found["monday", "none", 0]
    assert monday.after is None
    assert "earlier_ledgers" not in monday.settings["active"]
    assert "initial_weights" not in monday.settings["active"]
    changed = chain(monday=TINY["datasets"]["cancer"] | {"contract": {"epochs": 9}})
    assert tuesday.digest not in {cell.digest for cell in cells_of(changed)}
    # A cell without one before it is what it was: results made before stay good.
    assert monday.digest in {cell.digest for cell in cells_of(tiny(published=None))}
    chosen = cells_of(chain(), Choice(seeds=1, only=("tuesday/none",)))
    assert [cell.name for cell in chosen] == ["monday, none, seed 0", "tuesday, none, seed 0"]


def test_days_wait_for_the_day_before_and_find_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many run side by side."""
    # $6 is the folder of the settings. The first weights take a while; the second day wants them.
    script = """
runs="$(dirname "$6")/runs/run/active/checkpoint"
earlier=$(sed -n 's/^initial_weights: //p' "$6/active.yaml")
if [ -n "$earlier" ]; then [ -e "$earlier/model" ] || exit 2; else sleep 0.5; fi
mkdir -p "$runs"; touch "$runs/model"
"""
    launcher(tmp_path, monkeypatch, script)
    cells = cells_of(chain(), Choice("quick"))
    endings = run_all(cells, tmp_path, jobs=6)
    assert [ending.last_lines for ending in endings if ending.exit_code] == []
    assert len(endings) == 6
    kept = {path.parents[4].parent.parent.name for path in (tmp_path / "out").rglob("model")}
    assert kept == {"monday"}


def test_a_day_is_not_run_where_the_day_before_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(tmp_path, monkeypatch, "exit 4")
    endings = run_all(cells_of(chain(), Choice(seeds=1, only=("none",))), tmp_path, jobs=2)
    said = {ending.cell.dataset: (ending.exit_code, ending.last_lines) for ending in endings}
    assert said["monday"][0] == 4
    assert said["tuesday"][0] == 1
    assert "starts with the weights of monday, none, seed 0, which is" in said["tuesday"][1]


def launcher(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "launcher"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def run_all(cells: Sequence[Cell], folder: Path, jobs: int = 1) -> list[Ending]:
    return list(run_cells(cells, folder / "out", folder / "prepared", jobs=jobs))


def test_a_finished_cell_is_marked_and_loses_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # $6 is the folder of the settings, beside which the runs lie.
    made = '"$(dirname "$6")/runs/run/active/checkpoint"'
    launcher(tmp_path, monkeypatch, f"mkdir -p {made}; echo weights > {made}/model")
    cells = cells_of(tiny(), Choice("quick"))
    endings = run_all(cells, tmp_path, jobs=3)
    assert {ending.exit_code for ending in endings} == {0}
    assert all(is_finished(cell, tmp_path / "out") for cell in cells)
    settings = tmp_path / "out" / cells[0].folder / "settings"
    names = {"contract.yaml", "active.yaml", "passive.yaml"}
    assert {path.name for path in settings.iterdir()} == names
    assert list((tmp_path / "out").rglob("active"))
    assert not list((tmp_path / "out").rglob("model"))
    changed = cells_of(tiny(), Choice("quick", overrides=("contract.epochs=3",)))
    assert not any(is_finished(cell, tmp_path / "out") for cell in changed)


def test_a_half_finished_cell_keeps_its_files_and_one_with_other_settings_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(tmp_path, monkeypatch, "echo no such patience; exit 4")
    cell = cells_of(tiny(), Choice("quick"))[0]
    (ending,) = run_all([cell], tmp_path)
    assert ending.exit_code == 4
    assert "no such patience" in ending.last_lines
    checkpoint = tmp_path / "out" / cell.folder / "runs" / "checkpoint"
    checkpoint.mkdir(parents=True)
    run_all([cell], tmp_path)
    assert checkpoint.exists()
    others = cells_of(tiny(), Choice(overrides=("contract.epochs=3",)))[:1]
    for cells, is_one in (([cell], True), (others, False)):
        checkpoint.mkdir(parents=True, exist_ok=True)
        list(run_cells(cells, tmp_path / "out", tmp_path / "prepared", in_process=is_one))
        assert not checkpoint.exists()


def test_ctrl_c_reaches_the_launchers_and_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    trap = f"trap 'echo stopped; exit 130' INT; touch {started}"
    launcher(tmp_path, monkeypatch, f"{trap}; while :; do sleep 0.05; done")

    def interrupt() -> None:
        while not started.exists():
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    cells = cells_of(tiny(), Choice("quick"))
    with pytest.raises(Interrupted):
        run_all(cells, tmp_path)
    logs = [tmp_path / "out" / cell.folder / "output.log" for cell in cells]
    assert [log.exists() for log in logs] == [True, False, False]
    assert "stopped" in logs[0].read_text()
    assert not any(is_finished(cell, tmp_path / "out") for cell in cells)


def leave_behind(
    cell: Cell, results: Path, auc: float = 0.9, passive: Sequence[str] = ("passive",)
) -> None:
    """Write what a run of two epochs with three steps each leaves."""
    folder = results / cell.folder
    marker = {"digest": cell.digest, "wall_s": 7.0}
    marker |= {"machine": "abacus", "python": "3", "torch": "2", "splitveil": "0"}
    run = folder / "runs" / "run"
    for party, first in (("active", None), *((name, 0.8) for name in passive)):
        (run / party).mkdir(parents=True)
        layers = {"cut": 0.7} | ({} if first is None else {"first": first})
        leak = LeakFigures(
            batches={
                layer: {"norm": BatchFigures(leak + 0.1, leak, leak, 0.5)}
                for layer, leak in layers.items()
            },
            run_level={"cut": {"accumulated_cosine": RunFigures(0.95, 0.9, 1.0)}}
            if party == "active"
            else {},
        )
        summary = Summary(counts=RunCounts(steps_per_s=5.0), leak=leak)
        for epoch in (0, 1):
            for step in (0, 1, 2):
                found = (AttackFigure(layer, "norm", 0.5 + 0.1 * step) for layer in layers)
                append_lines(run / party, LeakLine(epoch, step, tuple(found), None))
            append_lines(run / party, EpochLeakLine(epoch, (AttackFigure("cut", "norm", 0.6),)))
        if party == "active":
            model = ModelFigures(PredictionFigures(auc=auc, calibration_error=0.05))
            summary = replace(summary, active=ActiveFigures(model=model))
            for epoch, value in ((0, 0.99), (1, auc)):
                append_lines(
                    run / party,
                    EvaluationLine(epoch, "test", PredictionFigures(0.3, value, 0.1), 0.2),
                )
        write_summary(run / party, summary)
    (folder / "finished.json").write_text(json.dumps(marker))


def test_figures_are_one_row_each_and_survive_the_file(tmp_path: Path) -> None:
    cell = cells_of(tiny())[2]
    leave_behind(cell, tmp_path)
    rows = collect("tiny", "full", cell, tmp_path)
    write_rows(tmp_path / "results.parquet", rows, {"command": "as it was"})
    read, circumstances = read_rows(tmp_path / "results.parquet")
    assert read == rows
    assert circumstances == {"command": "as it was"}

    def value(statistic: str, **where: Any) -> float:
        (found,) = [
            row.value
            for row in rows
            if row.statistic == statistic
            and all(getattr(row, name) == wanted for name, wanted in where.items())
        ]
        return found

    assert {
        (r.experiment, r.size, r.dataset, r.variant, r.series, r.setting, r.seed) for r in rows
    } == {("tiny", "full", "cancer", "marvell 4", "marvell", 4.0, 0)}
    assert value("test_auc") == 0.9
    assert value("best_test_auc") == 0.99
    assert value("epoch_test_auc", epoch=0) == 0.99
    assert value("calibration_error") == 0.05
    assert value("q95", party="passive", layer="first", attack="norm") == pytest.approx(0.9)
    assert value("run_level", layer="cut", attack="accumulated_cosine") == 0.95
    assert value("low", attack="accumulated_cosine") == 0.9
    assert value("first_epoch", party="active", attack="norm") == 0.6
    assert value("step_leak", party="active", step=5) == pytest.approx(0.7)
    assert "examples" not in {row.statistic for row in rows}  # null: nothing was measured


def test_a_long_course_is_averaged_over_stretches(tmp_path: Path) -> None:
    cell = cells_of(tiny())[0]
    leave_behind(cell, tmp_path)
    values = np.random.default_rng(1).random(1000)
    run = tmp_path / cell.folder / "runs/run/active"
    (run / METRICS).unlink()
    lines = (
        LeakLine(0, step, (AttackFigure("cut", "norm", value),), None)
        for step, value in enumerate(values)
    )
    append_lines(run, *lines)
    rows = collect("tiny", "full", cell, tmp_path)
    found = [r.value for r in rows if r.statistic == "step_leak" and r.party == "active"]
    assert found == pytest.approx(values.reshape(200, 5).mean(axis=1))


@pytest.mark.parametrize("beside_logit", [False, True])
def test_stored_gradients_give_norms_of_each_class_and_no_row(
    tmp_path: Path, *, beside_logit: bool
) -> None:
    """Of an example's own loss: gradients of a mean are smaller the more rows a batch has."""
    bottom = {"kind": "custom", "module": BESIDE_LOGIT} if beside_logit else {}
    cell = cells_of(tiny(variants={"none": {"passive": {"bottom_model": bottom}}}, published=None))[
        0
    ]
    leave_behind(cell, tmp_path)
    generator, sizes = np.random.default_rng(1), np.repeat([30, 10], [30, 10])
    norm, error = generator.random((2, 40)) + 0.1
    gradients = np.outer(norm / sizes, [0.6, 0.8])
    wanted = {"norm": norm}
    if beside_logit:
        gradients = np.column_stack([gradients, -error / sizes])
        wanted |= {"error": error, "slope": norm / error}
    stored: dict[str, Any] = {"gradients": gradients, "batches": sizes}
    labels = np.arange(40) % 4 == 0
    run = tmp_path / cell.run_folder / "passive"
    np.savez(run / "received-0001.npz", labels=labels.astype(np.int64), **stored)
    np.savez(run / "received-0002.npz", **stored)  # without labels
    rows = collect("tiny", "full", cell, tmp_path)
    found = {(r.attack, r.statistic): r.value for r in rows if (r.attack or "").startswith("label")}
    assert found == {
        (f"label {label:d}", f"epoch_{name}_q{quantile:02}"): pytest.approx(
            np.percentile(values[labels == label], quantile)
        )
        for name, values in wanted.items()
        for label in (False, True)
        for quantile in (5, 50, 95)
    }
    panels = epochs(ClassesPlot(kind="classes"), rows)
    assert [len(panel) for panel in panels.values()] == [6] * len(wanted)
    point = Point(1.0, 0.0, found["label 1", "epoch_norm_q50"], 0.0)
    assert panels["none: norm of the gradient"]["label 1, 50 %"] == [point]


def test_a_number_beside_the_logit_changes_no_other_gradient() -> None:
    shapes = FeatureShapes(numeric_dim=3)
    rows = Features(numeric=torch.rand(5, 3, generator=torch.Generator().manual_seed(2)))
    sent = DeepBesideLogit(shapes)(rows)
    assert sent.shape == (5, 129)
    assert not sent[:, 128].any()
    received, labels = sent.detach().requires_grad_(), torch.tensor([0.0, 1, 0, 0, 1])
    top = WideDeepBesideLogit(shapes)
    logits = top(received, rows)
    torch.testing.assert_close(logits, WideDeepTop.forward(top, sent[:, :128], rows))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, received)
    torch.testing.assert_close(gradient[:, 128], logits.detach().sigmoid() - labels)


def row(variant: str, seed: int, statistic: str, value: float, **where: Any) -> FigureRow:
    series = variant.split(maxsplit=1)[0]
    whose = ("t", "full", "cancer", variant, series, None, seed, "active")
    base = FigureRow(*whose, None, None, "", None, None, 0.0)
    return base._replace(statistic=statistic, value=value, **where)


NORM: Mapping[str, Any] = {"layer": "cut", "attack": "norm"}


@pytest.mark.parametrize(("spread", "divisor"), [("deviation", 1.0), ("error", math.sqrt(3))])
def test_the_table_has_mean_and_spread_beside_what_was_published(
    spread: str, divisor: float
) -> None:
    aucs = [0.9, 0.94, 0.95]
    rows = [row("marvell 4", seed, "test_auc", auc) for seed, auc in enumerate(aucs)]
    rows += [row("marvell 4", seed, "q95", 0.7, **NORM) for seed in range(3)]
    rows += [row("none", 0, "test_auc", 0.97), row("none", 0, "q95", 1.0, **NORM)]
    circumstances = {"command": "the command", "machine": "abacus"}
    page = markdown("tiny", tiny(spread=spread), rows, circumstances)
    mean, half = statistics.mean(aucs), np.std(aucs, ddof=1) / divisor
    expected = f"| marvell 4 | {mean:.3f} ± {half:.3f} | 0.700 ± 0.000 | 0.600 | 3 |"
    assert expected.replace("0.", ".") in page.splitlines()
    assert "| none | .970 | 1.000 |  | 1 |" in page.splitlines()
    assert "| variant | test_auc | norm | published | seeds |" in page.splitlines()
    assert f"Mean ± standard {spread} over 1 or 3 seeds." in page
    smaller = [one._replace(size="quick") for one in rows]
    assert "published" not in markdown("tiny", tiny(spread=spread), smaller, circumstances).lower()
    assert "`the command`" in page
    assert "abacus" in page


def test_a_trade_off_has_one_point_per_variant_with_both_spreads() -> None:
    rows = [row("marvell 4", seed, "best_test_auc", auc) for seed, auc in enumerate((0.8, 0.9))]
    rows += [row("marvell 4", seed, "q95", leak, **NORM) for seed, leak in enumerate((0.6, 0.7))]
    rows += [row("marvell 1", 0, "best_test_auc", 0.7), row("marvell 1", 0, "q95", 0.9, **NORM)]
    rows += [row("marvell 1", 0, "q95", 0.1, party="passive", **NORM)]  # knows less: not drawn
    rows += [row("marvell 1", 0, "q95", 0.4, party="passive", layer="first", attack="norm")]
    rows += [row("marvell 1", 0, "q95", 0.4, party="lab", layer="first", attack="norm")]
    panels = trade_off(TradeOffPlot(kind="trade_off"), rows)
    assert set(panels) == {("cut", "norm"), ("first", "norm"), ("first, lab", "norm")}
    sd = 0.1 / math.sqrt(2)
    cut = panels["cut", "norm"]["marvell"]
    assert [point.name for point in cut] == ["4", "1"]  # a curve follows the sweep
    assert cut[0][:4] == pytest.approx((0.85, sd, 0.65, sd))
    assert cut[1] == Point(0.7, 0.0, 0.9, 0.0, "1")
    assert panels["first", "norm"] == {"marvell": [Point(0.7, 0.0, 0.4, 0.0, "1")]}
    assert trade_off(TradeOffPlot(kind="trade_off", attacks=("cosine",)), rows) == {}
    # A row that sends nothing worth learning is a line and no point.
    plot = TradeOffPlot(kind="trade_off", less="marvell 4", floor="marvell 1")
    assert [point.name for point in trade_off(plot, rows)["cut", "norm"]["marvell"]] == ["4"]
    assert floor(plot, rows) == pytest.approx(-0.1)
    assert floor(TradeOffPlot(kind="trade_off"), rows) is None


def test_a_sweep_has_a_curve_per_variant_and_standard_errors() -> None:
    """Two seeds of a model without defense, of one that is fitted again, and of noisy labels."""
    rows = [row("none", seed, "test_auc", auc) for seed, auc in enumerate((0.80, 0.90))]
    refits = {0.6: (0.79, 0.87), 0.55: (0.70, 0.80)}
    for bound, aucs in refits.items():
        for seed, auc in enumerate(aucs):
            name = f"gaussian {bound}"
            rows.append(row(name, seed, "test_auc_refit", auc, setting=bound))
            rows.append(row(name, seed, "test_auc", auc - 0.01, setting=bound))
    rows += [row("laplace 0.6", 0, "test_auc", 0.65, setting=0.6)]
    rows += [row("untrained", 0, "test_auc", 0.6)]
    plot = SweepPlot(kind="sweep", statistic="test_auc_refit", less="none", axis="bound")
    curves = sweep(plot, rows)
    assert set(curves) == {"gaussian", "laplace", "untrained"}
    weak, strong = curves["gaussian"]
    assert (weak.x, strong.x) == (0.55, 0.6)
    assert (strong.y, strong.y_sd) == pytest.approx((-0.02, 0.01))  # -0.01 and -0.03
    (laplace,) = curves["laplace"]  # has no refit
    assert laplace[:4] == pytest.approx((0.6, 0.0, -0.15, 0.0))
    assert math.isinf(curves["untrained"][0].x)
    figure = Figure(statistic="test_auc_refit", less="none", less_statistic="test_auc")
    assert values_of(rows, figure)["cancer", "gaussian 0.6"] == pytest.approx([-0.01, -0.03])


def test_the_course_of_a_leak_is_the_mean_over_seeds_at_each_step() -> None:
    rows = [row("none", seed, "step_leak", 0.5 + seed / 10, step=9, **NORM) for seed in (0, 2)]
    rows += [row("none", 0, "step_leak", 0.9, step=1, **NORM)]
    found = course(CoursePlot(kind="course"), rows)["cut", "norm"]["none"]
    assert [(point.x, round(point.y, 9)) for point in found] == [(1.0, 0.9), (9.0, 0.6)]
    assert found[1].y_sd == pytest.approx(0.2 / math.sqrt(2))
    rows = [row("none", 0, "epoch_test_auc", 0.5, epoch=epoch) for epoch in (0, 1)]
    rows += [row("none", 0, "epoch_leak", 0.7, epoch=epoch, **NORM) for epoch in (0, 1)]
    of_figure = epochs(EpochPlot(kind="epochs"), rows)["test AUC"]["none"]
    of_leak = course(CoursePlot(kind="course", over="epochs"), rows)["cut", "norm"]["none"]
    assert [point.x for point in of_figure] == [point.x for point in of_leak] == [1.0, 2.0]


MEASURED = "| marvell 4 | .900 | .800 | .600 |"


def measured(folder: Path, *plots: Mapping[str, Any]) -> tuple[list[str], Path]:
    """Write an experiment with the figures of one cell; return the command and their folder."""
    path, results = write(folder, plots=list(plots)), folder / "out" / "tiny"
    cell = cells_of(tiny())[2]
    leave_behind(cell, results)
    write_rows(results / "results.parquet", collect("tiny", "full", cell, results), {})
    return ["report", str(path), "--output", str(folder / "out")], results


def test_report_writes_table_and_plots_from_the_parquet_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    kinds: list[dict[str, Any]] = [
        {"kind": "trade_off", "utility": "test_auc"},
        *({"kind": "course"}, {"kind": "epochs"}, {"kind": "sweep", "axis": "ratio"}),
        {"kind": "sweep", "axis": "ratio", "datasets": ["another"]},
    ]
    report, results = measured(tmp_path, *kinds)
    assert main(report) == 0
    assert MEASURED in (results / "table.md").read_text()
    drawn = sorted(file.stem for file in (results / "plots").iterdir())
    assert drawn == ["1-trade_off-cancer", "2-course-cancer", "3-epochs-cancer", "4-sweep-cancer"]
    assert MEASURED in capsys.readouterr().out
    assert main(["report", "gafm_table2", *report[2:]]) == 1


def test_without_matplotlib_the_table_is_there_and_one_line_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it now fails
    report, results = measured(tmp_path, {"kind": "course"})
    assert main(report) == 0
    assert MEASURED in (results / "table.md").read_text()
    assert not (results / "plots").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "the plots were left out" in line
    assert "pip install 'splitveil[experiments]'" in line


def test_packed_words_become_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(2).integers(0, 2, (6, 500)).astype(np.uint8)
    (tmp_path / "imdb").mkdir()
    packed = np.packbits(words, axis=1)
    np.savez(tmp_path / "imdb" / "imdb_top500.npz", x_bits=packed, y=np.arange(6) % 2)
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    prepare("imdb", tmp_path / "prepared")
    made = parquet.read_table(tmp_path / "prepared" / "imdb.parquet")
    assert made.column_names == [*(f"x.{j}" for j in range(500)), "y"]
    assert np.array_equal(made.drop_columns("y").to_pandas(), words)
    assert made["y"].to_pylist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "shape"), [("melanoma", (84, 84, 3)), ("melanoma_grey64", (64, 64))]
)
def test_packed_images_become_files_with_the_same_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]
) -> None:
    files = []
    for colour in ((250, 0, 0), (0, 0, 0)):
        file = io.BytesIO()
        Image.new("RGB", (84, 84), colour).save(file, "JPEG", quality=95)
        files.append(file.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    (tmp_path / "melanoma").mkdir()
    packed = np.frombuffer(b"".join(files), np.uint8)
    path = tmp_path / "melanoma" / "melanoma84_jpeg.npz"
    np.savez(path, jpeg=packed, offset=offsets, y=np.array([1, 0]))
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    prepare(name, tmp_path / "prepared")
    rows = (tmp_path / "prepared" / f"{name}.csv").read_text().splitlines()
    assert rows == ["image,y", "0,1", "1,0"]
    images = [Image.open(tmp_path / "prepared" / name / f"{row}.png") for row in range(2)]
    assert [np.asarray(image).shape for image in images] == [shape, shape]
    if name == "melanoma":
        whole = [np.asarray(Image.open(io.BytesIO(file))) for file in files]
        assert all(map(np.array_equal, map(np.asarray, images), whole))
    assert np.asarray(images[0]).max() > 60
    assert np.asarray(images[1]).max() < 10


def test_each_day_trains_and_the_next_one_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip

    header = "ip,app,device,os,channel,click_time,attributed_time,is_attributed"
    rows = [f"{day},1,1,1,1,2017-11-0{day} {day}:30,2017-11-09 1:00,1" for day in (7, 6, 8, 6)]
    (tmp_path / "talkingdata").mkdir()
    with gzip.open(tmp_path / "talkingdata" / "talkingdata.csv.gz", "wt") as file:
        file.write("\n".join([header, *rows, ""]))
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    prepare("talkingdata_days", tmp_path / "prepared")
    first, second = (
        (tmp_path / "prepared" / f"talkingdata_day_{n}.csv").read_text() for n in (1, 2)
    )
    assert "attributed_time" not in first  # it is there only where the label is 1
    assert first.splitlines()[1:] == [
        "0,7,1,1,1,1,7,1,test",
        "1,6,1,1,1,1,6,1,train",
        "3,6,1,1,1,1,6,1,train",
    ]
    # A click keeps its number.
    assert second.splitlines()[1:] == ["0,7,1,1,1,1,7,1,train", "2,8,1,1,1,1,8,1,test"]


NEEDS_FLIGHTS = pytest.mark.skipif(
    not flights.is_installed(), reason=f"{flights.PACKAGE} is not installed"
)


@NEEDS_FLIGHTS
def test_what_comes_from_no_file_needs_no_folder_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPLITVEIL_DATA", raising=False)
    prepare("flights", tmp_path)
    assert {flights.AIRLINE, flights.AIRPORTS} <= {path.name for path in tmp_path.iterdir()}


def test_a_preparation_without_its_raw_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"needs the file .*imdb_top500\.npz"):
        prepare("imdb", tmp_path / "prepared")
    monkeypatch.delenv("SPLITVEIL_DATA")
    with pytest.raises(SettingsError, match="SPLITVEIL_DATA"):
        prepare("imdb", tmp_path / "prepared")


def test_the_networks_of_gafm_s_paper() -> None:
    """Convolutions of 3 x 3 leave 32 x 6 x 6; the wide part adds a weight for each category."""
    images = torch.rand(3, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    bottom = GreyImageBottom()
    sizes = [tuple(weight.shape) for weight in bottom.parameters() if weight.dim() > 1]
    convolutions = [(6, 1, 3, 3), (16, 6, 3, 3), (32, 16, 3, 3)]
    assert sizes == [*convolutions, (120, 1152), (84, 120), (40, 84)]
    assert bottom(images).shape == (3, 40)
    advertisements = WideDeepBelowCut(FeatureShapes(vocabulary_sizes=(5, 7)))
    rows = Features(categorical=torch.tensor([[4, 0], [4, 6]]))
    deep = advertisements(rows)
    assert deep.shape == (2, 1)
    with torch.no_grad():
        advertisements.get_parameter("wide.input.embedding.weight")[[4, 5, 11], 0] = torch.tensor(
            [2.0, 3.0, 5.0]
        )
    torch.testing.assert_close(advertisements(rows), deep + torch.tensor([[5.0], [7.0]]))
    vectors = advertisements.get_parameter("deep.input.embedding.weight")
    assert vectors.shape == (12, 16)


@pytest.mark.parametrize(
    ("name", "hard"), [("mean", mean_hard), ("median", median_hard)], ids=["mean", "median"]
)
def test_an_assigned_class_leaks_less_than_its_score(
    name: str, hard: Callable[..., Tensor]
) -> None:
    """Two Gaussian classes at distance d: Phi(d / 2), and Phi(d / sqrt 2) for the scores."""
    generator, distance, normal = torch.Generator().manual_seed(3), 1.2, statistics.NormalDist()
    positive = torch.arange(40_000) % 4 == 0
    gradients = torch.randn(40_000, 20, generator=generator, dtype=torch.float64)
    gradients[:, 0] += distance * positive
    attack = ATTACKS[name]
    found = {}
    for kind, of_kind in (("score", attack), ("hard", attack._replace(function=hard))):
        values = cross_scores(of_kind, gradients, positive)
        assert values is not None
        found[kind] = leakage.auc(values, positive)
    expected = {"score": normal.cdf(distance / math.sqrt(2)), "hard": normal.cdf(distance / 2)}
    assert found == pytest.approx(expected, abs=0.01)  # .802 and .726

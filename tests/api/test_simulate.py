"""``simulate``: both parties in this process, with the bits that two processes leave."""

import json
import os
import re
import shutil
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer  # type: ignore[import-untyped]
from tensorboard.context import RequestContext  # type: ignore[import-untyped]
from tensorboard.plugins.base_plugin import TBContext  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import backend_context as hparams  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import list_session_groups

from splitveil import (
    Ledger,
    Run,
    Runs,
    SettingsError,
    SplitveilError,
    attacks,
    defenses,
    predict,
    simulate,
)
from splitveil.active_party.defenses import Defense
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.deploy.demo import EXAMPLES
from splitveil.library.loading import from_here, source_of
from splitveil.library.own_data import write_settings
from splitveil.library.runs import Kind
from splitveil.passive_party.feature_exposure import exposure_from_json
from splitveil.passive_party.settings import PassiveSettings
from tests.support.records import columns_of
from tests.support.runs import write_example
from tests.support.simulation import read_settings

ONE_CORE = {"active.torch_threads": 1, "passive.torch_threads": 1}
SHORT = {**ONE_CORE, "contract.epochs": 1, "active.refit": None}
QUICK: dict[str, Any] = {"settings": SHORT, "attacks": []}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("swept")
    write_example(folder)
    chosen = ["none", "iso:noise_ratio=2"]
    return simulate(folder, defense=chosen, seeds=2, settings=SHORT, runs=folder / "runs")


@pytest.mark.parametrize("has_pandas", [True, False])
def test_frames_are_of_pandas_where_it_is_installed(
    swept: Runs, monkeypatch: pytest.MonkeyPatch, *, has_pandas: bool
) -> None:
    if not has_pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)
    found = swept.frame()
    assert type(found).__module__.startswith("pandas" if has_pandas else "pyarrow")
    columns = columns_of(found)
    assert columns["seed"] == [0, 0, 1, 1]
    assert columns["defense"] == ["none", "iso noise_ratio=2"] * 2
    expected = {(one, seed) for one in ("none", "iso noise_ratio=2") for seed in (0, 1)}
    for of in get_args(Kind):
        assert {(row["defense"], row["seed"]) for row in swept.rows(of)} == expected


def test_tensorboard_shows_a_sweep_s_settings_beside_its_final_figures(swept: Runs) -> None:
    events = EventMultiplexer().AddRunsFromDirectory(str(swept.folder))
    events.Reload()
    board = TBContext(data_provider=MultiplexerDataProvider(events, ""))
    given = RequestContext(), hparams.Context(board), ""
    asked = hparams.api_pb2.ListSessionGroupsRequest(allowed_statuses=[1, 2, 3, 4], slice_size=10)
    rows = list_session_groups.Handler(*given, asked).run().session_groups
    shown: dict[str, Any] = {
        row.sessions[0].name: (
            row.hparams["active.defense.name"].string_value,
            row.hparams["passive.optimizer.learning_rate"].number_value,
            {one.name.tag: pytest.approx(one.value) for one in row.metric_values},
        )
        for row in rows
    }
    assert shown == {
        f"{run.name}/hparams": (
            run.defense,
            0.01,
            {f"run/{name}": x for name, x in run.overview().items() if isinstance(x, float)},
        )
        for run in swept
    }
    tags = {tag.split("/")[0] for tag in events.Runs()[f"{swept[0].name}/active"]["tensors"]}
    assert tags >= {"train", "validation", "test", "leak", "ledger"}
    assert not {tag for tag in tags if "leak_" in tag or "_leak" in tag or tag == "audit"}


def test_a_seed_decides_the_bits_and_a_frame_of_defenses_holds_means(swept: Runs) -> None:
    one, other = swept.of("none")
    assert one.rows("epochs") != other.rows("epochs")
    (again,) = simulate(swept.folder.parent, defense="none", seeds=[1], **QUICK)
    assert again.rows("steps") == other.rows("steps")
    by_defense = {row["defense"]: row for row in swept.rows("defenses")}
    ones = [run.summary["test_auc"] for run in swept.of("none")]
    assert by_defense["none"]["seeds"] == 2
    assert by_defense["none"]["test_auc"] == pytest.approx(np.mean(ones), abs=1e-15)
    assert by_defense["none"]["test_auc_sd"] == pytest.approx(np.std(ones, ddof=1), abs=1e-12)
    files = [run.path / "passive" / "exposure.json" for run in swept.of("none")]
    given_away = [exposure_from_json(json.loads(file.read_text())) for file in files]
    disclosed = [one.disclosure for one in given_away if one is not None]
    assert len(disclosed) == 2
    assert by_defense["none"]["disclosure"] == pytest.approx(np.mean(disclosed), abs=1e-12)
    of_one = Runs({("none", 1): other}, swept.folder).frame("defenses")
    assert np.isnan(np.asarray(of_one["test_auc_sd"], float)).all()
    assert str(of_one["test_auc_sd"].dtype) == "float64"


def test_the_figures_of_frames_are_those_of_the_files(swept: Runs) -> None:
    run = swept[0]
    lines = (run.path / "active" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    assert [row["loss"] for row in run.rows("steps")] == losses
    test = [line["auc"] for line in metrics if line["kind"] == "test"]
    assert [row["test_auc"] for row in run.rows("epochs")] == test
    leaks = json.loads((run.path / "active" / "summary.json").read_text())["leak_run_level"]
    found = {
        (row["layer"], row["attack"]): row["leak_auc"]
        for row in run.rows("attacks")
        if (row["party"], row["over"]) == ("active", "run")
    }
    assert found == {(x, name): one["auc"] for x, of in leaks.items() for name, one in of.items()}


def test_a_run_can_be_read_while_it_trains(
    swept: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(swept[0].path, tmp_path / "running")
    (tmp_path / "running" / "active" / "summary.json").unlink()
    monkeypatch.chdir(tmp_path)
    run = Run("running")
    assert run.path == tmp_path / "running"
    assert not run.has_ended
    assert run.summary == {}
    assert run.test_auc == swept[0].test_auc
    assert run.bounds == swept[0].bounds
    assert "running" in repr(run)
    with pytest.raises(SettingsError, match="expected a run's folder"):
        Run(tmp_path)


def test_the_ledger_of_a_run_bounds_what_its_summary_bounds(swept: Runs) -> None:
    (run, *_) = swept.of("iso noise_ratio=2")
    bounds = run.ledger.guarantee()
    for peers in defenses.Adversary:
        assert bounds.against(peers).max == run.bounds[str(peers)]
    assert run.bounds["knows class means only"] < 1 == run.bounds["anybody"]
    (row,) = run._table()[1]
    bound = str(row["bound"])
    assert bound.startswith("at most ")
    for shown in (repr(run), run._repr_html_(), repr(swept), swept._repr_html_()):
        for words in (f"{run.test_auc:.3f}", bound.split()[2], str(row["strongest attack"])):
            assert words in shown
    assert not [name for name in (*dir(run), *dir(swept)) if name.startswith("_")]


def test_a_simulation_leaves_nothing_behind_but_runs_that_are_in_use(tmp_path: Path) -> None:
    write_example(tmp_path)
    path, threads = list(sys.path), torch.get_num_threads()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    runs = simulate(tmp_path, defense=defenses.own(halved_labels), attacks=["norm"], settings=SHORT)
    assert torch.equal(torch.rand(4), expected)
    assert sys.path == path
    assert torch.get_num_threads() == threads
    assert "<td>halved_labels</td>" in runs._repr_html_()
    folder = runs.folder
    run = runs[0]
    del runs
    assert "strongest attack" in run._repr_html_(), (
        "a run of a deleted simulation must stay readable"
    )
    del run
    assert not folder.exists()


class Halved(Defense):
    """Sends half of the gradient, and charges nothing for anybody: a lie that a test looks for."""

    def __init__(self, context: object, noise: object, factor: float = 0.5) -> None:
        self._factor = factor

    def defend(self, batch: defenses.Step) -> defenses.Defended:
        sent = defenses.release(batch.gradients * self._factor, batch.gradients)
        charge = defenses.Charge(0.25, adversary=defenses.Adversary.ANYBODY)
        return defenses.Defended(sent, charge)


def halved_labels(gradients: torch.Tensor, labels: torch.Tensor, noise: object) -> torch.Tensor:
    return gradients * 0


def largest_entry(gradients: torch.Tensor) -> torch.Tensor:
    return gradients.flatten(1).abs().amax(dim=1)


def test_a_class_is_a_defense_and_its_charge_is_what_the_ledger_says(tmp_path: Path) -> None:
    write_example(tmp_path)
    chosen: list[Any] = [Halved, defenses.own(Halved, factor=0.25), defenses.Iso]
    runs = simulate(tmp_path, defense=chosen, settings=SHORT | {"contract.epochs": 2}, attacks=[])
    assert runs.defenses == ["Halved", "Halved factor=0.25", "iso"]
    assert [run.ledger.guarantee().sum_kl.max for run in runs[:2]] == [0.5, 0.5]
    assert all(run.bounds["anybody"] < 1 for run in runs[:2])


def test_functions_are_defenses_without_a_bound_and_attacks(tmp_path: Path) -> None:
    write_example(tmp_path)
    named = attacks.own(largest_entry, name="largest")
    zeros, closure = simulate(
        tmp_path,
        defense=[halved_labels, lambda gradients, labels, noise: gradients + 1],
        attacks=["norm", named, lambda gradients: -gradients.flatten(1).norm(dim=1)],
        settings=SHORT,
    )
    assert zeros.bounds == dict.fromkeys(map(str, defenses.Adversary), 1.0)
    assert {row["leak_auc"] for row in zeros.rows("batches")} == {0.5}
    assert zeros.rows("batches") != closure.rows("batches")
    again = load_party_settings(ActiveSettings, closure.path / "active" / "settings.yaml")
    assert again.leak_monitor is not None
    assert again.leak_monitor.attack_names == ("norm", "largest", "lambda")
    by_attack = {row["attack"]: row["leak_auc"] for row in closure.rows("attacks")}
    assert by_attack.keys() >= {"norm", "largest", "lambda"}
    assert by_attack["lambda"] == by_attack["norm"]  # a mirrored score leaks as much


Columns = tuple[dict[str, Any], dict[str, Any]]
"""Those of the active party, and those of the passive one."""

TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pyarrow": pa.table,
    "pandas": lambda columns: pytest.importorskip("pandas").DataFrame(columns),
    "a stream": lambda columns: pa.table(columns).to_reader(),
    "polars": lambda columns: pl.DataFrame(columns).with_columns(
        pl.col("^colour$").cast(pl.Categorical)
    ),
    "duckdb": lambda columns: duckdb.from_arrow(pa.table(columns)),
}


@pytest.fixture(scope="module")
def columns() -> Columns:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(300, 4))
    labels = (x[:, 0] + x[:, 3] > 0.5).astype(np.int64)
    ids = [f"c{i:03d}" for i in range(300)]
    kind = np.array(["red", "green", "blue"])[draw.integers(3, size=300)]
    return (
        {"id": ids, "label": labels, "own": x[:, 3]},
        {"id": ids, "x0": x[:, 0], "x1": x[:, 1], "colour": kind},
    )


def read(folder: Path, active: Any, passive: Any, **given: Any) -> list[Any]:
    """Return what the parties of a simulation of these tables read."""
    write_settings(folder, active, passive, label="label", key="id", **given)
    settings = read_settings(folder)
    found: list[Any] = []
    for party in (settings.active, settings.passive["passive"]):
        table = PartyData.of(party).table
        found += [*table.ids], None if table.labels is None else table.labels.tolist()
        found += [{name: numbers.tolist() for name, numbers in table.numeric.items()}]
        texts = {name: column.categories for name, column in table.categorical.items()}
        coded = table.categorical
        found += [{name: texts[name].take(coded[name].codes).to_pylist() for name in texts}]
    return found


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_any_kind_is_read_alike(kind: str, columns: Columns, tmp_path: Path) -> None:
    active, passive = map(TABLES[kind], columns)
    theirs = {"passive": passive}  # each owner's table, by its name
    found = read(tmp_path / "a", active, theirs)
    assert found == read(tmp_path / "b", *columns)
    assert [*found[2]] == ["own"]
    assert [*found[6], *found[7]] == ["x0", "x1", "colour"]


LABELS: dict[str, tuple[list[str], dict[str, Any], Any]] = {
    "words": (["no", "yes"], {}, ("yes",)),
    "a text of two": (["stays", "leaves"], {"positive_label": "leaves"}, ("leaves",)),
    "numbers": (["1", "2"], {"positive_label": ("2", "3")}, ("2", "3")),
    "a number": (["1", "2"], {"positive_label": np.int64(2)}, ("2",)),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_may_be_texts(kind: str, columns: Columns, tmp_path: Path) -> None:
    texts, given, positive = LABELS[kind]
    active = columns[0] | {"label": np.array(texts)[columns[0]["label"]]}
    assert read(tmp_path / "a", active, columns[1], **given) == read(tmp_path / "b", *columns)
    assert read_settings(tmp_path / "a").active.data.positive_labels == positive


def test_more_than_two_texts_are_classes_and_a_guess_is_refused(
    columns: Columns, tmp_path: Path
) -> None:
    active = columns[0] | {"label": np.array(["c", "a", "b"])[np.arange(300) % 3]}
    write_settings(tmp_path, active, columns[1], label="label", key="id")
    parties = read_settings(tmp_path)
    adversary = parties.passive["passive"].adversary
    assert adversary is not None
    assert adversary.labels is not None
    assert parties.active.data.classes == adversary.labels.classes == ("a", "b", "c")
    active["label"] = np.array(["stays", "leaves"])[columns[0]["label"]]
    with pytest.raises(SettingsError, match=r"name in positive_label= .* 'leaves', 'stays'"):
        write_settings(tmp_path, active, columns[1], label="label", key="id")
    active["label"] = np.array(["no", "yes", "Yes"])[np.arange(300) % 3]
    with pytest.raises(SettingsError, match=r"stand for 1: positive_label .es positive_label"):
        write_settings(tmp_path, active, columns[1], label="label", key="id")
    active["label"] = np.arange(300).astype("datetime64[D]")
    with pytest.raises(SettingsError, match=r"'label': expected numbers or texts, not date32"):
        write_settings(tmp_path, active, columns[1], label="label", key="id")
    active["label"] = np.array(["no", "yes", None], object)[np.arange(300) % 3]
    given: dict[str, Any] = {"active": active, "passive": columns[1], "key": "id", "attacks": []}
    with pytest.raises(SplitveilError, match="unlabelled_rows"):
        simulate(**given, settings=SHORT)
    (run,) = simulate(**given, settings=SHORT | {"active.data.unlabelled_rows": "leave_out"})
    assert run.summary["aligned_rows"] == 200


@pytest.mark.parametrize("gap", [np.nan, None])
def test_gaps_are_filled_as_init_proposes(gap: Any, columns: Columns, tmp_path: Path) -> None:
    passive = pa.table(columns[1] | {"x0": [gap, *columns[1]["x0"][1:]]})
    write_settings(tmp_path, columns[0], passive, label="label", key="id")
    parties = read_settings(tmp_path)
    filled = parties.passive["passive"].data.features
    assert filled is not None
    assert (filled.missing_numeric, filled.missing_indicator) == ("mean", True)
    complete = parties.active.data.features
    assert complete is not None
    assert (complete.missing_numeric, complete.missing_indicator) == ("error", False)
    assert np.isnan(PartyData.of(parties.passive["passive"]).table.numeric["x0"][0])


def indexed(frame: Any) -> Any:
    return frame.set_index("id")


FRAMES: dict[str, tuple[Any, ...]] = {
    "an index": (indexed, indexed, ""),
    "a key that is an index": (pa.Table.from_pandas, indexed, "id"),
    "texts without a name": (*[lambda frame: indexed(frame).rename_axis(None)] * 2, ""),
    "texts with two names": (indexed, lambda frame: indexed(frame).rename_axis("who"), ""),
    "a column, too": (*[lambda frame: frame.set_index("id", drop=False)] * 2, ""),
    "of pyarrow's tables": (*[lambda frame: pa.Table.from_pandas(indexed(frame))] * 2, ""),
    "beside the key": (*[pa.Table.from_pandas] * 2, "id"),
    "beside the key, without pandas' description": (
        *[lambda frame: pa.Table.from_pandas(frame).replace_schema_metadata()] * 2,
        "id",
    ),
    "whole numbers": (*[lambda f: indexed(f.assign(id=f["id"].str[1:].astype(int)))] * 2, ""),
}


@pytest.mark.parametrize("given", FRAMES)
def test_an_index_joins_data_frames_as_a_key_and_is_no_feature(
    given: str, columns: Columns, tmp_path: Path
) -> None:
    make_active, make_passive, key = FRAMES[given]
    active, passive = map(pytest.importorskip("pandas").DataFrame, columns)
    passive = make_passive(passive.sample(frac=1, random_state=0))
    write_settings(tmp_path, make_active(active), passive, label="label", key=key)
    settings = read_settings(tmp_path)
    own, theirs = PartyData.of(settings.active), PartyData.of(settings.passive["passive"])
    assert sorted(own.ids) == sorted(theirs.ids)
    assert list(own.ids) != list(theirs.ids)
    assert (list(own.table.numeric), list(own.table.categorical)) == (["own"], [])
    assert (list(theirs.table.numeric), list(theirs.table.categorical)) == (
        ["x0", "x1"],
        ["colour"],
    )


@pytest.mark.parametrize(
    "kind", [pa.timestamp("ns"), pa.timestamp("s", "Europe/Rome"), pa.date32()]
)
def test_dates_and_times_are_times(kind: pa.DataType, columns: Columns, tmp_path: Path) -> None:
    days = pa.array(range(300), pa.int32()).cast(pa.date32())
    passive = pa.table(columns[1]).append_column("since", days.cast(kind))
    write_settings(tmp_path, columns[0], passive, label="label", key="id")
    theirs = PartyData.of(read_settings(tmp_path).passive["passive"]).table
    assert list(theirs.categorical) == ["colour"]
    assert theirs.numeric["since.year"][[0, -1]].tolist() == [1970, 1970]
    assert theirs.timestamps == ("since",)


@pytest.mark.parametrize(
    "kind", [pa.duration("s"), pa.time32("s"), pa.list_(pa.string()), pa.month_day_nano_interval()]
)
def test_cells_of_other_kinds_are_refused(
    kind: pa.DataType, columns: Columns, tmp_path: Path
) -> None:
    passive = pa.table(columns[1]).append_column("x", pa.nulls(300, kind))
    with pytest.raises(SettingsError, match="passive: column 'x': expected numbers, dates, times"):
        write_settings(tmp_path, columns[0], passive, label="label", key="id")


ROW_LABELS = "active and passive have different row labels .* name in key="

ROWS_APART = "passive: .*column 'x0': .* numbers in most rows, not in rows 2, 4, 6, 8, 10"
APART: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], str]] = {
    "columns": (
        lambda a, p: (dict(a), dict(p[:200])),
        "have 300 and 200 rows: name in key= .* key=None",
    ),
    "an array": (lambda a, p: (a, p[["x0"]].to_numpy()[:200]), "have 300 and 200 rows"),
    "a sorted frame": (lambda a, p: (a, p[::-1]), ROW_LABELS),
    "a sorted frame and an array": (lambda a, p: (a[::-1], p[["x0"]].to_numpy()), ROW_LABELS),
    "other rows": (lambda a, p: (a[100:], p[:200]), ROW_LABELS),
    "an index of one party": (lambda a, p: (indexed(a), p), ROW_LABELS),
    "numbers of two names": (
        lambda a, p: (a.rename_axis("a"), p[::-1].rename_axis("b")),
        ROW_LABELS,
    ),
    "a label twice": (lambda a, p: (indexed(a), indexed(p.assign(id=p["id"][0]))), ROW_LABELS),
    "two kinds of cells": (lambda a, p: (a, p.assign(x0=[1, "a"] * 150)), ROWS_APART),
    "lists": (
        lambda a, p: (a, p.assign(x0=[["a"]] * 300)),
        "column 'x0': expected numbers, .* list",
    ),
    "a name twice": (lambda a, p: (a, p.set_axis(["x"] * 4, axis=1)), "passive: .* names .*'x'"),
    "two kinds of cells of a mapping": (
        lambda a, p: (a, {**p, "x0": np.array([1, "a"] * 150, object)}),
        ROWS_APART,
    ),
    "ranges": (
        lambda a, p: (a, p.assign(x0=pytest.importorskip("pandas").cut(p["x0"], 4))),
        r"column 'x0': expected numbers, .*, not extension<pandas\.interval",
    ),
    "a number and its text as names": (
        lambda a, p: (a, p.set_axis(["id", "x", 0, "0"], axis=1)),
        "passive: .* names .*'0'",
    ),
    "a column": (lambda a, p: (a, p["x0"]), "passive: expected a data frame, .* got Series"),
    "texts beside numbers": (
        lambda a, p: (a, {**p, "x0": [1, "a"] * 150}),
        ROWS_APART,
    ),
    "a tensor with a gradient": (
        lambda a, p: (a, {"x0": torch.ones(300, requires_grad=True)}),
        r"passive: cannot be read as a table: .* Use tensor\.detach",
    ),
    "an infinite number": (
        lambda a, p: (a, p.assign(x0=float("inf"))),
        "^passive: column 'x0': infinite or too large",
    ),
    "a name twice, of Arrow": (
        lambda a, p: (a, pa.table(p).rename_columns(["x"] * 4)),
        "passive: .* several columns are named 'x'",
    ),
}


@pytest.mark.parametrize("given", APART)
def test_tables_that_are_none_or_do_not_correspond_are_refused_in_a_sentence(
    given: str, columns: Columns
) -> None:
    pandas = pytest.importorskip("pandas")
    make, message = APART[given]
    active, passive = make(*map(pandas.DataFrame, columns))
    with pytest.raises(SplitveilError, match=message) as raised:
        simulate(active=active, passive=passive, settings=SHORT)
    assert "\n" not in str(raised.value)


def test_equal_row_labels_leave_row_n_the_same_example(columns: Columns) -> None:
    pandas = pytest.importorskip("pandas")
    both = pandas.DataFrame(columns[0] | columns[1]).sample(frac=1, random_state=0)[:200]
    parts = {"active": both[["label", "own"]], "passive": both[["x0", "x1"]]}
    (run,) = simulate(**parts, **QUICK)
    beyond = {"active": parts["active"][:150], "passive": parts["passive"].sort_index()}
    (shorter,) = simulate(**beyond, key=None, **QUICK)
    assert shorter.summary["aligned_rows"] == 150
    again = {party: part.reset_index(drop=True) for party, part in parts.items()}
    assert run.rows("steps") == simulate(**again, **QUICK)[0].rows("steps")
    with pytest.raises(SettingsError, match="2 and 3 rows"):
        predict(run, tables={"active": again["active"][:2], "passive": again["passive"][:3]})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({5: "12O"}, "passive: column 'x0': .* 299 of 300 cells .* row 6 is not"),
        (
            {row: chr(97 + row // 20) for row in range(0, 300, 20)},
            "285 of 300 cells .* rows 1, 21, 41, 61, 81, ...",
        ),
        (dict.fromkeys(range(0, 300, 20), "x"), None),
        (dict.fromkeys(range(0, 300, 20), "NA"), None),
        ({5: ""}, None),
        ({row: f"red {row}" for row in range(0, 300, 2)}, None),
    ],
)
def test_texts_that_are_nearly_all_numbers_become_no_categories_in_silence(
    others: dict[int, str | None],
    message: str | None,
    columns: Columns,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    cells = [others.get(row, f"{value:.1f}") for row, value in enumerate(columns[1]["x0"])]
    passive = columns[1] | {"x0": np.array(cells, dtype=object)}
    write_settings(tmp_path, columns[0], passive, label="label", key="id")
    found = [one for one in caplog.messages if "each text is a category" in one]
    assert len(found) == (message is not None)
    assert "12O" not in caplog.text
    if message is not None:
        assert re.search(message, found[0])


def test_arrays_of_several_feature_owners_correspond_row_by_row(columns: Columns) -> None:
    features = np.column_stack([columns[1]["x0"], columns[1]["x1"]])
    two = {"a": features, "b": np.column_stack([columns[0]["own"]])}
    (run,) = simulate(active={"y": np.arange(300) % 3}, passive=two, label="y", **QUICK)
    assert {path.parent.name for path in run.path.glob("*/summary.json")} == {"a", "active", "b"}
    assert run.summary["aligned_rows"] == 300
    assert run.settings["data"]["classes"] == 3
    assert run.summary["test_accuracy"] is not None


class Enough(Exception):
    pass


def alive() -> tuple[list[threading.Thread], str]:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return threading.enumerate(), children.read_text()


@pytest.mark.parametrize(("owners", "jobs"), [(2, 1), (1, 2)])
def test_after_each_epoch_the_caller_sees_the_run_and_may_end_it(
    columns: Columns, tmp_path: Path, owners: int, jobs: int
) -> None:
    seen: list[list[Any]] = []

    def watch(run: Run) -> None:
        assert threading.current_thread() is threading.main_thread()
        row = run.rows("epochs")[-1]
        assert run.base_dir.is_relative_to(tmp_path)
        seen.append([row["epoch"], row["test_auc"], row["test_average_precision"]])
        if row["epoch"] == 1:
            raise Enough

    tables = {f"owner{number}": columns[1] for number in range(owners)}
    given: dict[str, Any] = {"active": columns[0], "passive": tables, "key": "id"}
    given |= {"runs": tmp_path, "defense": "iso"} | QUICK
    simulate(**given, seeds=[1])  # whatever stays is there before
    given["settings"] = SHORT | {"contract.epochs": 3}
    before = alive()
    with pytest.raises(Enough):
        simulate(**given, callbacks=[watch], jobs=jobs)
    assert alive() == before
    assert [row[0] for row in seen] == [0, 1]
    ended = Run(tmp_path / "simulated-seed-0")
    assert not ended.has_ended
    assert [row["epoch"] for row in ended.rows("epochs")] == [0, 1]
    charged = ended.ledger.guarantee().sum_kl.max
    assert charged > 0
    assert charged == ended.rows("epochs")[-1]["sum_kl"]
    (whole,) = simulate(**given)
    assert [[row["epoch"], row["test_auc"]] for row in whole.rows("epochs")][:2] == [
        row[:2] for row in seen
    ]
    assert whole.summary["test_average_precision"] == pytest.approx(
        whole.rows("epochs")[-1]["test_average_precision"]
    )


class Tracker:
    def __init__(self, ends_at: tuple[str, str] | None = None) -> None:
        self.events: dict[str, list[Any]] = {}
        self.ends_at = ends_at

    def _note(self, run: Run, event: str) -> None:
        self.events.setdefault(run.name, []).append((event, run.has_ended))
        if (run.name, event) == self.ends_at:
            raise Enough

    def on_epoch(self, run: Run) -> None:
        self._note(run, "epoch")

    def on_end(self, run: Run) -> None:
        self._note(run, "end")


def test_callbacks_follow_the_runs_of_a_sweep_but_for_those_taken_as_they_are(
    columns: Columns, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"active": columns[0], "passive": columns[1], "key": "id"}
    given |= {"runs": tmp_path, "settings": SHORT | {"contract.epochs": 2}, "attacks": []}
    names = [f"simulated-seed-{seed}" for seed in range(3)]
    ended: list[Run] = []
    ends = SimpleNamespace(on_end=ended.append)
    first, before = Tracker(ends_at=(names[1], "end")), alive()
    with pytest.raises(Enough):
        simulate(**given, seeds=[1, 9], callbacks=[ends, first])  # the other may end before
    assert alive() == before
    whole = [("epoch", False), ("epoch", False), ("end", True)]
    assert first.events[names[1]] == whole
    again = Tracker()
    runs = simulate(**given | {"callbacks": iter([again, ends])}, seeds=3)
    assert again.events == {names[0]: whole, names[2]: whole}
    assert f"{names[1]}: taken from an earlier call" in caplog.text
    assert [run.has_ended for run in runs] == [True] * 3
    assert {run.name for run in ended} >= {*names}


def test_what_a_callback_draws_changes_no_bit_of_a_run_with_dropout(columns: Columns) -> None:
    given: dict[str, Any] = {"active": columns[0], "passive": columns[1], "key": "id"}
    dropout = {"contract.epochs": 2, "passive.bottom_model.dropout": 0.5}
    given |= {"settings": SHORT | dropout, "attacks": []}
    (plain,) = simulate(**given)
    (watched,) = simulate(**given, callbacks=[lambda run: torch.rand(1)])
    assert watched.rows("steps") == plain.rows("steps")


def test_an_interrupted_sweep_goes_on_and_runs_again_only_what_has_changed(
    columns: Columns, tmp_path: Path
) -> None:
    ran: list[str] = []
    given: dict[str, Any] = {"passive": columns[1], "key": "id"} | QUICK
    given |= {"defense": ["none", defenses.own(halved_labels), Halved], "runs": tmp_path}
    given["callbacks"] = [lambda run: ran.append(run.name)]
    none, _, halved = simulate(active=columns[0], **given)
    before = halved.rows("steps")
    (halved.path / "passive" / "summary.json").unlink()
    ran.clear()
    again = simulate(active=columns[0], **given)
    # In another process, the function may be another one of the same name.
    assert ran == [again[1].name, again[2].name]
    assert again[2].rows("steps") == before
    assert again[0].base_dir == none.base_dir
    ran.clear()
    simulate(active=columns[0] | {"own": columns[0]["own"] + 1}, **given)
    assert ran == [run.name for run in again]


@pytest.mark.parametrize("change", ["nothing", "a file", "own code"])
def test_a_finished_run_is_taken_unless_code_or_files_may_have_changed(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_example(tmp_path)
    own = "tests.api.test_simulate:Halved"
    defense = {"name": "custom", "module": own} if change == "own code" else "none"
    given: dict[str, Any] = {"defense": defense, "runs": tmp_path / "runs"} | QUICK
    (first,) = simulate(tmp_path, **given)
    before = (first.path / "active" / "summary.json").stat().st_mtime_ns
    if change == "a file":
        os.utime(tmp_path / "passive.csv", ns=(before + 10**12, before + 10**12))
    ran: list[Run] = []
    simulate(tmp_path, **given, callbacks=[ran.append])
    assert len(ran) == (change != "nothing")
    assert ("taken from an earlier call" in caplog.text) == (change == "nothing")


def test_tables_of_earlier_runs_stay_beside_them(columns: Columns, tmp_path: Path) -> None:
    given: dict[str, Any] = {"key": "id", "runs": tmp_path} | QUICK
    (first,) = simulate(active=columns[0], passive=columns[1], **given)
    fewer = {name: values[:200] for name, values in columns[1].items()}
    (second,) = simulate(active=columns[0], passive=fewer, seeds=[1], **given)
    assert first.base_dir != second.base_dir
    assert [run.summary["aligned_rows"] for run in (first, second)] == [300, 200]
    assert len(predict(first)) == 300


def test_code_without_a_name_is_not_exported(tmp_path: Path) -> None:
    write_example(tmp_path)
    (run,) = simulate(tmp_path, defense=lambda gradients, labels, noise: gradients, **QUICK)
    with pytest.raises(SettingsError, match=r"active.yaml: code .* no name"):
        run.export_settings(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_paths_of_an_exported_run_are_absolute(tmp_path: Path) -> None:
    write_example(tmp_path)
    for name in ("ids.txt", "token"):
        (tmp_path / name).write_text("person-00001\n")
        (tmp_path / name).chmod(0o600)
    Ledger([f"person-{i:05d}" for i in range(400)]).save(tmp_path / "other")
    own = {
        "active.earlier_ledgers": ["other/checkpoint"],
        "active.serving.token_file": "token",
        "passive.answers.allowed_ids": "ids.txt",
    }
    (run,) = simulate(tmp_path, attacks=[], settings=SHORT | own)
    folder = run.export_settings(tmp_path / "out" / "in")
    found = [yaml.safe_load((folder / f"{one}.yaml").read_text()) for one in ("active", "passive")]
    assert found[0]["earlier_ledgers"] == [str(tmp_path / "other" / "checkpoint")]
    assert found[0]["serving"]["token_file"] == str(tmp_path / "token")
    assert found[1]["answers"]["allowed_ids"] == str(tmp_path / "ids.txt")


def test_a_database_of_an_exported_run_is_found_again(tmp_path: Path) -> None:
    write_example(tmp_path)
    with closing(sqlite3.connect(tmp_path / "features.sqlite")) as database, database:
        database.execute("CREATE TABLE t (id TEXT, x REAL)")
        rows = [(f"person-{i:05d}", float(i % 7)) for i in range(400)]
        database.executemany("INSERT INTO t VALUES (?, ?)", rows)
    (tmp_path / "sqlite").mkdir()  # not the driver
    source = {
        "kind": "sql",
        "driver": "sqlite",
        "uri": "features.sqlite",
        "query": "SELECT * FROM t",
    }
    own = {"passive.data": {"source": source, "id_column": "id", "features": {"numeric": ["x"]}}}
    (run,) = simulate(tmp_path, attacks=[], settings=SHORT | own)
    folder = run.export_settings(tmp_path / "out" / "in")
    found = yaml.safe_load((folder / "passive.yaml").read_text())["data"]["source"]
    assert (found["driver"], found["uri"]) == ("sqlite", str(tmp_path / "features.sqlite"))
    PartyData.of(load_party_settings(PassiveSettings, folder / "passive.yaml"))


def test_paths_begin_in_the_current_folder_and_arguments_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.sqlite", "driver.so", "tokens.json", "weights"):
        Path(name).touch()
    here = str(tmp_path)
    own = {
        "kind": "custom",
        "module": "m:Net",
        "arguments": {"path": "weights", "table": "weights"},
    }
    given: dict[str, Any] = {
        "passive.data.source": {"kind": "sql", "driver": "./driver.so", "uri": "a.sqlite"},
        "passive_b.bottom_model": own | {"weights": {"": "weights"}},
        "passive_c.bottom_model.weights": "weights",
        "passive.data.features.sequences": {"path": {"tokenizer": "tokens.json"}},
        "active.data.features": {"numeric": ["weights"], "sequences": {"table": {}}},
        "active.defense": {"name": "custom", "arguments": {"earlier": ["weights"]}},
        "contract.run_name": "weights",
    }
    expected: dict[str, Any] = given | {
        "passive.data.source": {
            "kind": "sql",
            "driver": f"{here}/driver.so",
            "uri": f"{here}/a.sqlite",
        },
        "passive_b.bottom_model": own | {"weights": {"": f"{here}/weights"}},
        "passive_c.bottom_model.weights": f"{here}/weights",
        "passive.data.features.sequences": {"path": {"tokenizer": f"{here}/tokens.json"}},
    }
    assert from_here(given) == expected


def test_a_folder_that_is_no_example_does_not_hide_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breast_cancer").mkdir()
    monkeypatch.chdir(tmp_path)
    assert source_of("breast_cancer", tmp_path, None, None) == EXAMPLES / "breast_cancer"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no data at all": ({}, "expected an example, or tables"),
    "one table": ({"active": {"label": [0, 1]}}, "expected the tables of both parties"),
    "both": ({"example": "breast_cancer", "active": {}, "passive": {}}, "expected an example"),
    "a misspelt example": ({"example": "breast_canser"}, "did you mean 'breast_cancer'?"),
    "no such example": ({"example": "breast"}, "expected a folder with active.yaml, or one of"),
    "a table of another kind": (
        {"active": [[1, "a"]], "passive": np.zeros((3, 1))},
        "active: expected a data frame",
    ),
    "no label": (
        {"active": {"y": [0, 1]}, "passive": np.zeros((2, 1))},
        "active: expected a column 'label', got 'y'",
    ),
    "no ids": (
        {"active": {"label": [0, 1]}, "passive": {"x": [1.0, 2.0]}, "key": "id"},
        "active: expected a column 'id'",
    ),
    "no jobs": ({"example": "breast_cancer", "jobs": 0}, "jobs: expected at least one"),
    "no callback": (
        {"example": "breast_cancer", "callbacks": ["print"]},
        "expected functions, or objects with on_epoch or on_end",
    ),
    "code for several jobs": (
        {"example": "breast_cancer", "jobs": 2, "defense": lambda gradients, labels, noise: 0},
        "no name that another process can import",
    ),
    "twice": ({"example": "breast_cancer", "defense": ["none", "none"]}, "each defense once"),
    "no seeds": ({"example": "breast_cancer", "seeds": 0}, "expected at least one"),
    "a seed below 0": ({"example": "breast_cancer", "seeds": [-1]}, "none below 0"),
    "one attack": ({"example": "breast_cancer", "attacks": "nrom"}, "did you mean 'norm'?"),
    "a set of attacks": ({"example": "breast_cancer", "attacks": {"nrom"}}, "mean 'norm'?"),
    "a setting of a table in memory": (
        {
            "active": {"label": [0, 1]},
            "passive": {"x": [1.0, 2.0]},
            "settings": {"passive.bottom_modle": 1},
        },
        "^passive: bottom_modle: unknown setting; did you mean 'bottom_model'?",
    ),
    "an absent file beside a table in memory": (
        {
            "active": {"label": [0, 1] * 60},
            "passive": {"note": ["a", "b"] * 60},
            "settings": {
                "passive.data.features.sequences.note": {"tokenizer": "no.json", "max_length": 2}
            },
        },
        "^no.json: there is no such file in .*/here$",
    ),
    "labels in the place of their column": (
        {"active": {"x": [1]}, "passive": {"x": [1]}, "label": np.zeros(1)},
        "^label: expected the name of a column of active",
    ),
    "a list of settings": (
        {"example": "breast_cancer", "settings": ["contract.epochs=3"]},
        "^settings: expected a mapping, such as {'contract.epochs': 3}",
    ),
    "a setting as an argument": (
        {"example": "breast_cancer", "epochs": 3},
        "no argument 'epochs'; a setting of that name: settings={'contract.epochs': ...}",
    ),
    "a table in the place of an example": ({"example": np.zeros((2, 2))}, "^tables have names: "),
    "no such party": (
        {"example": "breast_cancer", "settings": {"epochs": 1}},
        "expected active.NAME=VALUE",
    ),
    "a misspelt party": (
        {"example": "breast_cancer", "settings": {"pasive.party": "b"}},
        "did you mean 'passive'?",
    ),
    "a misspelt setting": (
        {"example": "breast_cancer", "settings": {"passive.botom_model": 1}},
        "botom_model: unknown setting; did you mean 'bottom_model'?",
    ),
    "a misspelt defense": (
        {"example": "breast_cancer", "defense": "marvel"},
        "did you mean 'marvell'?",
    ),
    "a misspelt setting of a defense": (
        {"example": "breast_cancer", "defense": "iso:noise_ratoi=2"},
        "noise_ratoi: unknown setting; did you mean 'noise_ratio'?",
    ),
    "a setting of an inner section": (
        {"example": "breast_cancer", "defense": {"name": "marvell", "power_ratoi": 8}},
        "power_ratoi: unknown setting; did you mean 'defense.strength.power_ratio'?",
    ),
    "not a defense": ({"example": "breast_cancer", "defense": int}, "expected a subclass"),
    "an attack that fails": (
        {"example": "breast_cancer", "attacks": lambda gradients: gradients[:, 9_999]},
        "fails on 8 rows: IndexError",
    ),
    "a device that is not there": (
        {"example": "breast_cancer", "settings": {"active.device": "cuda:99"}},
        "device: cuda:99 needs",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_simulated_is_said(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = WRONG[wrong]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises((SplitveilError, ValueError, TypeError), match=message) as raised:
        simulate(**arguments)
    assert len("".join(traceback.format_exception(raised.value)).splitlines()) < 60
    assert "\n" not in str(raised.value)
    assert "--set" not in str(raised.value)

"""``predict``: the joint model of a run whose parties' folders are all on this machine."""

import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.csv import read_csv

from splitveil import Run, predict, simulate
from splitveil.active_party.training.aggregation import aggregate
from splitveil.common.errors import DataError, OtherModel, SettingsError
from splitveil.common.party.command_line import save_resolved
from splitveil.common.run.contract import ACTIVE
from tests.support.inference import Trained, predicting, train
from tests.support.records import columns_of
from tests.support.runs import write_example, write_several

SHORT = {"contract.epochs": 1}


@pytest.fixture(scope="module", params=["one", "several"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a run of two or four parties, with the files that their processes leave."""
    folder = tmp_path_factory.mktemp(str(request.param))
    (write_example if request.param == "one" else write_several)(folder)
    found = train(folder, folder / "runs")
    save_resolved(found.settings.active, found.settings.active.run_folder(ACTIVE))
    (found.settings.active.run_folder(ACTIVE) / "metrics.jsonl").touch()
    for one in found.settings.passive.values():
        save_resolved(one, one.run_folder(one.folder_name()))
    return found


def test_predictions_are_those_of_parties_that_serve_over_a_network(trained: Trained) -> None:
    run = trained.settings.active.run_folder(ACTIVE).parent
    base = trained.settings.active.base_dir
    here = columns_of(predict(run, trained.test_ids, base_dir=base))
    ids = trained.test_ids
    with predicting(trained) as predictor:
        parts = [
            predictor.predict(ids[at : at + predictor.max_ids]).probabilities
            for at in range(0, len(ids), predictor.max_ids)
        ]
    there = np.concatenate(parts)
    assert np.array(here["probability"], np.float32).tolist() == there.tolist()
    assert here["id"] == here["canonical_id"] == trained.test_ids
    assert len(here["id"]) > 40


def test_the_halves_of_several_parties_come_out_and_predict_together(trained: Trained) -> None:
    active, ids = trained.settings.active, trained.test_ids
    run = Run(active.run_folder(ACTIVE).parent, base_dir=active.base_dir)
    cuts = [run.model(name)(run.features(name, ids)) for name in trained.settings.passive]
    cut = aggregate(active.contract.aggregation, cuts)
    found = run.model(ACTIVE)(cut, run.features(ACTIVE, ids)).sigmoid().tolist()
    assert found == pytest.approx(columns_of(predict(run, ids))["probability"], abs=1e-6)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Run]:
    folder = tmp_path_factory.mktemp("seeds")
    write_example(folder)
    two = {"contract.epochs": 2}
    return simulate(folder, seeds=2, settings=two, threads=1, runs=folder / "runs")


def test_ids_and_rows_may_be_new(seeds: Sequence[Run]) -> None:
    new = {
        "active": {"id": ["new", "other"], "own1": [0.1, 0.2], "own2": [0.0, 0.3]},
        "passive": {"id": ["new"], **{f"x{i}": [0.5] for i in range(1, 6)}},
    }
    answer = columns_of(predict(seeds[0], [" new ", "other", "nobody"], tables=new))
    assert answer["found"] == [True, False, False]
    assert 0 < answer["probability"][0] < 1

    # Nothing is fitted to new rows: with the values of trained ones they have their predictions.
    old = columns_of(predict(seeds[0]))["id"][:20]
    renamed = {
        name: pa.Table.from_pylist(
            [
                dict(reversed(row.items())) | {"id": f"new-{row['id']}", "label": None}
                for row in read_csv(seeds[0].path.parents[1] / f"{name}.csv").to_pylist()
                if row["id"] in old
            ]
        ).drop(["label"])
        for name in ("active", "passive")
    }
    there = columns_of(predict(seeds[0], [f"new-{one}" for one in old], tables=renamed))
    assert there["probability"] == columns_of(predict(seeds[0], old))["probability"]


def test_halves_of_different_trainings_are_not_combined(
    seeds: Sequence[Run], tmp_path: Path
) -> None:
    one, other = seeds
    with pytest.raises(OtherModel, match="expected the model of run"):
        predict(one, passive=other.path / "passive")
    moved = tmp_path / "elsewhere" / one.name / "passive"
    shutil.copytree(one.path / "passive", moved)
    expected = columns_of(predict(one))
    assert columns_of(predict(one, passive=moved)) == expected
    assert columns_of(predict(one, passive={"passive": moved})) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tables": {"actve": {}}}, "actve: expected active, passive"),
        ({"passive": {}}, "expected a folder of passive"),
        ({"passive": "/nowhere"}, "expected a party's folder of a run"),
        ({"model": "refitted"}, r"no refitted\.safetensors"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    arguments: dict[str, Any], message: str, with_plans: Run
) -> None:
    with pytest.raises(SettingsError, match=message):
        predict(with_plans, **arguments)


IDS = [f"person-{row}" for row in range(200)]


@pytest.fixture(scope="module")
def with_plans(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose parties have numbers as texts, with gaps, whose type is categories."""
    plans = pa.array([("1.0", "2.0", None)[row % 3] for row in range(200)]).dictionary_encode()
    table = pa.table({"id": IDS, "plan": plans})
    labelled = table.append_column("y", [[row % 2 for row in range(200)]])
    runs = tmp_path_factory.mktemp("plans")
    (run,) = simulate(
        active=labelled,
        passive=table,
        label="y",
        key="id",
        settings={**SHORT, "active.refit": None},
        threads=1,
        runs=runs,
    )
    return run


@pytest.mark.parametrize("party", ["active", "passive"])
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (["1", "2"], "'plan': 40 of 40 .*as 1 from 1.0.* leave these cells empty"),
        (["zzz", None], "'plan': 20 of 40 .*unknown; .* leave these cells empty"),
        (["zzz", "1.0", None, "2.0"], "'plan': 10 of 40 .*unknown$"),
        (["1.0", "2.0", None, "2.0"], "^$"),
    ],
)
def test_categories_that_training_never_saw_are_counted_and_a_column_of_them_refused(
    with_plans: Run, party: str, plan: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = pa.table({"id": IDS[:40], "plan": plan * (40 // len(plan))})
    is_refused = said.endswith("empty")
    with pytest.raises(DataError, match=said) if is_refused else nullcontext():
        assert all(columns_of(predict(with_plans, IDS[:40], tables={party: own}))["found"])
    said_to_log = "".join(one.getMessage() for one in caplog.records if one.levelno == WARNING)
    assert re.search("^$" if is_refused else said, said_to_log)


@pytest.mark.parametrize("party", ["active", "passive"])
def test_numbers_and_gaps_that_training_never_saw_are_counted(
    seeds: Sequence[Run], party: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A table in another unit, with a first gap, at either party."""
    ids, column = columns_of(predict(seeds[0]))["id"], {"active": "own1", "passive": "x1"}[party]
    own = read_csv(seeds[0].path.parents[1] / f"{party}.csv")
    own = own.filter(pa.array([one in ids for one in own["id"].to_pylist()]))
    cents = [None, *(100 * one for one in own[column].to_pylist()[1:])]
    place = own.column_names.index(column)
    caplog.clear()
    predict(seeds[0], ids, tables={party: own.set_column(place, column, pa.array(cents))})
    gap, outside = [one.getMessage() for one in caplog.records if one.levelno == WARNING]
    assert gap.endswith(
        f" 1 of {len(own)} rows have a gap in columns of numbers that had none in training, "
        f"filled: {column!r} (1)"
    )
    assert re.search(rf"\d+ of {len(own)} rows have numbers outside .*: {column!r} \(", outside)

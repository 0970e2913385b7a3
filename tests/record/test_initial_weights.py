"""Starting from an earlier run's model: the same weights, encoded features and test AUC."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import (
    RELEASED_LABELS,
    TRUE_LABELS,
    EarlierModel,
    TrainedModel,
    identity_metadata,
    save_model,
)
from splitveil.common.record.run_folder import mark_as_ended
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.settings import validate
from tests.support.equality import assert_same_weights
from tests.support.runs import Parties, build_parties, run_in_process, write_example

STILL = "optimizer={kind: sgd, learning_rate: 1.0e-30}"  # below the last bit of every weight
SHARED = ["contract.cut_shape=[3]", "model_seed=4"]


def finished(folder: Path, *overrides: str) -> Parties:
    parties = build_parties(folder, [*SHARED, *overrides], [*SHARED, *overrides])
    run_in_process(parties)
    top, bottom = parties.session.lifecycle.trainer, parties.run.trainer
    for name, settings, trainer, seen in (
        ("active", parties.active_settings, top, parties.active),
        ("passive", parties.passive_settings, bottom, parties.passive),
    ):
        assert seen.rows is not None
        assert trainer is not None
        data = PartyData.load(settings.data, folder)
        encoder = data.fit(seen.rows.file_rows[seen.rows.splits["train"]])
        (folder / "first" / name).mkdir(parents=True)
        save_model(folder / "first" / name, trainer.model, encoder)
    return parties


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parties]:
    folder = tmp_path_factory.mktemp("trained")
    write_example(folder)
    return folder, finished(folder)


@pytest.fixture
def first(trained: tuple[Path, Parties], tmp_path: Path) -> Parties:
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    return trained[1]


def starting(party: str) -> str:
    return f"initial_weights=first/{party}/checkpoint"


def from_first(folder: Path, *overrides: str, runs: Path | None = None) -> Parties:
    own = [*SHARED, *overrides]
    return build_parties(folder, [*own, starting("active")], [*own, starting("passive")], runs=runs)


def test_a_run_that_learns_nothing_has_the_test_auc_of_the_run_it_starts_from(
    first: Parties, tmp_path: Path
) -> None:
    second = from_first(tmp_path, STILL, "contract.epochs=1", "model_seed=77")
    run_in_process(second)
    before, after = (
        [e for e in each.active.evaluations if e.split == "test"] for each in (first, second)
    )
    assert after[0].figures == before[-1].figures
    assert before[0].figures.auc != before[-1].figures.auc
    assert_same_weights(first.weights(), second.weights())


def test_features_are_encoded_as_they_were_in_the_earlier_run(
    first: Parties, tmp_path: Path
) -> None:
    """Fitting again would move every input under weights trained at the old scale."""
    header, *rows = (tmp_path / "passive.csv").read_text().splitlines()
    shifted = [",".join([r.split(",")[0], *(str(float(x) * 9 + 5) for x in r.split(",")[1:])])
               for r in rows]  # fmt: skip
    (tmp_path / "passive.csv").write_text("\n".join([header, *shifted]) + "\n")
    second = from_first(tmp_path, STILL, "contract.epochs=1")
    run_in_process(second)
    trainers = [each.run.trainer for each in (second, first)]
    now, before = (trainer.rows(np.arange(20)) for trainer in trainers if trainer is not None)
    assert now.numeric is not None
    assert before.numeric is not None
    assert not torch.allclose(now.numeric, before.numeric, atol=1.0)
    assert second.active.evaluations[-1].figures != first.active.evaluations[-1].figures


def test_a_category_keeps_its_slot_and_a_new_one_is_unknown(tmp_path: Path) -> None:
    def data(text: str) -> PartyData:
        (tmp_path / "rows.csv").write_text(text)
        source = {"kind": "csv", "path": "rows.csv"}
        values = {"source": source, "features": {"categorical": "city"}}
        return PartyData.load(validate(DataSettings, values, ""), tmp_path)

    monday = data("city\nOslo\nRome\nBern\n")
    fitted = monday.fit(np.arange(3))
    save_model(tmp_path, torch.nn.Linear(1, 1), fitted)
    tuesday = data("city\nAthens\nRome\nOslo\n")
    encoder = tuesday.fit(np.arange(3), EarlierModel.open(tmp_path / "checkpoint"))
    assert encoder == fitted
    assert encoder is not None
    found = encoder.transform(tuesday.table, np.arange(3)).categorical
    assert found is not None
    assert found.squeeze(1).tolist() == [0, 4, 3]


def test_a_folder_without_a_readable_model_is_refused_at_once(
    first: Parties, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"there is no model\.safetensors: expected"):
        build_parties(tmp_path, ["initial_weights=."], [])
    path = tmp_path / "first" / "active" / "checkpoint" / "model.safetensors"
    path.write_bytes(b"\x80\x04no pickle is ever read")
    with pytest.raises(SettingsError, match=r"cannot be read \(SafetensorError\)"):
        from_first(tmp_path)


@pytest.mark.usefixtures("first")
def test_other_columns_than_the_model_s_are_refused(tmp_path: Path) -> None:
    fewer = build_parties(
        tmp_path, SHARED, [*SHARED, starting("passive"), "data.features.numeric=[x1, x2]"]
    )
    with pytest.raises(DataError, match="with columns that are missing here: x3, x4, x5"):
        run_in_process(fewer)
    header, *rows = (tmp_path / "passive.csv").read_text().splitlines()
    more = [f"{header},x6", *(f"{row},1.5" for row in rows)]
    (tmp_path / "passive.csv").write_text("\n".join(more) + "\n")
    with pytest.raises(SettingsError, match="the model was trained without x6"):
        run_in_process(from_first(tmp_path))
    none = build_parties(tmp_path, [*SHARED, starting("active"), "data.features=null"], SHARED)
    with pytest.raises(SettingsError, match=r"had features, data\.features has none"):
        run_in_process(none)


def test_a_run_that_resumes_has_its_own_weights_and_not_the_earlier_ones(
    first: Parties, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    second = from_first(tmp_path, runs=runs)
    run_in_process(second)
    again = from_first(tmp_path, runs=runs)
    assert again.session.reopen()
    now, own = (
        trainer.model.state_dict()
        for each in (again, second)
        if (trainer := each.session.lifecycle.trainer) is not None
    )
    assert_same_weights(now, own)
    earlier = load_file(tmp_path / "first" / "active" / "checkpoint" / "model.safetensors")
    assert any(not torch.equal(now[name], value) for name, value in earlier.items())


def test_weights_that_another_run_has_left_since_the_start_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    save_model(tmp_path, model, None, RELEASED_LABELS)
    earlier = EarlierModel.open(tmp_path / "checkpoint")
    earlier.put_into(model)
    save_model(tmp_path, model, None, TRUE_LABELS)
    with pytest.raises(SettingsError, match="another run has left its weights there since"):
        earlier.put_into(model)


@pytest.mark.parametrize(("exchange", "batches"), [("gradients", 0), ("one_shot", 3)])
def test_a_run_that_was_ended_before_there_was_a_model_predicts_nothing(
    exchange: str, batches: int, tmp_path: Path
) -> None:
    given = {"run_name": "a", "cut_shape": [1], "batch_size": 8, "exchange": exchange}
    contract = validate(Contract, given, "contract")
    unfitted = nn.Module()
    unfitted.register_buffer("limit", torch.full((1,), torch.inf))

    def opened(number: int, model: nn.Module) -> ModelIdentity:
        save_model(tmp_path, model, None, identity_metadata(ModelIdentity("a", number), contract))
        return TrainedModel.open(tmp_path, contract).identity

    assert opened(0, nn.Linear(1, 1)).batch_number == 0  # of a finished run, which has no mark
    mark_as_ended(tmp_path, {"ended_by": "run_budget"})
    with pytest.raises(SettingsError, match="this run was ended before there was a model"):
        opened(batches, unfitted)
    if exchange == "gradients":
        assert opened(3, nn.Linear(1, 1)).batch_number == 3

"""Predictions of a trained model, over mutual TLS, against the evaluation at the end of training.

Equality is of bits, on the CPU: of the probabilities that the last evaluation's logits give, asked
for together, one by one, and in another order.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.active_party.predict.predictor import JointModel, open_predictor
from splitveil.active_party.training.label_kinds import probabilities_of
from splitveil.common import errors
from splitveil.common.party.command_line import save_resolved
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.leakage import auc
from splitveil.common.record.model_files import save_tensors
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.predict.service import InferenceServer, InferenceService, Throttle
from tests.support import inference
from tests.support.runs import CPU
from tests.system.conftest import EXAMPLES, SHORT, needs_data

NAMES = (
    "digits",
    pytest.param("vehicle", marks=needs_data),
    "wide_deep",
    "tabular",
    "three_parties mean",
)


@pytest.fixture(scope="module", params=NAMES)
def trained(
    request: pytest.FixtureRequest,
    small: inference.Trained,
    once: Callable[[str], inference.Trained],
) -> inference.Trained:
    return small if request.param == "wide_deep" else once(request.param)


def expected(trained: inference.Trained) -> NDArray[np.float32]:
    """Return the probabilities of the last evaluation's logits.

    The values at the end of an odd number of values go through another sigmoid, which rounds
    otherwise: the logits are filled up.
    """
    logits = trained.test_logits
    filling = torch.zeros(-len(logits) % 64, *logits.shape[1:])
    return probabilities_of(torch.cat([logits, filling])).numpy()[: len(logits)]


def test_predictions_are_those_of_the_evaluation_at_the_end_of_training(
    trained: inference.Trained,
) -> None:
    with inference.predicting(trained) as predictor:
        together = [
            predictor.predict(trained.test_ids[at : at + predictor.max_ids])
            for at in range(0, len(trained.test_ids), predictor.max_ids)
        ]
        backwards = predictor.predict(trained.test_ids[:-51:-1])
        alone = [predictor.predict([one]) for one in trained.test_ids[:20]]
    found = np.concatenate([part.probabilities for part in together])
    np.testing.assert_array_equal(found, expected(trained))
    np.testing.assert_array_equal(backwards.probabilities[::-1], found[-50:])
    np.testing.assert_array_equal(np.concatenate([one.probabilities for one in alone]), found[:20])
    assert all(part.found.all() for part in together)


# ---- one small run for everything else ----


def test_an_id_that_a_party_lacks_is_not_found_and_disturbs_no_other(
    small: inference.Trained,
) -> None:
    known = small.test_ids[:3]
    with inference.predicting(small) as predictor:
        alone = predictor.predict(known)
        spaced = f"  {known[0]}\t"  # ids are compared in canonical form
        mixed = predictor.predict(["nobody", known[0], spaced, "", known[1], known[2], "row"])
        nobody = predictor.predict(["nobody"])
    np.testing.assert_array_equal(mixed.found, [False, True, True, False, True, True, False])
    np.testing.assert_array_equal(mixed.probabilities[[1, 4, 5]], alone.probabilities)
    assert mixed.probabilities[1] == mixed.probabilities[2]
    assert np.isnan(mixed.probabilities[~mixed.found]).all()
    assert mixed.missing_at == {"active": 3, "passive": 3}
    assert not nobody.found.any()


def test_only_allowed_ids_are_answered(small: inference.Trained, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("\n".join([*small.test_ids[:5], "nobody"]) + "\n")
    with inference.predicting(small, passive=[f"answers.allowed_ids={allowed}"]) as predictor:
        predictions = predictor.predict(small.test_ids[:10])
    np.testing.assert_array_equal(predictions.found, [True] * 5 + [False] * 5)
    assert predictions.missing_at["passive"] == 5


def test_a_half_of_another_run_is_refused_and_both_are_named(
    small: inference.Trained, tmp_path: Path
) -> None:
    other = inference.train(small.settings.active.base_dir, tmp_path / "runs", "model_seed=1")
    port = inference.free_port()
    settings = other.active(inference.connecting_to({"passive": port}))
    settings = settings.model_copy(update={"security": small.settings.active.security})
    with (
        inference.serving_passive(small.passive("passive"), port),
        open_predictor(settings, CPU) as predictor,
    ):
        with pytest.raises(errors.OtherModel, match=f"{other.run_id}.*{small.run_id}"):
            predictor.check_models()
        with pytest.raises(errors.OtherModel):  # nor does the passive party answer for it
            predictor.predict(small.test_ids[:1])


def test_another_contract_is_refused_with_the_names_of_its_fields(small: inference.Trained) -> None:
    with inference.predicting(small) as predictor:
        connection = predictor.clients[0].connection
        connection.contract = connection.contract.model_copy(update={"epochs": 77})
        with pytest.raises(errors.ContractMismatch, match="epochs"):
            predictor.check_models()


def test_only_the_active_party_may_ask(small: inference.Trained) -> None:
    """Another party of the same authority is refused."""
    port = inference.free_port()
    shown = credential_files(small.passive("passive"), "passive")
    contract = small.settings.active.contract
    with inference.serving_passive(small.passive("passive"), port):
        connection = PeerConnection(f"127.0.0.1:{port}", contract, shown, party="passive")
        with (
            EmbedClient(connection, ModelIdentity(small.run_id, 1), inference.IN_TIME_S) as client,
            pytest.raises(errors.PeerUntrusted),
        ):
            client.check_model()


def test_only_the_passive_party_itself_is_asked(small: inference.Trained) -> None:
    """A server with a genuine certificate of another party gets no ids."""
    port, own = inference.free_port(), small.passive("passive")
    shown = credential_files(small.settings.active, "active")
    service = InferenceService(ServedModel.load(own, CPU), "passive", own.contract, Throttle(None))
    with (
        InferenceServer(service, own.contract, f"127.0.0.1:{port}", shown),
        open_predictor(small.active(inference.connecting_to({"passive": port})), CPU) as predictor,
    ):
        with pytest.raises(errors.PeerUntrusted, match="does not carry the called"):
            predictor.check_models()
        with pytest.raises(errors.PeerUntrusted, match="does not carry the called"):
            predictor.predict(small.test_ids[:1])
    assert not service.answered


def test_a_run_with_released_labels_predicts_with_the_refitted_model(tmp_path: Path) -> None:
    """By default; the model that was trained is there as well."""
    defense = "defense={name: noisy_label}"
    run = inference.train(
        EXAMPLES / "breast_cancer", tmp_path, *SHORT, active=[defense, "refit={}"]
    )
    data = PartyData.load(run.settings.active.data, run.settings.active.base_dir)
    truth = data.labels_of(run.test_ids)
    found = {}
    for choice in ("best", "trained", "refitted"):
        with inference.predicting(run, choice=choice) as predictor:
            assert predictor.model.kind == ("trained" if choice == "trained" else "refitted")
            found[choice] = predictor.predict(run.test_ids).probabilities
    assert run.refitted is not None
    assert auc(torch.from_numpy(found["best"]).double(), truth) == run.refitted.auc
    np.testing.assert_array_equal(found["best"], found["refitted"])
    np.testing.assert_array_equal(found["trained"], expected(run))
    assert (found["trained"] != found["refitted"]).any()


# ---- what is refused before anything is asked ----


def test_a_model_that_names_no_run_is_refused(small: inference.Trained, tmp_path: Path) -> None:
    """As another program would save it."""
    settings = small.active(f"runs_dir={tmp_path}")
    shutil.copytree(small.settings.active.run_folder("active"), settings.run_folder("active"))
    weights = load_file(settings.run_folder("active") / "checkpoint" / "model.safetensors")
    save_tensors(settings.run_folder("active"), "model.safetensors", weights)
    with pytest.raises(errors.SettingsError, match="does not say which run it is from"):
        JointModel.load(settings, CPU)


@pytest.mark.parametrize(
    ("is_folder_right", "ending"),
    [
        (True, ": contract.epochs: 99 here, 2 at the time of training; also different: drop_last"),
        (False, ""),
    ],
)
def test_a_model_of_another_contract_is_refused_with_the_field_that_differs(
    small: inference.Trained, tmp_path: Path, *, is_folder_right: bool, ending: str
) -> None:
    """Where the folder holds the settings of another training, no field is named."""
    others = ("contract.epochs=99", "contract.drop_last=true")
    asked = small.active(f"runs_dir={tmp_path}", *others)
    folder = asked.run_folder("active")
    shutil.copytree(small.settings.active.run_folder("active"), folder)
    save_resolved(small.settings.active if is_folder_right else asked, folder)
    with pytest.raises(errors.SettingsError) as refused:
        JointModel.load(asked, CPU)
    assert str(refused.value).endswith(f"another contract than that of these settings{ending}")


def test_a_model_or_an_address_or_a_column_that_is_not_there_is_refused(
    small: inference.Trained, tmp_path: Path
) -> None:
    with pytest.raises(errors.SettingsError, match=r"there is no model\.safetensors"):
        JointModel.load(small.active(f"runs_dir={tmp_path}"), CPU)
    with pytest.raises(errors.SettingsError, match=r"no refitted\.safetensors"):
        JointModel.load(small.settings.active, CPU, "refitted")
    with pytest.raises(errors.SettingsError, match=r"add inference\.connect\.passive"):
        open_predictor(small.settings.active, CPU)
    both = "inference.connect={passive: '127.0.0.1:1', other: '127.0.0.1:2'}"
    with pytest.raises(errors.SettingsError, match="no passive party 'other'"):
        open_predictor(small.active(both), CPU)
    table = tmp_path / "rows.csv"
    table.write_text("id,n1,word\na,1,w0\n")
    with pytest.raises(errors.DataError, match="n2"):
        ServedModel.load(small.settings.passive["passive"], CPU, table)

"""Which models a run with projected labels may begin with, and which it leaves."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from splitveil.active_party.results import save_results
from splitveil.common.alignment.exchange import build_engine
from splitveil.common.errors import BudgetExhausted, SettingsError
from splitveil.common.record.model_files import REFITTED, WEIGHTS
from tests.support.peers import InProcessPeer
from tests.support.projected import DEFENSE, SMALL
from tests.support.runs import write_example
from tests.support.simulation import ActiveRecording, assemble_active, build_passive, read_settings

RELEASED, TRUE = "released labels", "true labels"
NOISY = "mechanism: {kind: randomized_response, epsilon: 1}, insecure_noise_seed: 1"
DEFENSES = {
    "none": "defense={name: none}",
    "marvell": "defense={name: marvell, insecure_noise_seed: 1}",
    "noisy, true top": f"defense={{name: noisy_label, top_labels: 'true', {NOISY}}}",
    "noisy": f"defense={{name: noisy_label, top_labels: noisy, {NOISY}}}",
    "projected": DEFENSE,
}


def left_by(
    folder: Path, name: str, *active: str, both: Sequence[str] = SMALL, fails: bool = False
) -> Path:
    """Run, and return the active party's ``checkpoint`` folder, as its command would leave it."""
    settings = read_settings(folder, [*both, *active], both)
    session, builder = assemble_active(settings.active, ActiveRecording())
    passive = build_passive(settings.passive["passive"])
    peer = InProcessPeer(session, build_engine(settings.active.contract.alignment))
    if fails:
        with pytest.raises(BudgetExhausted):
            passive.run.run(peer)
    else:
        passive.run.run(peer)
    results = folder / name
    results.mkdir(exist_ok=True)
    figures = save_results(settings.active, results, session, builder)
    assert (figures is None) is not (results / "checkpoint" / REFITTED).exists()
    return results / "checkpoint"


def learned_from(path: Path) -> str | None:
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("learned_from")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_example(tmp_path, rows=200)
    return tmp_path


def starting_from(checkpoint: Path) -> str:
    return f"initial_weights={checkpoint}"


def test_the_refitted_model_is_another_one_and_says_so(folder: Path) -> None:
    checkpoint = left_by(folder, "first", DEFENSE)
    assert learned_from(checkpoint / REFITTED) == TRUE
    trained, fitted = load_file(checkpoint / WEIGHTS), load_file(checkpoint / REFITTED)
    assert trained.keys() == fitted.keys()
    assert any(not torch.equal(trained[name], fitted[name]) for name in trained)
    assert (checkpoint / REFITTED).stat().st_mode & 0o777 == 0o600
    again = left_by(folder, "second", DEFENSE, "refit=null")
    assert not (again / REFITTED).exists()
    unfitted = load_file(again / WEIGHTS)
    assert all(torch.equal(trained[name], unfitted[name]) for name in trained)


def test_a_run_that_is_not_over_has_no_refitted_model(folder: Path) -> None:
    """Its last activations are still to come, and a model of an earlier end would be stale."""
    stale = folder / "first" / "checkpoint" / REFITTED
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an end before")
    checkpoint = left_by(folder, "first", DEFENSE, "run_budget={sum_kl: 0.1}", fails=True)
    assert checkpoint == stale.parent
    assert not stale.exists()


def test_a_model_that_says_nothing_of_itself_is_refused(folder: Path) -> None:
    """As of a version that did not know projected labels."""
    checkpoint = left_by(folder, "first", DEFENSE)
    save_file(load_file(checkpoint / WEIGHTS), checkpoint / WEIGHTS)
    with pytest.raises(SettingsError, match="has learned from true labels"):
        left_by(folder, "second", DEFENSE, starting_from(checkpoint))
    third = left_by(folder, "third", DEFENSES["noisy"], starting_from(checkpoint))
    assert learned_from(third / WEIGHTS) == TRUE


@pytest.mark.parametrize(
    ("chain", "learned"),
    [
        (["none"], TRUE),
        (["marvell"], TRUE),
        (["noisy, true top"], TRUE),
        (["noisy"], RELEASED),
        (["projected"], RELEASED),
        (["none", "noisy"], TRUE),
        (["projected", "marvell"], TRUE),
    ],
)
def test_a_chain_of_models_that_has_learned_from_true_labels_once_is_refused(
    folder: Path, chain: list[str], learned: str
) -> None:
    begins: list[str] = []
    for number, name in enumerate(chain):
        checkpoint = left_by(folder, f"run{number}", DEFENSES[name], *begins)
        begins = [starting_from(checkpoint)]
    assert learned_from(checkpoint / WEIGHTS) == learned
    if learned == RELEASED:
        last = left_by(folder, "last", DEFENSE, *begins)
        assert learned_from(last / WEIGHTS) == RELEASED
        return
    with pytest.raises(SettingsError, match=r"has learned from true labels.*would not hold"):
        left_by(folder, "last", DEFENSE, *begins)

"""What a model that begins a run has learned from, and for whom the run then has a bound."""

import math
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from splitveil.active_party.assembly import signals_of
from splitveil.active_party.ledger.account_book import AccountBook, open_book
from splitveil.active_party.results import save_results
from splitveil.common.alignment.exchange import build_engine
from splitveil.common.record.model_files import WEIGHTS
from splitveil.library.in_process import InProcessPeer
from tests.support.runs import build_parties, write_example
from tests.support.simulation import ActiveRecording, assemble_active, build_passive, read_settings

RELEASED, TRUE = "released labels", "true labels"
RESPONSE = "mechanism: {kind: randomized_response, epsilon: 1}, insecure_noise_seed: 1"
DEFENSES = {
    "none": "defense={name: none}",
    "marvell": "defense={name: marvell, insecure_noise_seed: 1}",
    "noisy, true top": f"defense={{name: noisy_label, top_labels: 'true', {RESPONSE}}}",
    "noisy": f"defense={{name: noisy_label, {RESPONSE}}}",
    "gaussian": "defense={name: noisy_label, insecure_noise_seed: 7}",
}
BOTH = ("contract.epochs=1",)


def left_by(folder: Path, name: str, *active: str) -> tuple[Path, float]:
    """Run; return the ``checkpoint`` folder as the command would leave it, and anybody's bound."""
    settings = read_settings(folder, [*BOTH, *active], BOTH)
    session, builder = assemble_active(settings.active, ActiveRecording())
    passive = build_passive(settings.passive["passive"])
    passive.run.run(InProcessPeer(session, build_engine(settings.active.contract.alignment)))
    results = folder / name
    (results / "active").mkdir(parents=True)
    save_results(settings.active, results / "active", session, builder)
    bound = session.leak_bounds().guarantee.max
    return results / "active" / "checkpoint", math.inf if bound is None else bound


def learned_from(path: Path) -> str | None:
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("learned_from")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_example(tmp_path, rows=200)
    return tmp_path


def starting_from(checkpoint: Path) -> list[str]:
    return [f"initial_weights={checkpoint}", f"earlier_ledgers=[{checkpoint}]"]


def test_a_model_that_says_nothing_of_itself_has_learned_from_true_labels(folder: Path) -> None:
    checkpoint, _ = left_by(folder, "first", DEFENSES["gaussian"])
    save_file(load_file(checkpoint / WEIGHTS), checkpoint / WEIGHTS)
    then, bound = left_by(folder, "second", DEFENSES["gaussian"], *starting_from(checkpoint))
    assert learned_from(then / WEIGHTS) == TRUE
    assert bound >= 1


@pytest.mark.parametrize(
    ("chain", "learned"),
    [
        (["none"], TRUE),
        (["marvell"], TRUE),
        (["noisy, true top"], TRUE),
        (["noisy"], RELEASED),
        (["none", "noisy"], TRUE),
        (["noisy", "marvell"], TRUE),
    ],
)
def test_a_chain_that_has_learned_from_true_labels_once_leaves_no_bound_for_anybody(
    folder: Path, chain: list[str], learned: str
) -> None:
    begins: list[str] = []
    for number, name in enumerate(chain):
        checkpoint, _ = left_by(folder, f"run{number}", DEFENSES[name], *begins)
        begins = starting_from(checkpoint)
    assert learned_from(checkpoint / WEIGHTS) == learned
    last, bound = left_by(folder, "last", DEFENSES["gaussian"], *begins)
    assert learned_from(last / WEIGHTS) == learned
    assert (bound < 1) is (learned == RELEASED)


def test_released_weights_count_by_what_a_ledger_holds(folder: Path) -> None:
    checkpoint, _ = left_by(folder, "runs/archive/first", DEFENSES["gaussian"])
    started = (DEFENSES["gaussian"], f"initial_weights={checkpoint}")
    settings = build_parties(folder, started).active_settings
    (signal,) = signals_of(settings, AccountBook.empty())
    assert "is not counted: name that run in earlier_ledgers" in signal.why
    assert signals_of(settings, open_book(checkpoint)) == ()


def test_weights_change_no_bound_of_a_run_whose_answers_no_model_enters(folder: Path) -> None:
    checkpoint, _ = left_by(folder, "first", DEFENSES["none"])
    started = [DEFENSES["gaussian"], f"initial_weights={checkpoint}"]
    agreed = ["contract.exchange=one_shot", "contract.release=noisy_labels"]
    (signal,) = signals_of(build_parties(folder, started).active_settings)
    assert "has learned from true labels" in signal.why
    parties = build_parties(folder, [*agreed, *started], [*agreed, "bottom_model={kind: score}"])
    assert signals_of(parties.active_settings) == ()

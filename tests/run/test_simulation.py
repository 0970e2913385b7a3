"""Both parties of a run in one process."""

from pathlib import Path

import pytest
import torch

from splitveil.common.errors import AlignmentError, SettingsError
from splitveil.passive_party.opening import Peer
from tests.support import simulation
from tests.support.equality import assert_same_weights
from tests.support.peers import Lost, dying
from tests.support.several import NAMES, write_several
from tests.support.simulation import PartiesSettings, Simulation

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"


def met(settings: PartiesSettings) -> Simulation:
    run = simulation.build(settings)
    run.meet()
    return run


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder with one settings file for each of three passive parties."""
    write_several(tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.yaml").rename(tmp_path / f"passive_{name}.yaml")
    return tmp_path


def test_what_both_parties_saw_is_there_after_the_run(example: Path) -> None:
    run = met(simulation.read_settings(example, [MARVELL]))
    active, (passive,) = run.active.seen, run.passive.values()
    steps = len(active.losses)
    assert steps > 2
    assert passive.seen.epochs == [0, 1]
    assert [found.split for found in active.evaluations] == ["validation", "test"] * 2
    assert [epoch for epoch, _ in active.ledger] == [0, 1]
    assert active.ledger[-1][1] == run.active.session.leak_bounds()
    sent, received = active.sent, passive.seen.received
    assert len(sent) == len(received) == steps
    assert all(torch.equal(*pair) for pair in zip(sent, received, strict=True))
    assert {name.split(".")[0] for name in run.weights()} == {"top", "passive"}


@pytest.mark.parametrize("several", [False, True])
def test_over_grpc_it_is_the_same_bit_for_bit(example: Path, three: Path, *, several: bool) -> None:
    settings = simulation.read_settings(three if several else example, [MARVELL])
    here, there = met(settings), simulation.build(settings)
    simulation.meet_over_grpc(there)
    assert_same_weights(here.weights(), there.weights())
    assert len(here.passive) == (3 if several else 1)


def test_a_run_with_a_folder_is_resumed_by_building_it_again(example: Path, tmp_path: Path) -> None:
    often = ["contract.checkpoints.every_steps=2"]
    settings = simulation.read_settings(example, [MARVELL, *often], often)
    whole = met(settings)

    def connect(run: Simulation, name: str) -> Peer:
        return dying(4, after=True)(run.active.session, run.active.engine)

    broken = simulation.build(settings, runs=tmp_path)
    with pytest.raises(Lost):
        broken.meet(connect)
    again = simulation.build(settings, runs=tmp_path)
    again.meet()
    assert again.active.seen.resumed == [0]
    assert_same_weights(again.weights(), whole.weights())


def test_of_several_parties_the_first_error_is_raised(three: Path) -> None:
    too_many = ["contract.alignment.min_aligned=399"]
    run = simulation.build(simulation.read_settings(three, too_many, too_many))
    with pytest.raises(AlignmentError, match="too few ids"):
        run.meet()
    with pytest.raises(RuntimeError, match="before the alignment"):
        run.weights()


def test_the_examples_are_read_as_the_local_launcher_reads_them() -> None:
    two_labs = simulation.read_settings(EXAMPLES / "breast_cancer_two_labs")
    assert sorted(two_labs.passive) == sorted(two_labs.active.contract.passive_parties)
    one = simulation.read_settings(EXAMPLES / "breast_cancer", ["contract.epochs=1"])
    assert list(one.passive) == ["passive"]
    with pytest.raises(SettingsError, match="learning_rat"):
        simulation.read_settings(EXAMPLES / "breast_cancer", ["optimizer.learning_rat=1"])


def test_a_gradient_cannot_be_asked_for_before_an_activation(example: Path) -> None:
    run = simulation.build(simulation.read_settings(example))
    with pytest.raises(RuntimeError, match="no activation"):
        simulation.connect_in_process(run, "passive").receive_gradient()

"""Both parties of a run in one process."""

from pathlib import Path

import pytest

from splitveil.common.errors import AlignmentError, SettingsError
from tests.support import simulation
from tests.support.several import NAMES, write_several

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder with one settings file for each of three passive parties."""
    write_several(tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.yaml").rename(tmp_path / f"passive_{name}.yaml")
    return tmp_path


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

"""Both parties of a run in one process."""

from pathlib import Path

import pytest

from splitveil.common.errors import AlignmentError
from tests.support import simulation
from tests.support.several import NAMES, write_several


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

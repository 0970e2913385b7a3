"""A full disk: a file that cannot be written ends a party with 1; lost output does not."""

from pathlib import Path

import pytest

from tests.support.restarts import Outcome, Settings, assert_same, outcome, restartable, run_once
from tests.support.runs import write_example

SETTINGS = Settings(
    both=(
        "contract.epochs=2",
        "contract.batch_size=4",
        "contract.checkpoint_steps=500",
        "reconnect.max_s=60",
    ),
    active=(
        "defense={name: marvell, noise: persistent, insecure_noise_seed: 7}",
        "leak_monitor=null",
    ),
    passive=("adversary.attacks=[norm]",),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_once(tmp_path_factory.mktemp("whole"), SETTINGS)


def test_a_run_whose_output_goes_to_a_full_disk_ends_well(tmp_path: Path, whole: Outcome) -> None:
    """With another exit code, a supervisor would have all of it answered a second time."""
    write_example(tmp_path)
    for party in ("active", "passive"):
        (tmp_path / f"{party}.lost.log").symlink_to("/dev/full")
    with restartable(tmp_path, SETTINGS, log="lost") as both:
        both.start()
        assert both.wait() == (0, 0)
    assert_same(outcome(tmp_path / "runs"), whole)
    folder = tmp_path / "runs" / "small" / "active"
    assert (folder / "report.html").is_file()
    assert not (folder / "checkpoint" / "run.state").exists()


def test_a_summary_that_cannot_be_written_is_all_that_is_left_to_do(
    tmp_path: Path, whole: Outcome
) -> None:
    write_example(tmp_path)
    with restartable(tmp_path, SETTINGS) as both:
        both.start()
        both.wait_until(lambda: all(party.lines > 0 for party in both))
        in_the_way = [party.folder / "summary.json" for party in both]
        for path in in_the_way:
            path.mkdir()
        assert both.wait() == (1, 1), both.outputs
        for party in both:
            assert "summary.json: cannot be written: Is a directory" in party.said
            assert (party.folder / "checkpoint" / "model.safetensors").is_file()
        lines = [party.lines for party in both]
        for path in in_the_way:
            path.rmdir()
        both.start()
        assert both.wait() == (0, 0), both.outputs
        assert all("resuming at the end" in party.said for party in both)
        assert [party.lines for party in both] == lines  # nothing was answered again
    assert_same(outcome(tmp_path / "runs"), whole, both.outputs)

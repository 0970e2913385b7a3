"""Both parties are killed in a run, started again with the same commands, and end bit for bit."""

from pathlib import Path

from tests.support.restarted import Settings, killed_and_resumed, run_once
from tests.support.runs import write_example

SETTINGS = Settings(
    both=(
        "contract.epochs=6",
        "contract.batch_size=32",
        "contract.checkpoints.every_steps=4",
        "reconnect={max_s: 300, first_wait_s: 0.1, longest_wait_s: 0.5}",
    ),
    active=("defense={name: marvell, noise: persistent, insecure_noise_seed: 7}",),
)


def test_killed_parties_resume_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = run_once(tmp_path / "whole", SETTINGS)
    write_example(tmp_path / "killed")
    struck = (("active", "passive"), ("active",), ("passive",))
    killed_and_resumed(tmp_path / "killed", SETTINGS, whole, struck)

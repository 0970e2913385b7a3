"""Both parties are killed in a run, started again with the same commands, and end bit for bit."""

import random
from pathlib import Path

from tests.support.restarts import SHORT, assert_same, outcome, restartable, run_once, wait_for_line
from tests.support.runs import write_example

SETTINGS = SHORT._replace(
    active=("defense={name: marvell, noise: persistent, insecure_noise_seed: 7}",)
)


def test_killed_parties_resume_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = run_once(tmp_path / "whole", SETTINGS)
    folder, lines = tmp_path / "killed", len(whole.metrics["active"])
    write_example(folder)
    generator = random.Random(lines)
    with restartable(folder, SETTINGS) as both:
        both.start()
        for part, victims in enumerate((both, (both.active,), (both.passive,))):
            wait_for_line(both, int(lines * (0.1 + 0.27 * part + 0.18 * generator.random())))
            for party in victims:
                party.kill()
            for party in victims:
                party.start()
        assert both.wait() == (0, 0), both.outputs
        assert all("resuming in epoch" in party.output for party in both), both.outputs
        assert_same(outcome(folder / "runs"), whole, both.outputs)
    assert not list((folder / "runs" / "small").glob("*.previous-*"))

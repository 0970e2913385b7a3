"""A disk that is full: whose it is ends with 1 and says which file, and both go on afterwards."""

from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from tests.runs import write_example
from tests.system.processes import side_by_side
from tests.system.restarted import Outcome, Settings, assert_same, kept_up, outcome, run_here

SETTINGS = Settings(
    both=(
        "contract.epochs=2",
        "contract.batch_size=4",
        "contract.checkpoints.every_steps=500",
        "reconnect={max_s: 60, first_wait_s: 0.1, longest_wait_s: 0.5}",
    ),
    active=(
        "defense={name: marvell, noise: persistent, insecure_noise_seed: 7}",
        "leak_monitor=null",
    ),
    passive=(
        "adversary={every_steps: 1000, labels: {source: {kind: csv, path: active.csv}, "
        "id_column: id, label_column: label}}",
    ),
)

ROOM = 30_000
"""Largest file: the first to be larger is the transcript, in the first epoch."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("whole")
    write_example(folder)
    return run_here(folder, folder / "runs", SETTINGS)


def limited(party: Literal["active", "passive"], folder: Path, whole: Outcome) -> None:
    write_example(folder)
    with kept_up(folder, SETTINGS) as both:
        both.start()
        full, other = both if party == "active" else both[::-1]
        full.limit_files(ROOM)
        assert (full.wait(), other.wait()) == (1, 4), both.outputs
        assert "Traceback" not in full.said + other.said
        lines = [line for line in full.said.splitlines() if " ERROR " in line]
        assert lines[-1].endswith("transcript.jsonl: cannot be written: File too large")
        assert len(lines) == 1
        told = "cannot go on" if party == "active" else "ended the run before its last step"
        assert told in other.said
        both.start()
        assert both.wait() == (0, 0), both.outputs
        assert "going on in epoch" in full.said
    assert_same(outcome(folder / "runs"), whole, both.outputs)


def test_a_transcript_that_does_not_fit_ends_both_and_they_go_on_bit_for_bit(
    tmp_path: Path, whole: Outcome
) -> None:
    side_by_side(
        partial(limited, "active", tmp_path / "active", whole),
        partial(limited, "passive", tmp_path / "passive", whole),
    )

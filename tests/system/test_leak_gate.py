"""The leak gate ends a real run of two processes, with its results."""

import json
from pathlib import Path

from tests.support.processes import started
from tests.support.runs import write_example

GATE = "leak_gate={max_leak_auc: 0.75, window_steps: 10}"


def test_the_gate_ends_both_parties_and_leaves_checkpoint_and_summary(tmp_path: Path) -> None:
    write_example(tmp_path)
    with started(tmp_path, "contract.epochs=1000", active=[GATE]) as pair:
        assert pair.wait() == (5, 5), pair.outputs
        assert "above the limit of 0.75" in pair.active.output
        assert "the active party has ended this run for good" in pair.passive.output
        assert "0.75" not in pair.passive.output
        assert pair.active.has_checkpoint
        summary = json.loads((pair.active.results() / "summary.json").read_text())
        assert summary["leak_gate_closed"] is True
        assert summary["steps"] < 4000

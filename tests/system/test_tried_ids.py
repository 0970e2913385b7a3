"""The count of tried ids outlives the real processes, and a finished run deletes it."""

import json
from pathlib import Path

from tests.support.processes import started
from tests.support.runs import write_example


def test_a_full_count_ends_both_parties_and_a_finished_run_leaves_none(tmp_path: Path) -> None:
    write_example(tmp_path)
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    count = run / ".active.tried-ids"
    count.write_text(json.dumps({"passive": [11_400, 30]}))
    with started(tmp_path, "contract.epochs=1") as pair:
        assert pair.wait() == (3, 3), pair.outputs
    assert "passive has tried 11,400 ids in 30 exchanges" in pair.active.output
    assert f"delete the count: {count}" in pair.active.output
    count.unlink()
    with started(tmp_path, "contract.epochs=1") as pair:
        assert pair.wait() == (0, 0), pair.outputs
    assert not list(run.glob(".*.tried-ids"))

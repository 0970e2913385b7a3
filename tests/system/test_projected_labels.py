"""Projected labels between two processes: the files of a run, and what stands in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from splitveil.common.record.model_files import REFITTED, WEIGHTS
from splitveil.common.record.release_file import RELEASES
from tests.support.processes import Pair, started
from tests.support.runs import write_example


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Pair]]:
    folder = tmp_path_factory.mktemp("ended")
    write_example(folder)
    defense = "defense={name: projected_labels, stages: 2, rank: 8, insecure_noise_seed: 7}"
    with started(folder, "contract.epochs=4", "transcript=true", active=[defense]) as pair:
        assert pair.wait() == (0, 0), pair.outputs
        yield folder, pair


def test_a_run_leaves_a_refitted_model_beside_the_one_that_was_trained(
    ended: tuple[Path, Pair],
) -> None:
    active, passive = (party.folder / "checkpoint" for party in ended[1])
    summary = json.loads((active.parent / "summary.json").read_text())
    assert 0 < summary["test_auc_refit"] < 1
    assert (active / REFITTED).read_bytes() != (active / WEIGHTS).read_bytes()
    assert {(active / name).stat().st_mode & 0o777 for name in (RELEASES, REFITTED)} == {0o600}
    assert not (passive / RELEASES).exists()
    assert not (passive / REFITTED).exists()
    assert len(load_file(active / RELEASES)) == 2 * 4, "of each of two stages"
    assert "Traceback" not in ended[1].outputs


def test_no_id_and_no_number_of_one_example_is_written_anywhere(ended: tuple[Path, Pair]) -> None:
    """Nor does a line have a number for each of many rows."""
    folder, pair = ended
    values: set[bytes] = set()
    for name in ("active.csv", "passive.csv"):
        for line in (folder / name).read_text().splitlines()[1:]:
            values |= {cell[:12].encode() for cell in line.split(",") if len(cell) > 1}
    assert b"person-00100" in values
    files = {p: p.read_bytes() for p in (folder / "runs").rglob("*") if p.is_file()}
    assert {path.name for path in files} >= {"metrics.jsonl", "summary.json", "transcript.jsonl"}
    for text in [*files.values(), pair.outputs.encode()]:
        assert b"person-" not in text
        assert not [value for value in values if value in text]
    for path, content in files.items():
        if path.suffix in {".json", ".jsonl"} and path.parent.name in {"active", "passive"}:
            texts = content.splitlines() if path.suffix == ".jsonl" else [content]
            assert max([0, *(longest_list(json.loads(text)) for text in texts)]) <= 100, path


def longest_list(value: Any) -> int:
    """Return the length of the longest list within a JSON value."""
    if isinstance(value, list):
        return max([len(value), *map(longest_list, value)])
    if isinstance(value, dict):
        return max([0, *map(longest_list, value.values())])
    return 0

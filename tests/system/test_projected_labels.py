"""Projected labels between two processes, killed with signals at every stage."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save

from splitveil.active_party.ledger.account_book import LEDGER
from splitveil.common.record.model_files import REFITTED, WEIGHTS
from splitveil.common.record.release_file import RELEASES
from tests.support.processes import Pair, Party
from tests.support.restarted import Settings, kept_up, metrics_of
from tests.support.runs import write_example

SETTINGS = Settings(
    both=(
        "contract.epochs=4",
        "contract.batch_size=32",
        "contract.evaluation_batch_size=12",
        "contract.checkpoints.every_steps=3",
        "reconnect={max_s: 300, first_wait_s: 0.1, longest_wait_s: 0.5}",
        "transcript=true",
    ),
    active=("defense={name: projected_labels, stages: 2, rank: 8, insecure_noise_seed: 7}",),
)
FILES = [(party, WEIGHTS) for party in ("active", "passive")]
FILES += [("active", name) for name in (REFITTED, RELEASES, LEDGER)]


class Outcome(NamedTuple):
    """All that must not depend on faults."""

    files: dict[tuple[str, str], bytes]
    metrics: dict[str, list[str]]
    summary: dict[str, Any]


def outcome(folder: Path) -> Outcome:
    results = {party: folder / "runs" / "small" / party for party in ("active", "passive")}
    summary = json.loads((results["active"] / "summary.json").read_text())
    compared = ("steps", "epochs", "test_auc", "test_auc_refit", "test_loss", "ledger")
    return Outcome(
        {at: tensors_in(results[at[0]] / "checkpoint" / at[1]) for at in FILES},
        {party: metrics_of(results[party]) for party in results},
        {name: summary[name] for name in compared},
    )


def tensors_in(path: Path) -> bytes:
    """Return a file without what names its run: the weights' metadata, the ledger's runs."""
    return save({name: tensor for name, tensor in load_file(path).items() if name != "runs"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Pair]]:
    folder = tmp_path_factory.mktemp("whole")
    write_example(folder)
    with kept_up(folder, SETTINGS) as both:
        both.start()
        assert both.wait() == (0, 0), both.outputs
        yield folder, both


def file_of(both: Pair) -> Path:
    return both.active.folder / "checkpoint" / RELEASES


def answered(both: Pair) -> int:
    """Return how many bytes the log of answers has."""
    try:
        return (both.active.folder / "checkpoint" / "answered.log").stat().st_size
    except FileNotFoundError:
        return 0


def stages(both: Pair) -> int:
    """Return how many stages have their release on disk."""
    try:
        return len(load_file(file_of(both))) // 4
    except FileNotFoundError:
        return 0


def kill_and_start(*parties: Party) -> None:
    for party in parties:
        party.kill()
    for party in parties:
        party.start()


def test_killed_in_the_survey_at_a_stage_and_at_the_end_it_ends_as_if_nothing_had_happened(
    tmp_path: Path, whole: tuple[Path, Pair]
) -> None:
    write_example(tmp_path)
    with kept_up(tmp_path, SETTINGS) as both:
        both.start()
        both.wait_until(lambda: answered(both) > 500)  # some questions of the survey
        kill_and_start(both.active)
        both.wait_until(lambda: stages(both) == 1)
        kill_and_start(*both)
        both.wait_until(lambda: stages(both) == 2)
        kill_and_start(both.passive)
        lines = len(outcome(whole[0]).metrics["active"])
        both.wait_until(lambda: both.active.lines > 0.9 * lines)
        kill_and_start(both.active)
        assert both.wait() == (0, 0), both.outputs
        assert both.active.starts == 4
        found, expected = outcome(tmp_path), outcome(whole[0])
        assert found.summary == expected.summary, both.outputs
        assert found.metrics == expected.metrics, both.outputs
        assert [at for at in FILES if found.files[at] != expected.files[at]] == [], both.outputs


def test_it_leaves_a_refitted_model_beside_the_one_that_was_trained(
    whole: tuple[Path, Pair],
) -> None:
    folder, both = whole
    found = outcome(folder)
    kept = both.active.folder / "checkpoint"  # its metadata says what the model has learned from
    assert (kept / REFITTED).read_bytes() != (kept / WEIGHTS).read_bytes()
    assert 0 < found.summary["test_auc_refit"] < 1
    checkpoint = both.active.folder / "checkpoint"
    assert {(checkpoint / name).stat().st_mode & 0o777 for name in (RELEASES, REFITTED)} == {0o600}
    assert not (both.passive.folder / "checkpoint" / RELEASES).exists()
    assert not (both.passive.folder / "checkpoint" / REFITTED).exists()
    assert stages(both) == 2
    assert both.active.said.count("Traceback") == 0


def test_no_text_of_either_party_is_about_single_rows(whole: tuple[Path, Pair]) -> None:
    """No id is in one, and no line has a number for each of many rows."""
    folder, both = whole
    texts = [path for party in both for path in party.folder.iterdir() if path.is_file()]
    texts = [path for path in texts if "tfevents" not in path.name]
    assert {path.name for path in texts} >= {"metrics.jsonl", "summary.json", "transcript.jsonl"}
    for said in [*(path.read_text() for path in texts), both.outputs]:
        assert "person-" not in said
    for path in texts:
        values = {
            ".json": lambda text: [json.loads(text)],
            ".jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
        }.get(path.suffix, lambda _: [])(path.read_text())
        assert max([0, *map(longest_list, values)]) <= 100, path
    assert len((folder / "active.csv").read_text().splitlines()) > 300


def longest_list(value: Any) -> int:
    """Return the length of the longest list within a JSON value."""
    if isinstance(value, list):
        return max([len(value), *map(longest_list, value)])
    if isinstance(value, dict):
        return max([0, *map(longest_list, value.values())])
    return 0

"""The batches whose gradients the active party counts by class, in its own files only."""

import json
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.monitor.distributions import MIN_PER_CLASS
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import load_party_settings
from tests.support.runs import build_parties, run_in_process, write_example

EPOCHS = "contract.epochs=6"
MARVELL = "defense={name: marvell, strength: {power_ratio: 4}}"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    write_example(tmp_path / "example")
    return tmp_path / "example"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SERIES = ["before/negative", "before/positive", "after/negative", "after/positive"]


def histograms(example: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    folder.mkdir()
    shared = [text for text in overrides if text.startswith("contract.")]
    parties = build_parties(example, [EPOCHS, MARVELL, *overrides], [EPOCHS, *shared])
    with ActiveRecorder(parties.active_settings, folder) as recorder:
        parties.session.lifecycle.observer = recorder
        run_in_process(parties)
    return [line for line in lines_of(folder) if line["kind"] == "histogram"]


def test_batches_spread_over_the_run_are_counted(example: Path, tmp_path: Path) -> None:
    found = histograms(example, tmp_path / "run")
    places = [(line["epoch"], line["step"], line["figure"]) for line in found]
    assert places == [
        (epoch, 0, figure) for epoch in (0, 1, 2, 4, 5) for figure in ("log10_norm", "cosine")
    ]
    for line in found:
        counts = line["counts"]
        assert list(counts) == SERIES
        assert sum(counts["before/negative"]) + sum(counts["before/positive"]) == 64
        assert sum(counts["after/positive"]) == sum(counts["before/positive"])
        assert counts["before/positive"] != counts["after/positive"]


def test_of_a_batch_with_too_few_of_a_class_nothing_is_counted(
    example: Path, tmp_path: Path
) -> None:
    # About three in ten are positive: of a batch of 12, five are, or are not.
    found = histograms(example, tmp_path / "run", "contract.batch_size=12")
    assert {line["step"] for line in found} == {0}
    assert len(found) == 10
    fewest = [min(sum(series) for series in line["counts"].values()) for line in found]
    assert min(fewest) == 0
    assert max(fewest) >= MIN_PER_CLASS
    assert all(few == 0 or few >= MIN_PER_CLASS for few in fewest)


@pytest.mark.parametrize(
    ("chosen", "epochs"), [("{epochs: [3]}", {3}), ("{epochs: [0, 99]}", {0}), ("null", set())]
)
def test_the_setting_says_which_epochs(
    example: Path, tmp_path: Path, chosen: str, epochs: set[int]
) -> None:
    found = histograms(example, tmp_path / "run", f"distributions={chosen}")
    assert {line["epoch"] for line in found} == epochs


def test_an_epoch_before_the_first_is_refused(example: Path) -> None:
    with pytest.raises(SettingsError, match=r"distributions\.epochs\.0"):
        load_party_settings(ActiveSettings, example / "active.yaml", ["distributions.epochs=[-1]"])

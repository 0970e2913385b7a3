"""The label owner's log has one line for each epoch: loss, held-out AUC, and the ledger's bound."""

import logging
import re
from pathlib import Path

import pytest

from splitveil.active_party.monitor.recorder import ActiveRecorder
from tests.support.runs import build_parties, run_in_process

LINE = re.compile(r"epoch (\d)/2: loss ([\d.]+), (validation|test) AUC ([\d.]+)(, bound .*)?")


def lines(
    example: Path, folder: Path, caplog: pytest.LogCaptureFixture, *overrides: str
) -> list[re.Match[str]]:
    short = "contract.epochs=2"
    contract = [text for text in overrides if text.startswith("contract.")]
    parties = build_parties(example, [short, *overrides], [short, *contract])
    with (
        caplog.at_level(logging.INFO),
        ActiveRecorder(parties.active_settings, folder) as recorder,
    ):
        parties.session.lifecycle.observer = recorder
        run_in_process(parties)
    told = (LINE.fullmatch(record.message) for record in caplog.records)
    found = [one for one in told if one is not None]
    evaluated = recorder._evaluations["test"]
    if found and found[-1][3] == "test":
        assert float(found[-1][4]) == pytest.approx(evaluated.auc, abs=1e-4)
    return found


def test_each_epoch_has_its_line(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = "contract.split={kind: hash, train: 0.8, test: 0.2}"
    found = lines(example, tmp_path, caplog, "defense={name: none}", split)
    assert [one[1] for one in found] == ["1", "2"]
    assert {one[3] for one in found} == {"test"}
    assert not any(one[5] for one in found)  # without a defense there is no bound


def test_the_validation_rows_are_named_where_there_are_any(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert {one[3] for one in lines(example, tmp_path, caplog)} == {"validation"}


def test_the_bound_for_anybody_is_beside_them(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strength = "defense={name: projected_labels, strength: {leak_auc: 0.7}}"
    found = lines(example, tmp_path, caplog, strength)
    assert found[-1][5] == ", bound 0.700"
    assert max(len(f"12:00:00 active INFO {one[0]}") for one in found) <= 80

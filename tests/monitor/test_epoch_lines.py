"""The label owner's log has one line for each epoch: loss, held-out AUC, and the ledger's bound."""

import logging
import re
from pathlib import Path

import pytest

from splitveil.active_party.monitor.recorder import ActiveRecorder
from tests.support.runs import build_parties, run_in_process

LINE = re.compile(
    r"epoch (\d)/2: loss ([\d.]+), (validation|test) AUC ([\d.]+)(, bound [\d.]+)?, [\d.]+ s"
)


@pytest.mark.parametrize(
    ("override", "split", "bound"),
    [
        ("contract.split={kind: hash, train: 0.8, test: 0.2}", "test", None),
        ("defense={name: none}", "validation", None),
        (
            "defense={name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 1}}",
            "validation",
            ", bound 0.761",
        ),
    ],
)
def test_each_epoch_has_a_line_with_the_held_out_auc_and_the_bound_for_anybody(
    example: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    override: str,
    split: str,
    bound: str | None,
) -> None:
    both = ["contract.epochs=2", *([override] if override.startswith("contract.") else [])]
    parties = build_parties(example, [override, *both], both)
    with (
        caplog.at_level(logging.INFO),
        ActiveRecorder(parties.active_settings, tmp_path) as recorder,
    ):
        parties.session.lifecycle.observer = recorder
        run_in_process(parties)
    found = [line for record in caplog.records if (line := LINE.fullmatch(record.message))]
    assert [line[1] for line in found] == ["1", "2"]
    assert {line[3] for line in found} == {split}
    assert found[-1][5] == bound
    assert float(found[-1][4]) == pytest.approx(recorder._evaluations[split].figures.auc, abs=1e-4)
    assert max(len(f"12:00:00 active INFO {line[0]}") for line in found) <= 90

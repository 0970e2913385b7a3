"""A budget ends a real run of two processes where plan and ledger say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.common.privacy.adversary import Adversary
from tests.support.plans import printed_plan
from tests.support.processes import Pair, started
from tests.support.runs import write_example

BUDGET = (
    "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 7}",
    "run_budget={leak_auc: 0.7, adversary: knows class means only}",
)
EPOCHS = "contract.epochs=10"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pair, tuple[int, int]]:
    folder = tmp_path_factory.mktemp("stopped")
    write_example(folder)
    with started(folder, EPOCHS, active=BUDGET) as pair:
        return folder, pair, pair.wait()


def metrics(pair: Pair, kind: str) -> list[dict[str, Any]]:
    lines = (pair.active.results() / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def test_the_run_stops_in_the_epoch_that_the_plan_names_with_an_exit_code_of_its_own(
    stopped: tuple[Path, Pair, tuple[int, int]],
) -> None:
    folder, pair, exit_codes = stopped
    assert exit_codes == (5, 5), pair.outputs
    assert "the run is expected to end in epoch 4 " in printed_plan(folder, *BUDGET, EPOCHS)
    assert "run_budget: epoch 4 step 1 would take an example to sum_kl 0.2" in pair.active.output
    assert "the budget is sum_kl 0.2068, a leak AUC of at most 0.700" in pair.active.output


def test_the_last_answer_is_the_last_that_the_ledger_allows(
    stopped: tuple[Path, Pair, tuple[int, int]],
) -> None:
    _, pair, _ = stopped
    assert {(line["epoch"], line["step"]) for line in metrics(pair, "train")} == {
        (epoch, step) for epoch in range(3) for step in range(4)
    }
    ledger = metrics(pair, "ledger")
    assert [line["epoch"] for line in ledger] == [0, 1, 2, 3]
    assert ledger[2]["knows_class_means_only_max"] <= 0.7
    # One more epoch like the others would not have fitted.
    per_epoch = ledger[2]["sum_kl_max"] / 3
    assert ledger[2]["sum_kl_max"] + per_epoch > 0.2068
    assert ledger[3] | {"epoch": 2, "time_s": 0} == ledger[2] | {"time_s": 0}


def test_checkpoint_summary_and_ledger_are_left(
    stopped: tuple[Path, Pair, tuple[int, int]],
) -> None:
    _, pair, _ = stopped
    assert pair.active.has_checkpoint
    assert pair.passive.has_checkpoint
    summary = json.loads((pair.active.results() / "summary.json").read_text())
    assert summary["epochs"] == 3
    assert summary["test_auc"] > 0.5
    assert summary["leak_alarms"] == 0
    assert 0.6 < summary["ledger"]["knows_class_means_only_max"] <= 0.7
    stored = load_file(pair.active.results() / "checkpoint" / "ledger.safetensors")
    ledger = AccountBook.from_state(stored).ledger
    charged = torch.nonzero(stored["settled"]).reshape(-1).numpy()
    assert 0 < len(charged) < 360
    assert ledger.bounds(charged).sum_kl.max == summary["ledger"]["sum_kl_max"]
    for written, peers in zip(summary["bounds"], Adversary, strict=True):
        bound = ledger.bounds(np.arange(360)).against(peers)
        assert written == {"adversary": peers, "leak_auc": bound.leak_auc.max, "mu": bound.mu}


def test_the_peer_learns_that_the_run_has_ended_and_nothing_else(
    stopped: tuple[Path, Pair, tuple[int, int]],
) -> None:
    _, pair, _ = stopped
    message = "the active party has ended this run for good; its own log says why"
    assert message in pair.passive.output
    for word in ("budget", "ledger", "sum_kl"):
        assert word not in pair.passive.output

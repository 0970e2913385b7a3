"""A budget ends a real run of two processes where plan and ledger say."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.common.privacy.charge import Adversary
from tests.support.plans import printed_plan
from tests.support.processes import started
from tests.support.runs import write_example

BUDGET = (
    "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 7}",
    "run_budget={leak_auc: 0.7, adversary: knows class means only}",
)
EPOCHS = "contract.epochs=10"


def test_the_run_ends_where_the_plan_says_and_its_peer_learns_only_that_it_has_ended(
    tmp_path: Path,
) -> None:
    write_example(tmp_path)
    with started(tmp_path, EPOCHS, active=BUDGET) as pair:
        assert pair.wait() == (5, 5), pair.outputs
    assert "the run is expected to end in epoch 4 " in printed_plan(tmp_path, *BUDGET, EPOCHS)
    assert "run_budget: epoch 4 step 1 would take an example to sum_kl 0.2" in pair.active.output
    assert "the budget is sum_kl 0.2068, a leak AUC of at most 0.700" in pair.active.output
    message = "the active party has ended this run for good; its own log says why"
    assert message in pair.passive.output
    for word in ("budget", "ledger", "sum_kl"):
        assert word not in pair.passive.output

    assert pair.active.has_checkpoint
    assert pair.passive.has_checkpoint
    summary = json.loads((pair.active.results() / "summary.json").read_text())
    assert (summary["epochs"], summary["leak_alarms"]) == (3, 0)
    stored = load_file(pair.active.results() / "checkpoint" / "ledger.safetensors")
    ledger = AccountBook.from_state(stored).ledger
    assert 0 < torch.count_nonzero(stored["settled_sum_kl"]) < 360
    for written, peers in zip(summary["bounds"], Adversary, strict=True):
        bounds = ledger.bounds(np.arange(360))
        found = {"leak_auc": bounds.against(peers).max, "mu": bounds.mu_by_peers()[peers]}
        assert written == {"adversary": peers} | found

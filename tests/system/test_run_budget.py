"""A budget ends a real run of two processes where plan and ledger say."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.common.privacy.covers import Covers
from tests.plans import printed_plan
from tests.programs import run_program
from tests.runs import write_example
from tests.system.processes import Pair, side_by_side, started
from tests.system.restarted import Both, Restarted, Settings, kept_up


def budget_of(leak_auc: float) -> str:
    return f"run_budget={{leak_auc: {leak_auc}, covers: knows class means only}}"


BUDGET = [
    "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 7}",
    budget_of(0.7),
]
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
    for written, peers in zip(summary["bounds"], Covers, strict=True):
        bound = ledger.bounds(np.arange(360)).against(peers)
        assert written == {"covers": peers, "leak_auc": bound.leak_auc.max, "mu": bound.mu}


def test_the_next_run_has_no_budget_left_where_this_one_ended(
    stopped: tuple[Path, Pair, tuple[int, int]],
) -> None:
    folder, first, _ = stopped
    earlier = f"earlier_ledgers=[{first.active.results() / 'checkpoint'}]"
    with started(folder, "contract.run_name=next", active=[*BUDGET, earlier]) as pair:
        assert pair.wait() == (5, 5), pair.outputs
    assert "earlier runs answered about" in pair.active.output
    assert "run_budget: epoch 1 step 1 would take an example to sum_kl 0.2" in pair.active.output
    summary = json.loads((pair.active.results("next") / "summary.json").read_text())
    assert summary["steps"] == 0
    assert summary["earlier_answers"]["examples"] > 100


def test_the_peer_learns_that_the_run_has_ended_and_nothing_else(
    stopped: tuple[Path, Pair, tuple[int, int]],
) -> None:
    _, pair, _ = stopped
    told = "the active party has ended this run for good; its own log says why"
    assert told in pair.passive.output
    for word in ("budget", "ledger", "sum_kl"):
        assert word not in pair.passive.output


# ---- a second release of the same labels ----

RELEASED = Settings(
    both=("contract.epochs=40", "contract.checkpoints.every_steps=4"),
    active=(
        "defense={name: projected_labels, strength: {leak_auc: 0.6}, rank: 16, stages: 1}",
        "leak_monitor=null",
    ),
    passive=("adversary=null",),
)


def bound(folder: Path) -> float:
    """Return the bound for anybody that a run's summary states."""
    found = json.loads((folder / "summary.json").read_text())["bounds"]
    return float(next(one["leak_auc"] for one in found if one["covers"] == "anybody"))


def of_releases(number: int) -> float:
    """Return the AUC of the best score on several Gaussian releases, each of an AUC of .6.

    A release shifts a label's sum by d standard deviations, where Phi(d / sqrt 2) = .6. The sum of
    independent ones is sufficient, and is shifted by d sqrt(number).
    """
    shift = 2**0.5 * NormalDist().inv_cdf(0.6)
    return NormalDist().cdf(shift * number**0.5 / 2**0.5)


def killed_and_changed(both: Both) -> None:
    both.start()
    both.wait_until(lambda: both.active.lines > 20)
    for party in both:
        party.kill()
    both.start("contract.batch_size=50")
    assert both.wait() == (2, 2), both.outputs
    both.start("contract.batch_size=50", options=["--fresh"])


def finished_and_run_again(both: Both) -> None:
    both.start()
    assert both.wait() == (0, 0), both.outputs
    both.start()
    assert both.wait() == (0, 0), both.outputs
    assert bound(both.active.folder) == pytest.approx(of_releases(1), abs=1e-4)
    both.start(options=["--fresh"])


def under_another_name(both: Both) -> None:
    both.start()
    assert both.wait() == (0, 0), both.outputs
    both.active.folder.parent.rename(both.active.folder.parent.with_name("other"))
    both.start()


def test_whatever_leads_to_a_second_release_its_ledger_states_what_both_tell_together(
    tmp_path: Path,
) -> None:
    def second(way: Callable[[Both], None]) -> None:
        folder = tmp_path / way.__name__
        write_example(folder)
        with kept_up(folder, RELEASED) as both:
            way(both)
            assert both.wait() == (0, 0), both.outputs
            assert bound(both.active.folder) == pytest.approx(of_releases(2), abs=1e-4)
            assert "released at a leak AUC of 0.600 for anybody in " in both.active.said
            assert "together with this run 0.640, bounded for anybody" in both.active.said
            third = ("contract.run_name=third", "run_budget={leak_auc: 0.65}")
            sets = [text for one in (*RELEASED.of("active"), *third) for text in ("--set", one)]
            plan = command(folder, "--runs", str(folder / "runs"), *sets)
            assert "together with this run 0.670, bounded for anybody" in plan.stdout, plan.stderr
            both.passive.start(third[0])
            both.active.start(*third)
            assert both.wait() == (5, 5), both.outputs

    ways = (killed_and_changed, finished_and_run_again, under_another_name)
    side_by_side(*(partial(second, way) for way in ways))


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plan = (sys.executable, "-m", "splitveil.active_party", "plan", str(folder / "active.yaml"))
    return run_program(*plan, *arguments, stderr=subprocess.PIPE)


def test_plan_is_a_command_that_trains_nothing(tmp_path: Path) -> None:
    write_example(tmp_path)
    overrides = [text for override in (*BUDGET, EPOCHS) for text in ("--set", override)]
    done = command(tmp_path, *overrides, "--target-leak-auc", "0.7")
    assert done.returncode == 0, done.stderr
    assert "the run is expected to end in epoch 4 " in done.stdout
    assert "48.3" in done.stdout  # 10 epochs at sum_kl 0.2068: the power ratio by the bound
    assert not (tmp_path / "runs").exists()
    refused = command(tmp_path, *overrides, "--target-leak-auc", "1.5")
    assert refused.returncode == 2
    assert "--target-leak-auc" in refused.stderr


def test_a_budget_without_a_defense_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_example(tmp_path)
    (tmp_path / "active.csv").unlink()
    done = command(tmp_path, "--set", budget_of(0.7))
    assert done.returncode == 2
    assert "run_budget" in done.stderr


def supervised(both: Both) -> None:
    """Start whatever ends with an error again, as a supervisor does."""

    def keep_up(party: Restarted) -> None:
        party.start()
        while party.wait() and party.starts < 4:
            party.start()

    side_by_side(*(partial(keep_up, party) for party in both))


ENDED_EARLY = Settings(
    both=(
        "contract.epochs=10",
        "reconnect={max_s: 20, first_wait_s: 0.1, longest_wait_s: 0.5}",
    ),
    active=("defense={name: marvell, insecure_noise_seed: 7, strength: {power_ratio: 16}}",),
    passive=("adversary=null",),
)


def test_a_supervisor_starts_a_run_that_its_budget_ended_once_more_and_a_raised_one_resumes(
    tmp_path: Path,
) -> None:
    write_example(tmp_path)
    budget = ENDED_EARLY._replace(active=(*ENDED_EARLY.active, budget_of(0.7)))
    with kept_up(tmp_path, budget) as both:
        supervised(both)
        assert [party.starts for party in both] == [2, 2], both.outputs
        assert "this run was ended for good by its run_budget" in both.active.said
        assert "the active party has ended this run for good" in both.passive.said
        assert all("--fresh starts over" in party.said for party in both)
        for word in ("budget", "ledger", "sum_kl"):
            assert word not in both.passive.output
        answered = train_lines(both.active.folder)
        assert len(answered) == 12
        assert not list(both.active.folder.parent.glob("*.previous-*"))
    again = ENDED_EARLY._replace(active=(*ENDED_EARLY.active, budget_of(0.75)))
    with kept_up(tmp_path, again, log="again") as both:
        both.start()
        assert both.wait() == (5, 5), both.outputs
        assert "which was ended under other limits" in both.active.said
        assert all("resuming in epoch" in party.said for party in both)
        more = train_lines(both.active.folder)
        assert more[: len(answered)] == answered
        assert len(more) > len(answered)


def train_lines(folder: Path) -> list[tuple[int, int]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["epoch"], line["step"]) for line in lines if line["kind"] == "train"]

"""What a budget ended, or a release revealed, counts in every later start; plan says so before."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import NormalDist

import pytest

from tests.support.processes import Pair, Party, side_by_side
from tests.support.programs import run_program
from tests.support.restarts import Settings, restartable
from tests.support.runs import write_example


def budget_of(leak_auc: float) -> str:
    return f"run_budget={{leak_auc: {leak_auc}, adversary: knows class means only}}"


# ---- a second release of the same labels ----

RELEASED = Settings(
    both=("contract.epochs=40", "contract.checkpoint_steps=4"),
    active=(
        "defense={name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2.79107}}",
        "leak_monitor=null",
    ),
    passive=("adversary=null",),
)


def bound(folder: Path) -> float:
    found = json.loads((folder / "summary.json").read_text())["bounds"]
    return float(next(one["leak_auc"] for one in found if one["adversary"] == "anybody"))


def of_releases(number: int) -> float:
    """Return the AUC of the best score on several noisy labels, each of an AUC of .6.

    A label shifts its noisy one by d standard deviations, where Phi(d / sqrt 2) = .6. The sum of
    independent ones is sufficient, and is shifted by d sqrt(number).
    """
    shift = 2**0.5 * NormalDist().inv_cdf(0.6)
    return NormalDist().cdf(shift * number**0.5 / 2**0.5)


def killed_and_changed(both: Pair) -> None:
    both.start()
    both.wait_until(lambda: both.active.lines > 20)
    for party in both:
        party.kill()
    both.start("contract.batch_size=50")
    assert both.wait() == (2, 2), both.outputs
    both.start("contract.batch_size=50", options=["--fresh"])


def finished_and_run_again(both: Pair) -> None:
    both.start()
    assert both.wait() == (0, 0), both.outputs
    both.start()
    assert both.wait() == (0, 0), both.outputs
    assert bound(both.active.folder) == pytest.approx(of_releases(1), abs=1e-4)
    both.start(options=["--fresh"])


def test_whatever_leads_to_a_second_release_its_ledger_states_what_both_tell_together(
    tmp_path: Path,
) -> None:
    def second(way: Callable[[Pair], None]) -> None:
        folder = tmp_path / way.__name__
        write_example(folder)
        with restartable(folder, RELEASED) as both:
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

    ways = (killed_and_changed, finished_and_run_again)
    side_by_side(*(partial(second, way) for way in ways))


def test_active_parties_that_wait_together_count_each_other_in_the_order_in_which_they_begin(
    tmp_path: Path,
) -> None:
    """Of four, the budget pays for two releases; one is refused because another goes on."""
    write_example(tmp_path)
    with ExitStack() as stack:
        runs = {}
        for name in "abcd":
            longer = ("contract.epochs=200",) * (name == "d")  # still under way when it is stopped
            own = RELEASED._replace(both=(*RELEASED.both, *longer, f"contract.run_name={name}"))
            own = own._replace(active=(*own.active, "run_budget={leak_auc: 0.65}"))
            runs[name] = stack.enter_context(restartable(tmp_path, own, log=name))
            runs[name].active.start()
        for both in runs.values():
            both.active.wait_until_says("waiting for the passive party")

        def after(name: str) -> tuple[int, int]:
            runs[name].passive.start()
            return runs[name].wait()

        runs["d"].passive.start()
        of_d = tmp_path / "runs" / "d" / "active"
        runs["d"].wait_until((of_d / "metrics.jsonl").exists)
        runs["d"].wait_until(lambda: b"train" in (of_d / "metrics.jsonl").read_bytes())
        runs["d"].active.signal(signal.SIGSTOP)
        assert after("a")[0] == 2, runs["a"].outputs
        refusal = f"{of_d}: what this run has charged cannot be counted"
        assert refusal in runs["a"].active.said
        runs["d"].active.signal(signal.SIGCONT)
        assert runs["d"].wait() == (0, 0), runs["d"].outputs
        assert after("b") == (0, 0), runs["b"].outputs
        assert "d/active (20" in runs["b"].active.said
        assert after("c") == (5, 5), runs["c"].outputs
        logs = tmp_path.glob("runs/*/active/metrics.jsonl")
        answered = sorted(log.parts[-3] for log in logs if train_lines(log.parent))
        assert answered == ["b", "d"]
        assert bound(runs["b"].active.results("b")) == pytest.approx(of_releases(2), abs=1e-4)


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plan = (sys.executable, "-m", "splitveil.active_party", "plan", str(folder / "active.yaml"))
    return run_program(*plan, *arguments, stderr=subprocess.PIPE)


def supervised(both: Pair) -> None:
    def keep_up(party: Party) -> None:
        party.start()
        while party.wait() and party.starts < 4:
            party.start()

    side_by_side(*(partial(keep_up, party) for party in both))


ENDED_EARLY = Settings(
    both=("contract.epochs=10", "reconnect.max_s=20"),
    active=("defense={name: marvell, insecure_noise_seed: 7, strength: {power_ratio: 16}}",),
    passive=("adversary=null",),
)


def test_a_supervisor_starts_a_run_that_its_budget_ended_once_more_and_a_raised_one_resumes(
    tmp_path: Path,
) -> None:
    write_example(tmp_path)
    budget = ENDED_EARLY._replace(active=(*ENDED_EARLY.active, budget_of(0.7)))
    with restartable(tmp_path, budget) as both:
        supervised(both)
        assert [party.starts for party in both] == [2, 2], both.outputs
        assert "this run was ended for good by its run_budget" in both.active.said
        assert "the active party has ended this run for good" in both.passive.said
        assert all("--fresh starts over" in party.said for party in both)
        assert not any("next: splitveil" in party.said for party in both)
        for word in ("budget", "ledger", "sum_kl"):
            assert word not in both.passive.output
        answered = train_lines(both.active.folder)
        assert len(answered) == 12
        assert not list(both.active.folder.parent.glob("*.previous-*"))
    again = ENDED_EARLY._replace(active=(*ENDED_EARLY.active, budget_of(0.75)))
    with restartable(tmp_path, again, log="again") as both:
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

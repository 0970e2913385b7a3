"""Parties that were stopped or killed and started again with the same commands: exact resume.

Kills at random steps are in test_faults.py; tests/run has every defense killed at one step, and one
defense killed at every step.
"""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from splitveil.active_party.ledger.account_book import LEDGER
from tests.support import restarts
from tests.support.processes import Pair, side_by_side
from tests.support.runs import write_example


def lines_of(whole: restarts.Outcome) -> int:
    return len(whole.metrics["active"])


def refused(both: Pair, *overrides: str) -> tuple[str, ...]:
    """Return what both say; nothing may have been moved."""
    both.start(*overrides)
    assert both.wait() == (2, 2), both.outputs
    assert not list(both.active.folder.parent.glob("*.previous-*"))
    return tuple(party.said for party in both)


def interrupted_refused_and_finished(both: Pair, whole: restarts.Outcome) -> None:
    """Ctrl-C at a terminal reaches both, and only the same commands resume the run.

    A ledger lies there while nothing more is released: not while a run goes on, which may be
    killed. Once it has finished, the same commands train nothing, as where a unit starts at boot.
    """
    both.start()
    ledger = both.active.folder / "checkpoint" / LEDGER
    restarts.wait_for_line(both, lines_of(whole) // 3)
    for party in both:
        party.signal(signal.SIGSTOP)  # so that it is there for as long as the others need
    with restarts.restartable(
        both.active.folder.parents[2], restarts.SHORT, log="second"
    ) as others:
        others.start()
        assert others.wait() == (2, 2), others.outputs
        assert all("another process" in other.said for other in others)
    for party in both:
        party.signal(signal.SIGINT)
        party.signal(signal.SIGCONT)
    assert both.wait() == (130, 130), both.outputs
    assert ledger.is_file()
    for said in refused(both, "contract.batch_size=16", "model_seed=3", "insecure_nonce_seed=99"):
        assert "an unfinished run with other settings: contract.batch_size: 16 now, 32 then" in said
        assert "model_seed: 3 now, 0 then" in said
        assert "insecure_nonce_seed" in said
        assert "99" not in said
    files = [party.folder / "settings.yaml" for party in both]
    contents = [path.read_bytes() for path in files]
    for path in files:
        path.write_text("contract: [")
    assert all("settings.yaml: not valid YAML" in said for said in refused(both))
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    both.start()
    both.wait_until(lambda: not ledger.exists())  # fast ones had passed the next line before
    restarts.wait_for_line(both, lines_of(whole) // 2)
    assert not ledger.exists()
    assert both.wait() == (0, 0), both.outputs
    assert ledger.is_file()
    assert all("resuming in epoch" in party.said for party in both)
    for said in refused(both, "model_seed=3"):
        assert "has a finished run with other settings: model_seed" in said
    times = {path: path.stat().st_mtime_ns for path in both.active.folder.parent.rglob("*")}
    both.start("torch_threads=2")
    assert both.wait() == (0, 0), both.outputs
    assert all("this run has finished, and nothing is trained" in party.said for party in both)
    assert {path: path.stat().st_mtime_ns for path in times} == times


def given_up(both: Pair, whole: restarts.Outcome) -> None:
    """Past ``reconnect.max_s`` without its peer, a party saves where it is, and says so."""
    for lost, line in ((0, lines_of(whole) // 3), (1, lines_of(whole) // 2)):
        both.start(fast_clock=True)
        restarts.wait_for_line(both, line)
        both[lost].kill()
        both[1 - lost].hurry()
        assert both[1 - lost].wait() == 4, both.outputs
        assert "for 300 s" in both[1 - lost].said
    both.start()
    assert both.wait() == (0, 0), both.outputs
    assert all("resuming in epoch" in party.said for party in both)


def started_over_by_option(both: Pair, whole: restarts.Outcome) -> None:
    both.start()
    restarts.wait_for_line(both, lines_of(whole) // 3)
    for party in both:
        party.kill()
    both.start(options=["--fresh"])
    assert both.wait() == (0, 0), both.outputs
    for party in both:
        assert party.folder.with_name(f"{party.party}.previous-1").is_dir()
        assert "resuming" not in party.said
    assert "these labels were released at a leak AUC of" in both.active.said
    assert (both.active.folder.with_name("active.previous-1") / "checkpoint" / LEDGER).is_file()


def test_a_run_that_was_ended_early_can_be_resumed_or_started_over(tmp_path: Path) -> None:
    whole = restarts.run_once(tmp_path / "whole", restarts.SHORT)

    def check(story: Callable[[Pair, restarts.Outcome], None]) -> None:
        folder = tmp_path / story.__name__
        write_example(folder)
        with restarts.restartable(folder, restarts.SHORT) as both:
            story(both, whole)
            restarts.assert_same(restarts.outcome(folder / "runs"), whole, both.outputs)

    stories = (interrupted_refused_and_finished, given_up, started_over_by_option)
    side_by_side(*(partial(check, story) for story in stories))

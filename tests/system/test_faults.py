"""After any fault between and around the parties, a run ends as if nothing had happened.

Faults are drawn at random: a process is killed or stopped for a while; bytes are lost, held back or
doubled, or a connection ends. Each test says its seed when it fails: ``FAULT_SEED=<seed> pytest
tests/system/test_faults.py`` draws the same faults again. ``make faults`` draws over 200.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pytest

from tests.support.processes import Pair, Party, side_by_side
from tests.support.proxies import ByteHarm, Direction, Fault, FaultyLine, Plan
from tests.support.restarts import Outcome, Settings, assert_same, outcome, restartable, run_once
from tests.support.runs import write_example

ALL = os.environ.get("SPLITVEIL_FAULTS") == "all"
SEED = int(os.environ.get("FAULT_SEED", "1"))

SETTINGS = Settings(
    both=(
        "contract.epochs=5",
        "contract.batch_size=32",
        "contract.checkpoint_steps=3",
        "reconnect={max_s: 90, deadline_s: 2}",
    ),
    active=("defense={name: marvell, insecure_noise_seed: 7}",),
)
ONE_SHOT = Settings(
    both=(
        *SETTINGS.both,
        "transcript=true",  # a line of each message, where metrics have four of the run
        "contract.exchange=one_shot",
        "contract.release=noisy_labels",
        "contract.evaluation_batch_size=8",
    ),
    active=("defense={name: noisy_label, insecure_noise_seed: 7}",),
    passive=("bottom_model={kind: score}", "adversary=null"),
)

UNPROTECTED: tuple[ByteHarm, ...] = ("end", "reset", "swallow", "delay")
"""What may happen to plain text, which stays on loopback: TCP keeps other harm away there."""


def seeds(of_ci: int, of_all: int) -> range:
    return range(SEED, SEED + (of_all if ALL else of_ci))


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_once(tmp_path_factory.mktemp("faultless"), SETTINGS)


# ---- the connection ----


def draw_fault(
    harms: Sequence[str], generator: random.Random, passed: dict[Direction, int]
) -> Fault:
    direction = generator.choice(get_args(Direction))
    harm, at = generator.choice(harms), generator.randrange(passed[direction])
    is_pause = harm in {"swallow", "delay"}
    extent = generator.uniform(0.05, 1.0) if is_pause else generator.random()
    return Fault(harm, direction, at, extent)


@pytest.mark.parametrize("harms", [UNPROTECTED, get_args(ByteHarm)], ids=["plain text", "TLS"])
def test_faults_of_the_connection_change_no_bit(
    tmp_path: Path, faultless: Outcome, trusted: Path, harms: tuple[ByteHarm, ...]
) -> None:
    """Runs with four faults each are those without one."""

    def check(name: str, plan: Plan) -> None:
        own = None if harms is UNPROTECTED else trusted
        try:
            found = run_once(tmp_path / name, SETTINGS, partial(FaultyLine, plan=plan), own)
        except BaseException as error:
            raise AssertionError(f"FAULT_SEED={name}: {plan.struck}") from error
        assert_same(found, faultless, f"FAULT_SEED={name}: {plan.struck}")

    none, drawn = Plan([]), seeds(2, 20)
    check("none", none)
    struck: Counter[str] = Counter()
    for seed in drawn:
        generator = random.Random(seed)
        plan = Plan([draw_fault(harms, generator, none.passed) for _ in range(4)])
        check(str(seed), plan)
        struck.update(fault.harm for fault in plan.struck)
    print(f"\n{len(drawn)} runs, faults: {dict(sorted(struck.items()))}")
    assert sum(struck.values()) >= 2 * len(drawn)


# ---- the processes ----

Moment = Literal["time", "step", "checkpoint", "log"]

SAID = {
    "active": ("waiting for the passive party", "handshake done", "report written"),
    "passive": ("rows read from", "report written"),
}
"""Log lines at which a process may be struck: while it starts, aligns, ends."""


class Blow(NamedTuple):
    party: Literal["active", "passive", "both"]
    kills: bool
    """Whether it is killed, and started again; otherwise it is stopped, and goes on."""

    moment: Moment
    share: float
    """Where between the earliest and the latest."""

    pause_s: float
    """How long it is away."""


def draw_blow(generator: random.Random) -> Blow:
    return Blow(
        generator.choice(["active", "active", "passive", "passive", "both"]),
        generator.random() < 0.7,
        generator.choice(["time", "step", "step", "step", "checkpoint", "log"]),
        generator.random(),
        generator.uniform(0.0, 1.5),
    )


def strike(both: Pair, blow: Blow, lines: int) -> bool:
    """Wait for the moment, strike, and say whether anybody was still there to be struck."""
    victims = list(both) if blow.party == "both" else [getattr(both, blow.party)]
    watched = victims[0]
    both.wait_until(_moment_of(blow, watched, lines))
    victims = [victim for victim in victims if victim.exit_code is None]
    for victim in victims:
        victim.signal(signal.SIGKILL if blow.kills else signal.SIGSTOP)
    if victims:
        time.sleep(blow.pause_s)
    for victim in victims:
        if not blow.kills:
            victim.signal(signal.SIGCONT)
        else:
            victim.kill()
            if not victim.is_done:
                victim.start()
    return bool(victims)


def _moment_of(blow: Blow, watched: Party, lines: int) -> Callable[[], bool]:
    now = time.monotonic()
    match blow.moment:
        case "time":
            return lambda: time.monotonic() - now > 8 * blow.share
        case "step":
            # Somewhere in what is left of the run, once the process is there again.
            start = lines_of(watched.folder)
            return lambda: lines_of(watched.folder) >= start + blow.share * (lines - start)
        case "checkpoint":
            from_line = blow.share * lines
            return lambda: (
                lines_of(watched.folder) >= from_line
                and any((watched.folder / "checkpoint").glob(".at-*.tmp"))
            )
        case _:
            texts = SAID[watched.party]
            text = texts[int(blow.share * len(texts))]
            return lambda: text in watched.said


def lines_of(folder: Path) -> int:
    """Return how far a party is: the messages in its transcript, or else its metrics."""
    names = ("transcript.jsonl", "metrics.jsonl")
    with suppress(StopIteration, FileNotFoundError):
        path = next(folder / name for name in names if (folder / name).exists())
        return path.read_bytes().count(b"\n")
    return 0


@pytest.mark.timeout(3600 if ALL else 1800)
def test_processes_that_are_killed_or_stopped_change_no_bit(
    tmp_path: Path, faultless: Outcome
) -> None:
    lines = {party: len(found) for party, found in faultless.metrics.items()}
    assert_survives_blows(tmp_path, SETTINGS, faultless, lines, of_ci=3)


@pytest.mark.timeout(3600 if ALL else 1800)
def test_nor_do_those_of_a_one_shot_run_that_begins_with_noisy_labels(tmp_path: Path) -> None:
    faultless = run_once(tmp_path / "whole", ONE_SHOT)
    runs = tmp_path / "whole" / "runs" / "small"
    lines = {party: lines_of(runs / party) for party in ("active", "passive")}
    assert_survives_blows(tmp_path, ONE_SHOT, faultless, lines, of_ci=2)


def assert_survives_blows(
    tmp_path: Path, settings: Settings, faultless: Outcome, lines: Mapping[str, int], of_ci: int
) -> None:
    struck: Counter[str] = Counter()
    lock = threading.Lock()

    def run(seed: int) -> None:
        generator = random.Random(seed)
        blows = [draw_blow(generator) for _ in range(4)]
        folder = tmp_path / str(seed)
        write_example(folder)
        with restartable(folder, settings) as both:
            context = f"FAULT_SEED={seed}: {blows}"
            both.start()
            for blow in blows:
                if strike(both, blow, lines["active" if blow.party == "both" else blow.party]):
                    with lock:
                        struck[f"{'kill' if blow.kills else 'stop'} {blow.party}"] += 1
            codes = both.wait()
            assert codes == (0, 0) or all(party.is_done for party in both), (
                f"{context}\n{codes}\n{both.outputs}"
            )
            assert_same(outcome(folder / "runs"), faultless, f"{context}\n{both.outputs}")

    drawn = seeds(of_ci, 20)
    side_by_side(*(partial(run, seed) for seed in drawn))
    print(f"\n{len(drawn)} runs, faults: {dict(sorted(struck.items()))}")
    assert sum(struck.values()) >= 2 * len(drawn)

"""Parties that are killed, stopped, and restarted with the same command, and their results."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save

from splitveil.simulation import free_address
from tests import certificates
from tests.runs import write_example
from tests.system.processes import Party, PartyName
from tests.waiting import HANGS_AFTER_S


class Settings(NamedTuple):
    """Overrides of one run's settings."""

    both: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    passive: tuple[str, ...] = ()

    def of(self, party: PartyName) -> tuple[str, ...]:
        own = self.active if party == "active" else self.passive
        return (*self.both, *own)


# ---- what a run leaves ----


class Outcome(NamedTuple):
    """All that must not depend on faults."""

    weights: dict[str, bytes]
    metrics: dict[str, list[str]]
    summary: dict[str, Any]


def outcome(runs: Path) -> Outcome:
    """Read what both parties have written."""
    folders = {party: runs / "small" / party for party in ("active", "passive")}
    summary = json.loads((folders["active"] / "summary.json").read_text())
    return Outcome(
        # Without the metadata, which only a process writes.
        {p: save(load_file(at / "checkpoint/model.safetensors")) for p, at in folders.items()},
        {party: metrics_of(at) for party, at in folders.items()},
        {name: summary[name] for name in ("steps", "epochs", "test_auc", "test_loss", "ledger")},
    )


def metrics_of(folder: Path) -> list[str]:
    """Return the lines of a party's metrics without their times, in an order of their own.

    The attacks write theirs when they are ready, beside the training; an alignment that did not
    come to its end on both sides is noted again when it does.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] != "alignment"]
    plain = [{k: v for k, v in line.items() if k != "time_s"} for line in lines]
    return sorted(json.dumps(line, sort_keys=True) for line in plain)


def assert_same(found: Outcome, expected: Outcome, told: str = "") -> None:
    """Compare two runs bit for bit."""
    for party in ("active", "passive"):
        one, other = Counter(found.metrics[party]), Counter(expected.metrics[party])
        assert one == other, f"{told}\n{party}: {one - other} instead of {other - one}"
        assert found.weights[party] == expected.weights[party], f"{told}\n{party}'s weights"
    assert found.summary == expected.summary, told


# ---- processes ----


class Restarted:
    """One party as a supervisor keeps it: whenever it was killed, started with the same command."""

    def __init__(
        self, party: PartyName, folder: Path, address: str, settings: Settings, log: str
    ) -> None:
        self.party: PartyName = party
        self._log = log
        self.starts = 0
        self._folder = folder
        where = f"{'listen' if party == 'active' else 'connect'}={address}"
        self._overrides = (where, *settings.of(party))
        self._process: Party
        self._outputs: list[str] = []

    def start(self, *overrides: str, options: Sequence[str] = (), fast_clock: bool = False) -> None:
        """Start it, once its process before has ended; ``hurry`` needs a fast clock."""
        if self.starts:
            self._outputs.append(self._process.output)
        self.starts += 1
        self._process = Party(
            self.party,
            self._folder,
            *self._overrides,
            *overrides,
            options=options,
            log=self._log,
            fast_clock=fast_clock,
        )

    def kill(self) -> None:
        """End it as a power failure would; also after its end."""
        self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.signal(number)

    def limit_files(self, max_bytes: int) -> None:
        """Let every write beyond this size of a file fail from now on, as on a full disk."""
        self._process.limit_files(max_bytes)

    def hurry(self) -> None:
        """Let its clock go a minute a second from now on."""
        self._process.hurry()

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(HANGS_AFTER_S)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative after a kill; None while it runs."""
        return self._process.exit_code

    @property
    def folder(self) -> Path:
        """The folder of its results."""
        return self._process.results()

    @property
    def is_done(self) -> bool:
        """Whether its results are complete: to start it again would begin another run."""
        if self.exit_code == 0:
            return True
        written = (self.folder / "summary.json").is_file()
        return written and not (self.folder / "checkpoint" / "run.state").exists()

    @property
    def lines(self) -> int:
        """The number of lines in its metrics."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    @property
    def is_saving(self) -> bool:
        """Whether it is writing a checkpoint at this moment."""
        return any((self.folder / "checkpoint").glob(".at-*.tmp"))

    @property
    def said(self) -> str:
        """Its output since its last start."""
        return self._process.output

    @property
    def output(self) -> str:
        """Its complete output."""
        return "\n-- started again\n".join([*self._outputs, self.said])


class Both(NamedTuple):
    """Both parties."""

    active: Restarted
    passive: Restarted

    def start(self, *overrides: str, options: Sequence[str] = (), fast_clock: bool = False) -> None:
        """Start both; ``hurry`` needs a fast clock."""
        for party in self:
            party.start(*overrides, options=options, fast_clock=fast_clock)

    def wait(self) -> tuple[int, int]:
        """Wait for both ends and return the exit codes, the active party's first."""
        return self.active.wait(), self.passive.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something, at most until one of the two ends of itself."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while not condition():
            if any(party.starts and party.exit_code is not None for party in self):
                return
            assert time.monotonic() < deadline, f"hangs\n{self.outputs}"
            time.sleep(0.002)

    @property
    def outputs(self) -> str:
        """The output of both parties, for the message of a failed test."""
        return "\n".join(f"--- {one.party}\n{one.output}" for one in self if one.starts)


Between = Callable[[str], AbstractContextManager[Any]]
"""Puts something before the active party's address; what it gives has an ``address``."""


@contextmanager
def kept_up(
    folder: Path, settings: Settings, log: str = "run", between: Between | None = None
) -> Iterator[Both]:
    """Yield both parties at a free port, not started; one that still runs in the end is killed.

    Args:
        folder: as ``write_example`` leaves it.
        settings: overrides.
        log: what names the files of their output.
        between: what stands between the two.
    """
    there = address = free_address()
    with ExitStack() as stack:
        if between is not None:
            there = stack.enter_context(between(address)).address
        both = Both(
            Restarted("active", folder, address, settings, log),
            Restarted("passive", folder, there, settings, log),
        )
        stack.callback(lambda: [party.kill() for party in both if party.starts])
        yield both


def run_once(
    folder: Path,
    settings: Settings,
    between: Between | None = None,
    trusted: Path | None = None,
) -> Outcome:
    """Write an example, let both parties run to their end, and return what they leave.

    Args:
        folder: gets the example, and the results in ``runs``.
        settings: overrides.
        between: what stands between the two.
        trusted: certificates of both; None for plain text.
    """
    write_example(folder)
    if trusted is not None:
        certificates.use(trusted, folder)
    with kept_up(folder, settings, between=between) as both:
        both.active.start()
        both.wait_until(lambda: "waiting for the passive party" in both.active.said)
        both.passive.start()
        assert both.wait() == (0, 0), both.outputs
    return outcome(folder / "runs")


def wait_for_line(both: Both, line: int) -> None:
    """Wait until the active party has noted so much, and see to it that the run is not over."""
    both.wait_until(lambda: both.active.lines >= line)
    assert [party.exit_code for party in both] == [None, None], both.outputs


def killed_and_resumed(
    folder: Path, settings: Settings, whole: Outcome, struck: Sequence[Sequence[PartyName]]
) -> None:
    """Kill parties of a run one after the other at random steps; compare it with the whole one."""
    generator, lines = random.Random(len(whole.metrics["active"])), len(whole.metrics["active"])
    share = 0.8 / len(struck)
    with kept_up(folder, settings) as both:
        both.start()
        for part, names in enumerate(struck):
            at = 0.1 + share * part + 0.7 * share * generator.random()
            wait_for_line(both, int(lines * at))
            victims = [party for party in both if party.party in names]
            for party in victims:
                party.kill()
            for party in victims:
                party.start()
        assert both.wait() == (0, 0), both.outputs
        for party in both:
            assert ("resuming in epoch" in party.output) == (party.starts > 1), both.outputs
        assert_same(outcome(folder / "runs"), whole, both.outputs)
    assert not list((folder / "runs" / "small").glob("*.previous-*"))

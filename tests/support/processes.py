"""The two parties as real processes: starting, limiting and signalling them, and their results."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeVar

from tests.support.deployed import Deployed
from tests.support.forked import Forked
from tests.support.simulation import free_address
from tests.support.waiting import HANGS_AFTER_S

AT_ONCE = 4
"""Independent things that are done at the same time."""

PartyName = Literal["active", "passive"]
ResultT = TypeVar("ResultT")


class Party:
    """A party as a supervisor keeps it: a process that can be started again, and its results.

    A ``with`` statement kills it in the end.
    """

    def __init__(
        self,
        party: str,
        folder: Path,
        *overrides: str,
        command: Literal["run", "check", "predict", "serve", "align"] = "run",
        options: Sequence[str] = (),
        log: str | None = None,
        fast_clock: bool = False,
        descriptors: int | None = None,
        as_unit: bool = False,
        begin: bool = True,
    ) -> None:
        """Start it.

        ``party`` names its settings file in the folder; every one but ``active`` is a passive
        party. Results go to the subfolder ``runs``, output to ``<party>.<log>.log``. With
        ``fast_clock`` there is ``hurry``; ``as_unit`` puts it under the filters of its systemd
        unit.
        """
        self.party = party
        self.runs = folder / "runs"
        self.starts = 0
        self._kind = "active" if party == "active" else "passive"
        self._log = folder / f"{party}.{log or command}.log"
        self._words = [command, str(folder / f"{party}.yaml"), "--runs", str(self.runs)]
        self._overrides, self._options = overrides, options
        self._fast_clock, self._descriptors = fast_clock, descriptors
        self._unit = Deployed(self._kind).unit if as_unit else None
        self._outputs: list[str] = []
        self._process: Forked
        if begin:
            self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.starts:
            self.kill()

    def start(self, *overrides: str, options: Sequence[str] = (), fast_clock: bool = False) -> None:
        if self.starts:
            self._outputs.append(self.said)
        self.starts += 1
        self._log.write_bytes(b"")
        given = (*self._overrides, *overrides)
        sets = [text for one in given for text in (("--set", one) if one[:2] != "--" else (one,))]
        self._process = Forked(
            f"splitveil.{self._kind}_party",
            [*self._words, *sets, *self._options, *options],
            self._log,
            has_fast_clock=fast_clock or self._fast_clock,
            descriptors=self._descriptors,
            unit=self._unit,
        )

    @property
    def said(self) -> str:
        """Its output since its last start."""
        return self._log.read_text(encoding="utf-8")

    @property
    def output(self) -> str:
        return "\n-- started again\n".join([*self._outputs, self.said])

    def results(self, run_name: str = "small") -> Path:
        return self.runs / run_name / self.party

    @property
    def folder(self) -> Path:
        return self.results()

    @property
    def has_checkpoint(self) -> bool:
        """Whether it has saved its half of the model, encoder and all."""
        folder = self.folder / "checkpoint"
        return all((folder / name).is_file() for name in ("model.safetensors", "encoder.json"))

    @property
    def is_done(self) -> bool:
        """Whether its results are complete: to start it again would begin another run."""
        if self.exit_code == 0:
            return True
        written = (self.folder / "summary.json").is_file()
        return written and not (self.folder / "checkpoint" / "run.state").exists()

    @property
    def lines(self) -> int:
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal that it did not take; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end and return its exit code, negative for a signal that it did not take."""
        return self._process.wait(HANGS_AFTER_S)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def hurry(self) -> None:
        self.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End it as a power failure would; also after its end."""
        self._process.kill()

    def wait_until_says(self, text: str) -> None:
        self.wait_until(lambda: text in self.said, f"{text!r} in its output")

    def wait_until_training(self) -> None:
        """Wait until it has written down some training steps."""
        self.wait_until(lambda: self.lines > 3, "steps in its metrics")

    def wait_until(self, condition: Callable[[], bool], meaning: str) -> None:
        """Wait for something that it is to do before its end."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while not condition():
            ended = self._process.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                raise AssertionError(f"{self.party}: expected {meaning}:\n{self.output}")
            time.sleep(0.02)


class Pair(NamedTuple):
    active: Party
    passive: Party

    def start(self, *overrides: str, options: Sequence[str] = (), fast_clock: bool = False) -> None:
        for party in self:
            party.start(*overrides, options=options, fast_clock=fast_clock)

    def wait(self) -> tuple[int, int]:
        """Wait for both ends and return the exit codes, the active party's first."""
        return self.active.wait(), self.passive.wait()

    def wait_until_training(self) -> None:
        """Wait until both have written down some training steps."""
        for party in self:
            party.wait_until_training()

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


@contextmanager
def started(
    folder: Path,
    *both: str,
    active: Sequence[str] = (),
    passive: Sequence[str] = (),
    options: Sequence[str] = (),
    fast_clock: bool = False,
    as_unit: bool = False,
) -> Iterator[Pair]:
    """Start both parties on a free port; a party that still runs in the end is killed."""
    address = free_address()
    start = partial(Party, options=options, fast_clock=fast_clock, as_unit=as_unit)
    with start("active", folder, f"listen={address}", *both, *active) as active_party:
        own = f"connect={address}", *both, *passive
        with start("passive", folder, *own) as passive_party:
            yield Pair(active_party, passive_party)


def side_by_side(*actions: Callable[[], ResultT]) -> list[ResultT]:
    """Do independent things at the same time: starting a process takes seconds."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [future.result() for future in [pool.submit(action) for action in actions]]

"""Processes of a party that are forked from one that has imported everything.

To import torch, gRPC and the rest takes two seconds of a core, more than a small example trains
for. What comes after that is the program itself: ``main`` with the words of a command line, in a
process of its own, with its own signals, limits, output and exit code. That the same happens from
``python -m`` is for the tests of ``splitveil local``, which starts its parties so.
"""

import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from tests.support import unit_sandbox
from tests.support.programs import ROOT

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(
    # pytest as well: its script is run again, as the main module, in every process.
    ["pytest", "splitveil.active_party.commands.run", "splitveil.passive_party.commands.run"]
)
_lock = threading.Lock()
"""An exit code can be read once, and starting a process looks for those of all others."""


class Forked:
    """One process of a party.

    With a fast clock, SIGUSR1 lets its clock go a minute a second. With the directives of a systemd
    unit, it runs under its filters.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        log: Path,
        *,
        has_fast_clock: bool = False,
        descriptors: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        unit: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        log.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables}
        self._process = server.Process(
            target=_become,
            args=(module, list(words), log, environment, has_fast_clock, descriptors, unit),
        )
        with _lock:
            self._process.start()

    @property
    def pid(self) -> int:
        found = self._process.pid
        assert found is not None
        return found

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal that it did not take; None while it runs."""
        with _lock:
            return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        multiprocessing.connection.wait([self._process.sentinel], timeout_s)
        exit_code = self.poll()
        assert exit_code is not None, f"hangs: process {self.pid}"
        return exit_code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a power failure would, and wait for that; also after its end."""
        self.send_signal(signal.SIGKILL)
        self.wait()


def _become(
    module: str,
    words: list[str],
    log: Path,
    environment: dict[str, str],
    has_fast_clock: bool,
    descriptors: int | None,
    unit: Mapping[str, Sequence[str]] | None,
) -> None:
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    program = import_module(f"{module}.__main__")
    sys.argv = [str(program.__file__), *words]
    if has_fast_clock:
        _let_clock_hurry()
    if unit is not None:
        unit_sandbox.enter(unit)
    program.main()


def _let_clock_hurry() -> None:
    """Let this process's clock advance a minute per second after SIGUSR1.

    So a test can give a party as much patience as the slowest machine needs to come to an event,
    and then let the patience run out in seconds. Only Python's monotonic clock is fast, by which
    the parties measure silence; gRPC has a clock of its own.
    """
    real = time.monotonic
    turned_at: list[float] = []

    def monotonic() -> float:
        now = real()
        return now + 59 * (now - turned_at[0]) if turned_at else now

    signal.signal(signal.SIGUSR1, lambda _number, _frame: turned_at.append(real()))
    time.monotonic = monotonic

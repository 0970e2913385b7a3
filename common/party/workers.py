"""The processes of a party under ``torchrun``: rank 0 is the party, and the others work for it.

Workers take no part in the protocol: they have neither the party's data nor its connection, and
their number is the party's own affair.
"""

import argparse
import logging
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import DenseModel, ModelSettings
from splitveil.common.models.worker import Replica, Worker
from splitveil.common.models.worker_line import WorkerLine
from splitveil.common.party.interruption import Interruption


class Rank(NamedTuple):
    number: int = 0
    size: int = 1  # number of processes, on all machines
    local_rank: int = 0
    local_size: int = 1  # number of processes on this machine
    restarts: int = 0  # how often all of them were started again

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] = os.environ) -> "Rank":
        """Return what ``torchrun`` says; the only process without it. Raises SettingsError."""
        if "RANK" not in variables or "MASTER_ADDR" not in variables:
            return cls()
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "TORCHELASTIC_RESTART_COUNT",
        )
        defaults = cls()
        found = []
        for name, default in zip(names, defaults, strict=True):
            text = variables.get(name, str(default))
            if not text.isdecimal():
                raise SettingsError(f"{name}: expected a whole number, as torchrun sets it")
            found.append(int(text))
        return cls(*found)


ONLY = Rank()  # a process that has no others beside it


_logger = logging.getLogger(__name__)


class Workers(NamedTuple):
    """This process's rank, and at rank 0 the line to the others."""

    rank: Rank = ONLY
    line: WorkerLine | None = None  # None if there are no others


ONE_PROCESS = Workers()


def act(parsed: argparse.Namespace, action: Callable[[argparse.Namespace], None]) -> None:
    size = Rank.of_environment().size
    if size > 1 and parsed.command != "run":
        raise SettingsError(
            f"{parsed.command}: torchrun has started {size} processes, and only run computes in "
            f"several: start it without torchrun"
        )
    action(parsed)


def check_model(settings: ModelSettings, role: str) -> None:
    """Check that several processes can compute a model, as far as its settings tell."""
    if isinstance(settings, DenseModel) and settings.dropout:
        raise SettingsError(
            f"{role}.dropout: expected 0 with several processes, because its random state is that "
            f"of one process; got {settings.dropout}"
        )


@contextmanager
def joined(rank: Rank, interruption: Interruption) -> Iterator[Workers]:
    """Wait for this party's workers, and let them end in the end; only at rank 0.

    A worker that is gone ends this process at once, as if it had been killed, so that the other
    party waits for a restart. Before a signal stops the run, the workers are asked whether they
    live: ``torchrun`` sends the same signal when one of them has died as when a person stops it.
    """
    if rank.size == 1:
        yield ONE_PROCESS
        return
    _logger.info("waiting for this party's other processes (%d in all)", rank.size)
    file = _private_file(rank)
    line = WorkerLine.join(rank.number, rank.size, _end_at_once, rank.restarts, file)
    _logger.info("%d processes compute the batches of this party", rank.size)
    interruption.before_stopping = line.check_all_alive
    try:
        yield Workers(rank, line)
    finally:
        line.close()
        if file is not None:
            file.unlink(missing_ok=True)


def work(rank: Rank, build: Callable[[dict[str, Any]], Replica]) -> None:
    """Compute for rank 0 until it lets this process end, or raise WorkerLost or SettingsError."""
    line = WorkerLine.join(rank.number, rank.size, attempt=rank.restarts, file=_private_file(rank))
    _logger.info("worker %d of %d: process %d", rank.number, rank.size - 1, os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 stops between two batches, with a checkpoint
    Worker(line, build).work()


def check_same_model(given: dict[str, Any], settings: ModelSettings, role: str) -> None:
    if given != settings.model_dump(mode="json"):
        raise SettingsError(
            f"{role}: differs from that of rank 0: give all ranks the same settings"
        )


def _private_file(rank: Rank) -> Path | None:
    """Return the file by which processes on one machine meet, instead of at an open port."""
    if rank.local_size < rank.size:
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    folder = Path(tempfile.gettempdir(), f"splitveil-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if (found.st_uid, found.st_mode) != (os.getuid(), stat.S_IFDIR | 0o700):
        raise SettingsError(f"{folder}: expected a folder of this user alone, with mode 0700")
    # Of these processes: of the same torchrun, for the same party, since the same restart.
    return folder / f"{os.getppid()}-{os.environ['MASTER_PORT']}-{rank.restarts}"


_EXIT_CODE = 1


def _end_at_once(error: Exception) -> NoReturn:
    _logger.error(
        "a worker of this party is gone (%s): ending at once, so that all processes can be started "
        "again",
        str(error).splitlines()[0],
    )
    logging.shutdown()
    os._exit(_EXIT_CODE)

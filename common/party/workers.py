"""The processes of a party under ``torchrun``: rank 0 is the party, and the others work for it.

The others take no part in the protocol: they have features of their rows, no connection, and no
labels, but at the active party gradients from which labels follow; their number is the party's own
affair.
"""

import argparse
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from splitveil.common.errors import SettingsError
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import PartySettings

if TYPE_CHECKING:
    import torch

    from splitveil.common.models.ranks import Ranks

RANKS_FOLDER = "SPLITVEIL_RANKS"
"""Names the folder that the launcher has made for the ranks of this machine alone."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


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
        if RANKS_FOLDER not in variables:
            raise SettingsError(
                "RANK, MASTER_ADDR: start several processes by `python -m splitveil.common.party"
                ".torchrun`: plain torchrun runs code of whoever reaches its port"
            )
        texts = [str(variables.get(*one)) for one in zip(_NAMES, cls(), strict=True)]
        for name, text in zip(_NAMES, texts, strict=True):
            if not text.isdecimal():
                raise SettingsError(f"{name}: expected a whole number from 0, got {text!r}")
        return cls(*map(int, texts))


ONLY = Rank()  # a process that has no others beside it

_logger = logging.getLogger(__name__)


def act(
    parsed: argparse.Namespace, action: Callable[[argparse.Namespace], bool | None]
) -> bool | None:
    """Do what a command does; return what it returns."""
    size = Rank.of_environment().size
    if size > 1 and parsed.command != "run":
        raise SettingsError(
            f"{parsed.command}: torchrun has started {size} processes, and only run computes in "
            f"several: start it without torchrun"
        )
    return action(parsed)


@contextmanager
def joined(
    rank: Rank, device: "torch.device", facts: Mapping[str, Any], interruption: Interruption
) -> "Iterator[Ranks]":
    """Wait for this party's other ranks, and leave them in the end.

    Facts must be equal on all ranks, by the names of their settings. A rank that is
    gone ends rank 0 at once, as if it had been killed, so that the other party waits for a restart.
    Before a signal stops the run, rank 0 asks whether all live: ``torchrun`` sends the same signal
    when one of them has died as when a person stops it. Raises SettingsError if facts differ.
    """
    from splitveil.common.models.ranks import Ranks, raise_lost  # noqa: PLC0415 - they need torch

    _logger.info("waiting for this party's other processes (%d in all)", rank.size)
    file = _private_file(rank)
    on_lost = raise_lost if rank.number else _end_at_once
    ranks = Ranks(rank.number, rank.size, device, on_lost, rank.restarts, file)
    try:
        ranks.compare(facts)
        _logger.info("rank %d of %d: process %d", rank.number, rank.size, os.getpid())
        interruption.before_stopping = ranks.check_all_alive
        for number in (signal.SIGINT, signal.SIGTERM) if rank.number else ():
            signal.signal(number, signal.SIG_IGN)  # rank 0 stops between batches, and saves
        yield ranks
    finally:
        ranks.close()
        if file is not None:
            file.unlink(missing_ok=True)


def facts_of(settings: PartySettings, device: "torch.device", *more: str) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks; ``more`` names settings of this party."""
    import torch  # noqa: PLC0415 - a party without a network needs none

    from splitveil.common.models.device import gpu_of  # noqa: PLC0415

    names = {"contract", "optimizer", "model_seed", "autocast", "compile", "deterministic", *more}
    found = settings.model_dump(mode="json", include=names)
    return found | {"device": gpu_of(device) or device.type, "torch": torch.__version__}


def _private_file(rank: Rank) -> Path | None:
    """Return the file that processes on one machine meet at, instead of an open port."""
    if rank.local_size < rank.size:
        return None
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    return Path(os.environ[RANKS_FOLDER], str(rank.restarts))


def _end_at_once(error: Exception) -> NoReturn:
    _logger.error(
        "a process of this party is gone (%s): ending at once, so that all can be started again",
        str(error).splitlines()[0],
    )
    logging.shutdown()
    os._exit(1)

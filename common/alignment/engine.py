"""Builds the alignment engine that the contract names."""

import os
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.interface import AlignmentEngine
from splitveil.common.alignment.rr22 import Rr22Engine, check_interpreter
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.run.contract import AlignmentSettings, Rr22Alignment
from splitveil.common.settings import Section

_FEW_IDS = 50_000
"""Two cores align so many in about six seconds, which is not worth the memory of workers."""

_FEW_CORES, _MOST_WORKERS = 2, 8


class AlignmentResources(Section):
    """The resources that a party spends on alignment; private."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Number of worker processes; with 0, the party's own process does the work on up to two
    cores."""

    rr22_python: Path | None = None
    """Interpreter that the engine ``rr22`` runs in."""

    @classmethod
    def of(cls, settings: PartySettings, num_ids: int) -> "AlignmentResources":
        """Take the resources from a party's settings.

        Args:
            settings: of the party.
            num_ids: number of the party's ids.
        """
        workers = settings.alignment_workers
        return cls(
            workers=default_workers(num_ids) if workers is None else workers,
            rr22_python=rr22_python_of(settings),
        )


def default_workers(num_ids: int) -> int:
    """Return the number of workers for as many ids of a party, if it does not set one.

    More than two cores need workers, and the threads of the party itself suffice for two.
    """
    cores = len(os.sched_getaffinity(0))
    if num_ids <= _FEW_IDS or cores <= _FEW_CORES:
        return 0
    return min(cores, _MOST_WORKERS)


def rr22_python_of(settings: PartySettings) -> Path | None:
    """Return the path of the interpreter that a party names for the engine ``rr22``."""
    python = settings.alignment_rr22_python
    return None if python is None else settings.base_dir / python


def build_engine(settings: AlignmentSettings, resources: AlignmentResources) -> AlignmentEngine:
    """Build the engine that the contract names, and start its workers.

    Raises:
        SettingsError: the engine cannot be had here.
    """
    if isinstance(settings, Rr22Alignment):
        check_interpreter(resources.rr22_python)
        return Rr22Engine(
            python=resources.rr22_python or Path(),
            min_aligned=settings.min_aligned,
            max_set_size=settings.max_set_size,
        )
    return EcdhEngine(
        min_aligned=settings.min_aligned,
        max_set_size=settings.max_set_size,
        workers=resources.workers,
    )


def engine_of(settings: PartySettings, num_ids: int) -> AlignmentEngine:
    """Build the engine of a party with as many ids; see ``build_engine``."""
    return build_engine(settings.contract.alignment, AlignmentResources.of(settings, num_ids))


def engine_checks(settings: PartySettings) -> list[Callable[[], str]]:
    """Return what ``check`` has to try before an engine is used.

    Each raises SettingsError if the engine cannot be had here.
    """
    if isinstance(settings.contract.alignment, Rr22Alignment):
        python = rr22_python_of(settings)
        return [lambda: f"alignment: rr22, spu {check_interpreter(python)}"]
    return []

"""Builds a party's alignment engine, and opens what it keeps about its exchanges for one run."""

import os
from pathlib import Path

from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.interface import AlignmentEngine
from splitveil.common.alignment.store import ExchangeStores
from splitveil.common.alignment.tried_ids import TriedIds, file_of_count
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.run.contract import AlignmentSettings

_FEW_IDS = 50_000
"""Two cores align so many in about six seconds, which is not worth the memory of workers."""

_FEW_CORES, _MOST_WORKERS = 2, 8


def default_workers(num_ids: int) -> int:
    """Return the number of workers for as many ids of a party, if it does not set one.

    More than two cores need workers, and the threads of the party itself suffice for two.
    """
    cores = len(os.sched_getaffinity(0))
    if num_ids <= _FEW_IDS or cores <= _FEW_CORES:
        return 0
    return min(cores, _MOST_WORKERS)


def build_engine(settings: AlignmentSettings, workers: int = 0) -> AlignmentEngine:
    """Build the engine of a contract, and start its worker processes.

    Without any, the party's own process does the work on up to two cores.
    """
    return EcdhEngine(
        min_aligned=settings.min_aligned, max_set_size=settings.max_set_size, workers=workers
    )


def engine_of(settings: PartySettings, num_ids: int) -> AlignmentEngine:
    """Build the engine of a party with as many ids; see ``build_engine``."""
    workers = settings.alignment_workers
    return build_engine(
        settings.contract.alignment, default_workers(num_ids) if workers is None else workers
    )


def records_of(settings: PartySettings, folder: Path) -> tuple[ExchangeStores, TriedIds]:
    most, attempts = settings.contract.alignment.max_set_size, settings.alignment_attempts
    stores = ExchangeStores(folder, settings.alignment_memory_limit)
    return stores, TriedIds(most, attempts, file_of_count(folder))

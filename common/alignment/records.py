"""What a party keeps about its exchanges of ids for one run."""

from pathlib import Path
from typing import NamedTuple

from splitveil.common.alignment.kept import KeptExchanges
from splitveil.common.alignment.tried_ids import TriedIds, file_of_count
from splitveil.common.party.party_settings import PartySettings


class Records(NamedTuple):
    kept: KeptExchanges
    tried: TriedIds


def records_of(settings: PartySettings, folder: Path) -> Records:
    most, attempts = settings.contract.alignment.max_set_size, settings.alignment_attempts
    kept = KeptExchanges(folder, settings.alignment_memory_limit)
    return Records(kept, TriedIds(most, attempts, file_of_count(folder)))

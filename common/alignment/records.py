"""What a party keeps about its exchanges of ids: for this run, and with a kept key beyond it."""

from pathlib import Path
from typing import NamedTuple

from splitveil.common.alignment.kept import KeptExchanges
from splitveil.common.alignment.known import KeptKeys
from splitveil.common.alignment.tried_ids import TriedIds
from splitveil.common.data.ids import NORMALISATION
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.run.contract import Contract
from splitveil.common.storage.run_folder import claim_private

_IN_USE = "another process uses the keys in it; wait for its end, or name another alignment_keys"


class Records(NamedTuple):
    """The records of one party."""

    kept: KeptExchanges
    tried: TriedIds


def records_of(settings: PartySettings, party: str, folder: Path) -> Records:
    """Open the records of a party, for as long as this process lives.

    Args:
        settings: of the party.
        party: its name in the contract.
        folder: its folder of the run.

    Raises:
        SettingsError: another process uses the keys.
        StorageError: a folder or file cannot be used.
    """
    contract, limit = settings.contract, settings.alignment_memory_limit
    most, attempts = contract.alignment.max_set_size, settings.alignment_attempts
    if not contract.alignment.keep_key:
        kept = KeptExchanges(folder, limit)
        return Records(kept, TriedIds.beside(folder, most, attempts))
    keys = settings.base_dir / settings.alignment_keys / party
    claim_private(keys, _IN_USE)
    kept = KeptExchanges(folder, limit, KeptKeys(keys, contract.identities, _rules(contract)))
    return Records(kept, TriedIds(most, attempts, keys / "tried-ids", outlives_runs=True))


def _rules(contract: Contract) -> bytes:
    rules = [one.model_dump_json() for one in contract.ids]
    return "\n".join([NORMALISATION, *rules]).encode()

"""States the peers for whom the ledger's guarantee does not hold, for reports and plans."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.section import GENERAL_LIMIT

_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)


def limit_of_guarantee(defense: Mapping[str, Any]) -> str:
    """Return a sentence about the limits of a guarantee, empty if it holds for every peer.

    Args:
        defense: the settings of the defense as plain values, as a run's summary keeps them.
    """
    try:
        settings = _SETTINGS.validate_python(defense)
    except ValidationError:  # settings of another version
        return GENERAL_LIMIT
    return settings.guarantee_limit()

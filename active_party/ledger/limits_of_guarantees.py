"""The limits of the ledger's guarantee, in a sentence for reports and plans."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.section import GENERAL_LIMIT

_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)


def limit_of_guarantee(defense: Mapping[str, Any]) -> str:
    """Say for which peers a guarantee does not hold; empty where it holds for every peer.

    Args:
        defense: its settings as plain values, as a run's summary keeps them.
    """
    try:
        settings = _SETTINGS.validate_python(defense)
    except ValidationError:  # of another version
        return GENERAL_LIMIT
    return settings.guarantee_limit()

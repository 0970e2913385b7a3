"""Says whom the charges of a run's defense describe, for reports of its recorded settings."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.coverage import COVERS_CLASS_MEANS, Coverage

_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)


def coverage_of(defense: Mapping[str, Any]) -> Coverage:
    """Return the peers whom the charges of a defense describe.

    Args:
        defense: the settings of the defense as plain values, as a run's summary keeps them.
    """
    try:
        settings = _SETTINGS.validate_python(defense)
    except ValidationError:  # settings of another version
        return COVERS_CLASS_MEANS
    return settings.coverage()

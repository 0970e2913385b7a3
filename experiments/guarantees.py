"""Sets a defense to the strength at which no peer exceeds a leak AUC over the whole run."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseContext, DefenseSettings
from splitveil.active_party.defenses.section import DefenseSection
from splitveil.common.errors import SettingsError
from splitveil.experiments.settings import Settings

_DEFENSE: TypeAdapter[DefenseSection] = TypeAdapter(DefenseSettings)


def at_guarantee(settings: Settings, leak_auc: float) -> Settings:
    """Return the settings of a cell with its defense at that guarantee.

    A section with mistakes is returned unchanged: they are reported with all others of the cell.

    Raises:
        SettingsError: no strength of the defense holds against everybody.
    """
    contract, active = settings["contract"], settings["active"]
    try:
        defense = _DEFENSE.validate_python(active["defense"])
    except ValidationError:
        return settings
    classes = active.get("data", {}).get("classes") or 2
    context = DefenseContext(
        cut_shape=tuple(contract["cut_shape"]),
        num_classes=classes if isinstance(classes, int) else len(classes),
        epochs=contract["epochs"],
    )
    found = defense.at_leak_auc(leak_auc, context)
    if found is None:
        raise SettingsError(
            f"sweep: guarantee: no strength of {defense.title} holds against every peer"
        )
    stated: dict[str, Any] = found.model_dump(mode="json", exclude_unset=True)
    return {**settings, "active": {**active, "defense": {**stated, "name": defense.title}}}

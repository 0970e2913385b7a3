"""The JSON Schemas of the settings files, for editors and for programs that write settings."""

from typing import Any, Literal, TypeAlias

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.run.contract import Contract
from splitveil.common.settings import Section
from splitveil.passive_party.settings import PassiveSettings

File: TypeAlias = Literal["active", "passive", "contract"]

_SECTIONS: dict[str, type[Section]] = {
    "active": ActiveSettings,
    "passive": PassiveSettings,
    "contract": Contract,
}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def settings_schema(file: File | None = None) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of settings files.

    A schema knows types, bounds and names. What depends on several settings at once is checked by
    ``splitveil active check`` and ``splitveil passive check`` alone.

    Args:
        file: ``active``, ``passive`` or ``contract``; by default a mapping of all three.

    Raises:
        ValueError: there is no such kind of file.
    """
    if file is None:
        return {name: _schema(name) for name in _SECTIONS}
    if file not in _SECTIONS:
        raise ValueError(f"expected one of {', '.join(_SECTIONS)}, got {file!r}")
    return _schema(file)


def _schema(file: str) -> dict[str, Any]:
    schema = _SECTIONS[file].model_json_schema()
    schema["properties"].pop("base_dir", None)  # where the file lies is not written in it
    if "contract" in schema["properties"]:
        contract = schema["properties"]["contract"]
        schema["properties"]["contract"] = {
            "description": contract.get("description", ""),
            "anyOf": [{"type": "string"}, {"$ref": contract.get("$ref", "#/$defs/Contract")}],
        }
    del schema["title"]
    return {"$schema": _DRAFT, "title": f"splitveil: {file}.yaml", **schema}

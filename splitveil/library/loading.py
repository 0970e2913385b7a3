"""Finds and loads the settings of parties for a program: examples, folders, tables in memory."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import ACTIVE
from splitveil.deploy.demo import EXAMPLES, names_of_examples
from splitveil.deploy.local import Overrides, party_kinds
from splitveil.library import own_data
from splitveil.passive_party.settings import PassiveSettings
from splitveil.simulation import PartiesSettings


def source_of(
    example: str | Path | None,
    folder: Path,
    active: Any,
    passive: Any,
    **labels: Any,
) -> Path:
    """Return the folder with the parties' settings files.

    Args:
        example: the name of an example of the package, or a folder; None for tables.
        folder: in which settings for tables are written.
        active: the label owner's table.
        passive: the feature owner's table, or those of several.
        labels: ``label``, ``key`` and ``label_range`` of ``own_data.write_settings``.

    Raises:
        SettingsError: there is no such example, or a table cannot be used.
        ValueError: neither an example nor tables are given, or both.
    """
    if (example is None) == (active is None) or (active is None and passive is not None):
        raise ValueError("expected an example, or tables of the parties, and not both")
    if example is None:
        # Earlier runs in the folder still refer to their own tables.
        names = (f"settings-{number}" for number in itertools.count(1))
        source = next(folder / name for name in names if not (folder / name).exists())
        own_data.write_settings(source, active, passive, **labels)
        return source
    is_folder = (Path(example) / "active.yaml").is_file()
    if str(example) in names_of_examples() and not is_folder:
        return EXAMPLES / example
    if not is_folder:
        raise SettingsError(
            f"{example}: expected a folder with active.yaml, or one of "
            f"{', '.join(names_of_examples())}"
        )
    return Path(example)


def load(source: Path, overrides: Overrides) -> PartiesSettings:
    """Load the settings of all parties of a folder.

    Args:
        source: the folder.
        overrides: of each party's settings.

    Raises:
        SettingsError: lists every problem of a party's file and of the contract.
    """
    kinds = party_kinds(source)
    unknown = sorted(overrides.each.keys() - set(kinds))
    if unknown:
        raise SettingsError(f"settings: {source} has no file {', '.join(unknown)}.yaml")
    active = load_party_settings(ActiveSettings, source / "active.yaml", overrides.of(ACTIVE))
    passive = [
        load_party_settings(PassiveSettings, source / f"{kind}.yaml", overrides.of(kind))
        for kind in kinds[1:]
    ]
    return PartiesSettings(active, {one.party: one for one in passive})


def override(name: str, value: object) -> str:
    """Return an override ``dotted.name=yaml`` for a value of plain parts."""
    plain = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6)
    return f"{name}={plain.removesuffix(chr(10)).removesuffix('...').strip()}"


def _plain(value: object) -> object:
    """Return a value that YAML can hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value

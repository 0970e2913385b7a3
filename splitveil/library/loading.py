"""Finds and loads the settings of parties for a program: examples, folders, tables in memory."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitveil.common.errors import SettingsError
from splitveil.deploy import local
from splitveil.deploy.demo import EXAMPLES, names_of_examples
from splitveil.deploy.local import Overrides, party_kinds
from splitveil.library import own_data
from splitveil.simulation import PartiesSettings, read_settings


def source_of(
    example: str | Path | None,
    folder: Path,
    active: Any,
    passive: Any,
    **labels: Any,
) -> Path:
    """Return the folder with the parties' settings files.

    Settings for tables are written into a new folder in ``folder``; ``labels`` are ``label``,
    ``key`` and ``label_range`` of ``own_data.write_settings``.

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

    Raises:
        SettingsError: lists every problem of a party's file and of the contract.
    """
    unknown = sorted(overrides.each.keys() - set(party_kinds(source)))
    if unknown:
        raise SettingsError(f"settings: {source} has no file {', '.join(unknown)}.yaml")
    return read_settings(source, overrides.active, overrides.passive, overrides.each)


def override(name: str, value: object) -> str:
    """Return an override ``dotted.name=yaml`` of mappings, sequences, paths and scalars."""
    return local.override(name, _plain(value))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value

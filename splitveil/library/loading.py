"""Finds, loads and writes settings of parties: examples, folders, tables in memory."""

import itertools
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data import source_settings
from splitveil.common.data.source_settings import not_expanded
from splitveil.common.data.sources import find_files, table_path_of
from splitveil.common.errors import DataError, SettingsError, SplitveilError
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.settings import Mark, Place, Section, below, change_at, marked, without
from splitveil.common.text.imports import HANDED_OVER
from splitveil.common.text.wording import suggest
from splitveil.deploy.demo import EXAMPLES, names_of_examples
from splitveil.deploy.overrides import Overrides, party_kinds
from splitveil.library import own_data
from splitveil.passive_party.settings import PassiveSettings

File: TypeAlias = Literal["active", "passive", "contract"]

_SECTIONS: dict[str, type[Section]] = {
    "active": ActiveSettings,
    "passive": PassiveSettings,
    "contract": Contract,
}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


class PartiesSettings(NamedTuple):
    active: ActiveSettings
    passive: Mapping[str, PassiveSettings]
    """By the name of each passive party in the contract."""


class Scratch:
    """A new folder, deleted when nothing refers to this any longer, or when Python ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="splitveil-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def source_of(
    example: str | Path | None, folder: Path, active: Any, passive: Any, **labels: Any
) -> Path:
    """Return the folder with the parties' settings files.

    Settings for tables are written into a new folder in ``folder``; ``labels`` are ``label``,
    ``key`` and the others of ``own_data.write_settings``.
    """
    if (example is None) == (active is None) or (active is None and passive is not None):
        raise ValueError("expected an example, or tables of the parties, and not both")
    if example is None:
        # Earlier runs in the folder still refer to their own tables.
        names = (f"settings-{number}" for number in itertools.count(1))
        source = next(folder / name for name in names if not (folder / name).exists())
        own_data.write_settings(source, active, passive, **labels)
        for same in sorted(folder.glob("settings-*")):
            if same != source and _texts(same) == _texts(source):  # digests of tables in them
                shutil.rmtree(source)
                return same
        return source
    is_folder = (Path(example) / "active.yaml").is_file()
    if str(example) in names_of_examples() and not is_folder:
        return EXAMPLES / example
    if not is_folder:
        raise SettingsError(
            f"{example}: expected a folder with active.yaml, or one of "
            f"{', '.join(names_of_examples())}{suggest(str(example), names_of_examples())}"
        )
    return Path(example)


@contextmanager
def naming_parties(source: Path) -> Iterator[None]:
    """Let errors name the party where they name a file that `source_of` has written for it.

    With tables in memory, other files are looked for in the current folder.
    """
    folders = "|".join(re.escape(str(one)) for one in (source.absolute(), source))
    file = re.compile(rf"(?:{folders})/([\w.-]+?)(-[0-9a-f]{{16}}\.parquet|\.yaml)")
    try:
        yield
    except SplitveilError as error:
        text = re.sub(f"(?:{folders})/", "", file.sub(r"\1", str(error)))
        error.args = (re.sub(folders, lambda _: str(Path.cwd()), text),)
        raise


def with_paths_from(folder: Path, section: type[Section], values: Any) -> Any:
    """Return plain settings of a section with absolute paths, where they exist in ``folder``."""

    def absolute(value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        whole = os.path.normpath(folder / value)
        return source_settings.not_expanded(whole) if os.path.exists(whole) else value  # noqa: PTH110

    def of_library(value: Any) -> Any:
        return absolute(value) if "/" in str(value) else value

    found = change_at(marked(section, Mark.PATH), values, absolute)
    return change_at(marked(section, Mark.LIBRARY), found, of_library)


def from_here(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make paths relative to the current folder, not to that of files written for tables."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        party, *parts = name.split(".")
        nested = reduce(lambda v, part: {part: v}, parts[::-1], value)
        section = _SECTIONS.get(party, PassiveSettings)
        found[name] = reduce(getitem, parts, with_paths_from(Path.cwd(), section, nested))
    return found


def _texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")}


def load(source: Path, overrides: Overrides) -> PartiesSettings:
    kinds = party_kinds(source)
    if unknown := overrides.without_file(kinds):
        raise SettingsError(f"settings: {source} has no file {', '.join(unknown)}.yaml")
    own = load_party_settings(ActiveSettings, source / "active.yaml", overrides.of(ACTIVE))
    passive = [
        load_party_settings(PassiveSettings, source / f"{kind}.yaml", overrides.of(kind))
        for kind in kinds[1:]
    ]
    return PartiesSettings(own, {settings.party: settings for settings in passive})


def settings_schema(file: File | None = None) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of settings files.

    A schema knows types, bounds and names. What depends on several settings at once is checked by
    ``splitveil check active.yaml`` and ``splitveil check passive.yaml`` alone.

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


def files_of(source: source_settings.Source, base_dir: Path) -> list[Path]:
    """Return the files of this machine that a party's source reads; DataError if there are none."""
    if isinstance(
        source, source_settings.CsvSource | source_settings.ParquetSource
    ) and not getattr(source, "scheme", None):
        return [Path(file.path) for file in find_files(table_path_of(source, base_dir))]
    files = (
        source.files(base_dir)
        if isinstance(source, source_settings.FileSource) and "://" not in source.path
        else []
    )
    if missing := [one for one in files if not one.exists()]:
        raise DataError(f"{missing[0]}: there is no such file")
    return files


def write_settings_of(
    run: Path, base_dir: Path, folder: Path, tables: Mapping[str, str | Path], *, seeds: bool
) -> None:
    """Write contract and settings files that let real parties repeat a simulated run.

    The arguments are those of ``Run.export_settings``, and the run's folder.
    """
    # They import much that reading a run does not need.
    from splitveil.deploy.init.proposal import write_files  # noqa: PLC0415
    from splitveil.deploy.init.tables import read_raw  # noqa: PLC0415

    active = load_party_settings(ActiveSettings, run / ACTIVE / "settings.yaml")
    names = active.contract.passive_parties
    if unknown := sorted(tables.keys() - {ACTIVE, *names}):
        expected = ", ".join([ACTIVE, *names])
        raise SettingsError(f"tables: {', '.join(unknown)}: expected {expected}")
    parties: dict[str, tuple[str, PartySettings]] = {ACTIVE: (ACTIVE, active)}
    for name in names:
        own = run / (name if len(names) > 1 else "passive") / "settings.yaml"
        kind = f"passive_{name}" if len(names) > 1 else "passive"
        parties[name] = kind, load_party_settings(PassiveSettings, own)
    contract = active.contract
    values: dict[str, dict[str, Any]] = {
        "contract.yaml": _chosen(contract.model_dump(mode="json"), contract)
    }
    copied: dict[str, Path] = {}
    for name, (kind, settings) in parties.items():
        full = settings.model_dump(mode="json", exclude={"runs_dir", "contract"})
        left_out = frozenset() if seeds else marked(type(settings), Mark.SEED)
        chosen: Any = without(
            {*left_out, ("adversary", "labels")},  # which stay with their owner
            {"contract": "contract.yaml"} | _chosen(full, settings),
        )
        chosen = with_paths_from(base_dir.absolute(), type(settings), chosen)
        values[f"{kind}.yaml"] = chosen
        source = chosen["data"]["source"]
        if name in tables:
            path = Path(tables[name])
            source = {**read_raw(path, has_header=True, most_rows=1).source}
            source["path"] = not_expanded(str(path.absolute()))
            chosen["data"]["source"] = source
        elif written := _written(name, settings, base_dir, run):
            copied[f"{name}.parquet"] = written
            source["path"] = f"{name}.parquet"
    texts = {
        name: yaml.safe_dump(one, sort_keys=False, allow_unicode=True)
        for name, one in values.items()
    }
    for name, text in texts.items():
        if HANDED_OVER in text:
            raise SettingsError(
                f"{name}: code of this program has no name that another can import: move it into "
                f"a module"
            )
    write_files(folder, texts, force=False)
    for copy, table in copied.items():
        write_bytes_atomically(folder / copy, table.read_bytes())


def _written(party: str, settings: PartySettings, base_dir: Path, run: Path) -> Path | None:
    """Return the file of a table that was in memory; SettingsError if a party's file is gone."""
    source = settings.data.source
    try:
        files = files_of(source, base_dir)
    except DataError as error:
        raise SettingsError(f"{party}: {error}: name the table in tables=") from error
    was_in_memory = base_dir.resolve().is_relative_to(run.parent.resolve())
    return files[0] if was_in_memory and source.kind == "parquet" and files else None


def _chosen(full: dict[str, Any], section: Section) -> dict[str, Any]:
    short = section.model_dump(mode="json", exclude_defaults=True)
    return _reduced(full, short, marked(type(section), Mark.KIND))


def _reduced(
    full: dict[str, Any], short: Mapping[str, Any], kinds: Collection[Place]
) -> dict[str, Any]:
    return {
        name: _reduced(value, short[name], below(kinds, name))
        if isinstance(short.get(name), dict)
        else value
        for name, value in full.items()
        if name in short or (name,) in kinds
    }

"""Writes the contract and the settings files that let real parties repeat a simulated run."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.source_settings import not_expanded
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import Mark, Place, Section, below, marked, without
from splitveil.common.text.imports import HANDED_OVER
from splitveil.deploy.init.proposal import write_files
from splitveil.deploy.init.tables import read_raw
from splitveil.library.loading import files_of, with_paths_from
from splitveil.passive_party.settings import PassiveSettings


def write_settings_of(
    run: Path, base_dir: Path, folder: Path, tables: Mapping[str, str | Path], *, seeds: bool
) -> None:
    """Write the files, with the arguments of ``Run.export_settings`` and the run's folder."""
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
        chosen = values[f"{kind}.yaml"] = _party(settings, base_dir, seeds=seeds)
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


def _party(settings: PartySettings, base_dir: Path, *, seeds: bool) -> Any:
    full = settings.model_dump(mode="json", exclude={"runs_dir", "contract"})
    chosen = {"contract": "contract.yaml"} | _chosen(full, settings)
    left_out = frozenset() if seeds else marked(type(settings), Mark.SEED)
    chosen = without({*left_out, ("adversary", "labels")}, chosen)  # which stay with their owner
    return with_paths_from(base_dir.absolute(), type(settings), chosen)


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

"""What the local launcher says of its runs: the JSON document, and settings that no party has."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.common.record.run_record import read_summary
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import closest_setting


class EndedRun(NamedTuple):
    """A run that has ended and left its summaries."""

    folder: Path
    exit_code: int
    """0, or 5 where a budget or a gate ended it."""

    @property
    def report(self) -> Path:
        return self.folder / ACTIVE / "report.html"


def document(name: str, runs: Mapping[str, EndedRun], comparison: Path | None) -> dict[str, object]:
    """Return what ``--json`` prints: for each run, by title, its folder, report and summaries."""
    return {
        "name": name,
        "runs": [_described(title, run) for title, run in runs.items()],
        "comparison": _existing(comparison),
    }


def _described(title: str, run: EndedRun) -> dict[str, object]:
    folders = sorted(path.parent for path in run.folder.glob("*/summary.json"))
    return {
        "run": run.folder.name,
        "title": title,
        "folder": str(run.folder),
        "exit_code": run.exit_code,
        "report": _existing(run.report),
        "summaries": {folder.name: read_summary(folder).form() for folder in folders},
    }


def _existing(page: Path | None) -> str | None:
    return None if page is None or not page.exists() else str(page)


def refuse_unknown_settings(overrides: Iterable[str]) -> None:
    """Name the overrides that no party has a setting for, in the words of the command line.

    Raises:
        SettingsError: there are some; parties name none, because they know their own settings only.
    """
    problems = []
    for override in overrides:
        owner, _, name = override.partition("=")[0].partition(".")
        first, *inner = name.split(".")
        section = _settings_of(owner)
        if section is None or first in section.model_fields:
            continue
        close = None if inner else closest_setting(section, [first])
        hint = "" if close is None else f"; did you mean {f'{owner}.{close}'!r}?"
        problems.append(f"--set {owner}.{name}: unknown setting{hint}")
    if problems:
        raise SettingsError(problems)


def _settings_of(owner: str) -> Any:
    """Return the class of a party's settings; they import torch, which is slow."""
    if owner == ACTIVE:
        return import_module("splitveil.active_party.settings").ActiveSettings
    if owner.partition("_")[0] == "passive":
        return import_module("splitveil.passive_party.settings").PassiveSettings
    return None

"""Overrides of the settings of all parties of an example, and the defenses of a comparison."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from splitveil.common.errors import SettingsError
from splitveil.common.run.contract import ACTIVE, NAME_CHARACTERS
from splitveil.common.settings import apply_overrides, closest_setting, read_yaml
from splitveil.common.text.wording import slug, suggest
from splitveil.common.text.yaml_text import load_yaml


def party_kinds(example_dir: Path) -> list[str]:
    """Return the names of the parties' files without their ending, the active party's first."""
    passive = sorted(path.stem for path in example_dir.glob("passive_*.yaml"))
    return [ACTIVE, *(passive or ["passive"])]


class Overrides:
    """Overrides ``PARTY.NAME=VALUE`` and ``contract.NAME=VALUE``, later ones over earlier ones."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = [(text.partition(".")[0], text) for text in texts]
        for owner, text in self._texts:
            if owner not in {ACTIVE, "passive", "contract"} and not owner.startswith("passive_"):
                raise SettingsError(
                    f"{text}: expected active.NAME=VALUE, passive.NAME=VALUE or "
                    f"contract.NAME=VALUE{suggest(owner, (ACTIVE, 'passive', 'contract'))}"
                )

    def adding(self, *texts: str) -> "Overrides":
        return Overrides([*self.texts(), *texts])

    def texts(self) -> list[str]:
        return [text for _, text in self._texts]

    def of(self, kind: str) -> list[str]:
        """Return ``NAME=VALUE`` for the party whose file has this name, the contract's included."""
        general = ACTIVE if kind == ACTIVE else "passive"
        chosen = [
            text if owner == "contract" else text.partition(".")[2]
            for owner, text in self._texts
            if owner in {general, "contract"}
        ]
        own = [text.partition(".")[2] for owner, text in self._texts if owner == kind != general]
        return chosen + own

    def owners(self) -> set[str]:
        return {owner for owner, _ in self._texts}

    def without_file(self, kinds: Collection[str]) -> list[str]:
        """Return the names of files of single passive parties that are not among ``kinds``."""
        return sorted(owner for owner in self.owners() - {*kinds} if owner.startswith("passive_"))


def override(name: str, value: object) -> str:
    """Return an override ``dotted.name=yaml`` of mappings, sequences, arrays, paths and scalars.

    SettingsError for anything else.
    """
    try:
        text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6)
    except yaml.representer.RepresenterError as error:
        kind = type(error.args[1]).__name__
        raise SettingsError(f"{name}: expected plain values, got a {kind}") from error
    return f"{name}={text.removesuffix(chr(10)).removesuffix('...').strip()}"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numbers of numpy and torch
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def contract_values(
    example_dir: Path, settings: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the contract that a party's settings name, with the party's overrides of it."""
    contract = read_yaml(example_dir / str(settings.get("contract")))
    own = [text for text in overrides if text.startswith("contract.")]
    values: dict[str, Any] = apply_overrides({"contract": contract}, own)["contract"]
    return values


def refuse_unknown_settings(overrides: Iterable[str]) -> None:
    """Name the overrides that no party has a setting for: a party knows its own settings only."""
    problems = []
    for text in overrides:
        owner, _, name = text.partition("=")[0].partition(".")
        first, *inner = name.split(".")
        # The classes of the settings import torch, which is slow.
        if owner == ACTIVE:
            section = import_module("splitveil.active_party.settings").ActiveSettings
        elif owner.partition("_")[0] == "passive":
            section = import_module("splitveil.passive_party.settings").PassiveSettings
        else:
            continue
        if first in section.model_fields:
            continue
        close = None if inner else closest_setting(section, [first])
        hint = "" if close is None else f"; did you mean {f'{owner}.{close}'!r}?"
        problems.append(f"--set {owner}.{name}: unknown setting{hint}")
    if problems:
        raise SettingsError(problems)


ONE_SHOT = "one_shot"
"""Named in the place of a defense: no gradient, and each row once, from principal components."""


class NamedDefense(NamedTuple):
    title: str
    settings: dict[str, Any]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides for all parties that give a run this defense."""
        own = override("active.defense", self.settings)
        if self.title != ONE_SHOT:
            return (own,)
        return (own, f"contract.exchange={ONE_SHOT}", "passive.bottom_model={kind: pca}")

    def run_name(self, name: str) -> str:
        """Return the name of the run of an example (by its own name) with this defense."""
        whole = f"{name}-{slug(self.title).strip('-')}"
        if len(whole) <= NAME_CHARACTERS:
            return whole
        # Long settings differ in the part that is cut off.
        digest = hashlib.blake2b(f"{name} {self.title}".encode(), digest_size=4).hexdigest()
        return f"{whole[: NAME_CHARACTERS - len(digest) - 1].rstrip('-_.')}-{digest}"


def parse_defense(text: str) -> NamedDefense:
    """Parse a defense: a name, ``name:setting=value,...``, YAML, or `ONE_SHOT`."""
    if text == ONE_SHOT:
        return NamedDefense(ONE_SHOT, {"name": "none"})
    if text.lstrip().startswith("{"):
        settings = load_yaml(text, "--defense")
        if not isinstance(settings, dict) or "name" not in settings:
            raise SettingsError(
                f"--defense {text}: expected a defense's settings, including its name"
            )
    else:
        name, _, rest = text.partition(":")
        settings = apply_overrides({"name": name}, rest.split(",") if rest else [])
    return NamedDefense(" ".join(_title_parts(settings)), settings)


def _title_parts(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _title_parts(value)
        else:
            yield str(value) if name == "name" else override(name, value)

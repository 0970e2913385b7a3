"""Plans the cells of an experiment: one run, with its own settings, per dataset, variant, seed."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseContext, DefenseSettings
from splitveil.active_party.defenses.section import DefenseSection
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.source_settings import FileSource
from splitveil.common.errors import SettingsError
from splitveil.common.run.contract import Contract
from splitveil.common.settings import apply_overrides, read_yaml, validate
from splitveil.common.text.wording import slug, suggest
from splitveil.experiments.settings import (
    GUARANTEE,
    Experiment,
    Overlay,
    Settings,
    Size,
    overlaid,
    rows_of,
)
from splitveil.passive_party.settings import PassiveSettings

RUN_NAME = "run"

FORMAT = 1
"""Part of every cell's digest: increase it when the runner itself changes the result of a run."""

_NONCES_APART = 1000
"""Difference between the nonce seeds of two parties: larger than the number of seeds."""

PREPARED = "${PREPARED}"
"""Placeholder in a path for the folder of prepared tables; digests contain the placeholder, so that
results can be moved."""

EARLIER = "${EARLIER}"
"""Placeholder for the run with whose weights a cell starts; its settings are in the digest."""

_DEFENSE: TypeAdapter[DefenseSection] = TypeAdapter(DefenseSettings)


class Cell(NamedTuple):
    dataset: str
    variant: str
    series: str
    """The variant's name in the experiment's file: the curve this point belongs to."""

    seed: int
    settings: Settings
    prepare: str | None
    after: "Cell | None" = None
    """The cell whose weights it starts with."""

    is_followed: bool = False
    """True if other cells start with its weights."""

    @property
    def name(self) -> str:
        return f"{self.dataset}, {self.variant}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of its files, relative to the experiment's results."""
        row = Path("cells", folder_name(self.dataset), folder_name(self.variant))
        return row / f"seed-{self.seed}"

    @property
    def run_folder(self) -> Path:
        """Folder of the parties' results, relative to the experiment's results."""
        return self.folder / "runs" / RUN_NAME

    @property
    def digest(self) -> str:
        """Digest of its settings and the settings of all cells before it, 16 hexadecimal digits."""
        before = [] if self.after is None else [self.after.digest]
        canonical = json.dumps([FORMAT, self.prepare, self.settings, *before], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class Choice(NamedTuple):
    size: str = "full"
    seeds: int | None = None
    only: tuple[str, ...] = ()
    """Names of datasets, variants and rows; empty for all."""

    device: str = "cpu"
    overrides: tuple[str, ...] = ()
    """``active.NAME=VALUE``, ``passive.NAME=VALUE`` or ``contract.NAME=VALUE``."""


def plan(experiment: Experiment, base_dir: Path, choice: Choice) -> list[Cell]:
    """Return the cells, seed by seed, so that every variant has a figure after the first seed.

    The cells with whose weights a chosen cell starts are chosen as well, and precede it. Paths in
    the experiment's file refer to ``base_dir``.
    """
    if choice.size != "full" and choice.size not in experiment.sizes:
        sizes = ", ".join(experiment.sizes)
        raise SettingsError(f"--size {choice.size}: expected one of full, {sizes}")
    size = experiment.sizes.get(choice.size, Size())
    seeds = choice.seeds or size.seeds or experiment.seeds
    found: list[Cell] = []
    followed = {dataset.after for dataset in experiment.datasets.values()}
    for seed in range(seeds):
        before: dict[tuple[str | None, str], Cell] = {}
        for name, dataset in experiment.datasets.items():
            for row in _rows(experiment, base_dir, choice, size, name, seed):
                after = before.get((dataset.after, row.variant))
                cell = row._replace(after=after, is_followed=name in followed)
                before[name, cell.variant] = cell
                found.append(cell)
    wanted = {cell.folder for cell in found if not choice.only or {*choice.only} & _names(cell)}
    for cell in reversed(found):
        if cell.folder in wanted and cell.after is not None:
            wanted.add(cell.after.folder)
    chosen = [cell for cell in found if cell.folder in wanted]
    known = {name for cell in found for name in _names(cell)}
    unknown = [name for name in choice.only if name not in known]
    if unknown:
        single = sorted(name for name in known if "/" not in name)
        raise SettingsError(
            f"--only: there is no {unknown[0]!r}{suggest(unknown[0], known)} (there are DATASET, "
            f"VARIANT and DATASET/VARIANT of {', '.join(single)})"
        )
    return chosen


def problems(cell: Cell, prepared: Path) -> list[str]:
    """Return the reasons why a cell cannot run, if any: missing files, wrong settings."""
    if cell.after is not None and (found := problems(cell.after, prepared)):
        return found
    settings = with_folders(cell.settings, {PREPARED: prepared})
    try:
        contract = validate(Contract, settings["contract"], "contract")
        active = validate(ActiveSettings, settings["active"] | {"contract": contract}, "active")
        passives = [
            validate(PassiveSettings, values | {"contract": contract}, name)
            for name, values in passive_parties(settings).items()
        ]
        if absent := set(contract.passive_parties) - {passive.party for passive in passives}:
            return [f"passives: expected settings for {', '.join(sorted(absent))}, got none"]
        adversaries = [passive.adversary for passive in passives if passive.adversary is not None]
        labels = [adversary.labels for adversary in adversaries if adversary.labels is not None]
        tables = [active.data, *(passive.data for passive in passives), *labels]
        return list(dict.fromkeys(word for table in tables for word in _missing(table, prepared)))
    except SettingsError as error:
        return list(error.problems)


def passive_parties(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings of each passive party, by the name of its file without the ending.

    If there is more than one, this is also its name in the contract and that of its results folder.
    """
    return settings["passives"] or {"passive": settings["passive"]}


def with_folders(settings: Settings, folders: Mapping[str, Path]) -> Settings:
    """Return the settings with folders in place of ``PREPARED`` and ``EARLIER``."""
    text = json.dumps(settings)
    for name, folder in folders.items():
        text = text.replace(json.dumps(name)[1:-1], json.dumps(str(folder))[1:-1])
    replaced: Settings = json.loads(text)
    return replaced


def folder_name(name: str) -> str:
    return slug(name, keep="_.=+-")


def _rows(
    experiment: Experiment, base_dir: Path, choice: Choice, size: Size, dataset_name: str, seed: int
) -> Iterator[Cell]:
    dataset = experiment.datasets[dataset_name]
    for series, variant in experiment.variants.items():
        for name, swept in rows_of(series, variant).items():
            layers: Sequence[Overlay] = [
                dataset,
                size,
                size.datasets.get(dataset_name, Overlay()),
                variant,
                dataset.variants.get(series, Overlay()),
            ]
            settings = Overlay().parts()
            if dataset.example is not None:
                for part in ("contract", "active", "passive"):
                    settings[part] = read_yaml(base_dir / dataset.example / f"{part}.yaml")
            for layer in layers:
                settings = overlaid(settings, layer.parts())
            guarantee = swept.pop(GUARANTEE, None)
            settings = apply_overrides(settings, [f"{path}={v}" for path, v in swept.items()])
            settings = apply_overrides(settings, choice.overrides)
            if guarantee is not None:
                settings = _at_guarantee(settings, float(guarantee))
            yield Cell(
                dataset_name,
                name,
                series,
                seed,
                _completed(settings, choice, seed, follows=dataset.after is not None),
                dataset.prepare,
            )


def _at_guarantee(settings: Settings, leak_auc: float) -> Settings:
    """Return the settings with the defense at the strength at which no peer exceeds a leak AUC.

    A section with mistakes is returned unchanged: they are reported with all others of the cell.
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


def _completed(settings: Settings, choice: Choice, seed: int, *, follows: bool) -> Settings:
    both = {
        "contract": "contract.yaml",
        "security": {"mode": "insecure"},
        "device": choice.device,
        "model_seed": seed,
    }
    active = {**settings["active"], **both, "insecure_nonce_seed": seed}
    passive = {**settings["passive"], **both, "insecure_nonce_seed": seed + _NONCES_APART}
    passives = {
        name: {
            **overlaid(passive, own),
            "party": name,
            "insecure_nonce_seed": seed + number * _NONCES_APART,
        }
        for number, (name, own) in enumerate(settings["passives"].items(), start=1)
    }
    completed = {
        "contract": {**settings["contract"], "run_name": RUN_NAME},
        "active": active,
        "passive": passive,
        "passives": passives,
    }
    if follows:
        for name, own in {"active": active, **passive_parties(completed)}.items():
            own["initial_weights"] = f"{EARLIER}/{name}/checkpoint"
        # Without ids, a row number means another example in another file.
        if active.get("data", {}).get("id_column"):
            active["earlier_ledgers"] = [active["initial_weights"]]
    return completed


def _names(cell: Cell) -> set[str]:
    rows = {cell.variant, cell.series}
    return {cell.dataset, *rows, *(f"{cell.dataset}/{row}" for row in rows)}


def _missing(table: DataSettings, prepared: Path) -> Iterator[str]:
    if not isinstance(table.source, FileSource):
        return
    path = table.source.resolve(prepared)
    if not path.is_relative_to(prepared) and not path.exists():
        yield f"needs the file {path}"

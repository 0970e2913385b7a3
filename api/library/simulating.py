"""Simulates runs: both parties in this process, with the bits of two processes."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import EndedForGood, SettingsError
from splitveil.common.party import command_line
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.attacks import ATTACKS, SideInformation
from splitveil.common.run.contract import ACTIVE
from splitveil.common.storage.run_folder import claimed, move_aside
from splitveil.deploy.demo import EXAMPLES, names_of_examples
from splitveil.deploy.local import NamedDefense, Overrides, party_kinds
from splitveil.library import own_data
from splitveil.library.choices import (
    AttackChoice,
    DefenseChoice,
    attack_settings,
    named_defense,
    section,
)
from splitveil.library.recorded_run import Run
from splitveil.library.runs import PlannedRun, Runs
from splitveil.library.scratch import Scratch
from splitveil.passive_party.settings import PassiveSettings
from splitveil.simulation import PartiesSettings
from splitveil.simulation.recorded import run_recorded

NONCES_APART = 1_000_000
"""Difference between the nonce seeds of two parties: larger than any number of seeds."""

EVERY_BATCH = {"queue_batches": 1024, "max_cpu_share": None}
"""Audits that leave no batch out: figures do not depend on how fast the machine is."""


def simulate(
    example: str | Path | None = None,
    *,
    active: Any = None,
    passive: Any = None,
    label: str = "label",
    key: str | None = None,
    defense: DefenseChoice | Sequence[DefenseChoice] | None = None,
    attacks: Sequence[AttackChoice] | None = None,
    seeds: int | Sequence[int] = 1,
    settings: Mapping[str, Any] | None = None,
    runs: str | Path | None = None,
) -> Runs:
    """Run both parties in this process, once for each defense and seed.

    A run learns, bit for bit, what two processes with the same settings learn on the CPU, except
    with dropout, whose draws come from one generator here. Its folder has the files of a real run,
    with the settings of each party among them.

    Args:
        example: the name of an example of the package, or a folder with ``contract.yaml``,
            ``active.yaml`` and ``passive.yaml``; this, or ``active`` and ``passive``.
        active: the label owner's table: a data frame, a ``pyarrow.Table``, a mapping of columns, or
            an array (rows, columns).
        passive: the feature owner's table, or a mapping from names of feature owners to tables.
        label: the column of ``active`` with the labels: 0 and 1, or whole numbers from 0.
        key: the column of ids in all tables; without it, row n is the same example everywhere.
        defense: a defense or several: names (``marvell``), names with settings
            (``iso:noise_ratio=2``), mappings, sections of settings, subclasses of
            ``splitveil.defenses.Defense``, or functions of gradients, labels and noise. By default
            that of the example.
        attacks: the attacks to measure: names, or functions of a batch's gradients that return one
            score per row. By default those of the example.
        seeds: the number of seeds from 0, or the seeds themselves. A seed decides batches, split,
            initial weights and noise.
        settings: settings to override, by their dotted names as with ``--set``:
            ``{"contract.epochs": 3, "passive.bottom_model.hidden": [64]}``.
        runs: the folder of all runs. By default they are in a temporary folder, which is deleted
            with the last reference to the result. Tables in memory are written there, too.

    Returns:
        The runs: frames, report, bounds and ledgers.

    Raises:
        SplitveilError: settings or data cannot be used, or a run failed. A run that its budget or a
            gate has ended is a result.
        ValueError: neither an example nor tables are given, or both, or there are no seeds.
    """
    scratch = Scratch() if runs is None else None
    folder = Path(runs) if scratch is None else scratch.path
    source = _source(example, folder, active, passive, label, key)
    base = _base(source, settings or {}, attacks)
    chosen = _chosen(defense) or [_present(source, base)]
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers:
        raise ValueError("seeds: expected at least one")
    done = {}
    for seed in numbers:
        for one in chosen:
            planned = PlannedRun(one.title, seed)
            done[planned] = _run(source, base, one, seed, folder, is_only=len(chosen) == 1)
    return Runs(done, folder, scratch)


def _source(
    example: str | Path | None, folder: Path, active: Any, passive: Any, label: str, key: str | None
) -> Path:
    """Return the folder with the parties' settings files."""
    if (example is None) == (active is None) or (active is None) != (passive is None):
        raise ValueError("expected an example, or the tables active and passive")
    if example is None:
        source = folder / "settings"
        own_data.write_settings(source, active, passive, label=label, key=key)
        return source
    if str(example) in names_of_examples() and not Path(example).is_dir():
        return EXAMPLES / example
    if not (Path(example) / "active.yaml").is_file():
        raise SettingsError(
            f"{example}: expected a folder with active.yaml, or one of "
            f"{', '.join(names_of_examples())}"
        )
    return Path(example)


def _base(
    source: Path, settings: Mapping[str, Any], attacks: Sequence[AttackChoice] | None
) -> Overrides:
    """Return the overrides that all runs share."""
    own = [_override(name, value) for name, value in settings.items()]
    base = Overrides([], []).adding(*own)
    parties = _load(source, base)
    chosen = None if attacks is None else [attack_settings(one) for one in attacks]
    whole: dict[str, Any] = {**EVERY_BATCH} if chosen is None else {**EVERY_BATCH, "attacks": chosen}
    if chosen is not None:
        whole["attacks"] = [one for one in chosen if not _needs_activations(one)]
    if parties.active.leak_monitor is not None and whole.get("attacks", True):
        base = base.adding(*(_override(f"active.leak_monitor.{n}", v) for n, v in whole.items()))
    if all(one.adversary is not None for one in parties.passive.values()):
        whole = whole if chosen is None else {**whole, "attacks": chosen}
        base = base.adding(*(_override(f"passive.adversary.{n}", v) for n, v in whole.items()))
    return base


def _needs_activations(attack: str | Mapping[str, Any]) -> bool:
    if isinstance(attack, str):
        built_in = {str(name): one.needs for name, one in ATTACKS.items()}
        return SideInformation.ACTIVATIONS in built_in.get(attack, ())
    return "activations" in attack.get("needs", ())


def _chosen(defense: DefenseChoice | Sequence[DefenseChoice] | None) -> list[NamedDefense]:
    if defense is None:
        return []
    is_several = isinstance(defense, Sequence) and not isinstance(defense, str)
    chosen = [named_defense(one) for one in (defense if is_several else [defense])]
    titles = [one.title for one in chosen]
    if len(set(titles)) < len(titles):
        raise SettingsError(f"defense: expected each defense once, got {', '.join(titles)}")
    return chosen


def _present(source: Path, base: Overrides) -> NamedDefense:
    """Return the defense that the settings name."""
    return named_defense(_load(source, base).active.defense)


def _run(
    source: Path, base: Overrides, defense: NamedDefense, seed: int, runs: Path, *, is_only: bool
) -> Run:
    name = _load(source, base).active.contract.run_name
    title = f"seed {seed}" if is_only else f"{defense.title} seed {seed}"
    own = NamedDefense(title, defense.settings).run_name(name)
    seeded = dict(defense.settings)
    if "insecure_noise_seed" in type(section(seeded)).model_fields:
        seeded.setdefault("insecure_noise_seed", seed)
    overrides = base.adding(
        _override("contract.run_name", own),
        _override("active.defense", seeded),
        *_of_both(model_seed=seed, runs_dir=str(runs)),
        _override("active.insecure_nonce_seed", seed),
    )
    settings = _load(source, overrides)
    settings = settings._replace(
        passive={
            party: one.model_copy(update={"insecure_nonce_seed": seed + number * NONCES_APART})
            for number, (party, one) in enumerate(settings.passive.items(), start=1)
        }
    )
    folder = runs / own
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with claimed(folder / ACTIVE, "another process writes this run; name another folder in runs"):
        for party in [ACTIVE, *(one.folder_name() for one in settings.passive.values())]:
            if (folder / party).exists():
                move_aside(folder / party)
        with _as_in_a_process_of_its_own(settings.active), suppress(EndedForGood):
            run_recorded(settings, folder)
    return Run(folder)


def _of_both(**values: Any) -> list[str]:
    return [
        _override(f"{party}.{name}", value)
        for name, value in values.items()
        for party in (ACTIVE, "passive")
    ]


def _override(name: str, value: object) -> str:
    plain = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6)
    return f"{name}={plain.removesuffix(chr(10)).removesuffix('...').strip()}"


def _plain(value: object) -> object:
    """Return a value that YAML can hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _load(source: Path, overrides: Overrides) -> PartiesSettings:
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


@contextmanager
def _as_in_a_process_of_its_own(settings: ActiveSettings) -> Iterator[None]:
    """Set what a party's process sets, and restore it for the program that simulates."""
    log = logging.getLogger("splitveil")
    level, path, threads = log.level, sys.path[:], torch.get_num_threads()
    if level == logging.NOTSET:
        log.setLevel(logging.ERROR)  # seeds are insecure between parties; here there are none
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            command_line.prepare(settings)
            yield
    finally:
        log.setLevel(level)
        sys.path[:] = path
        torch.set_num_threads(threads)

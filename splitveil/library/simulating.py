"""Simulates runs: both parties in this process, with the bits of two processes."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Never, Protocol, TypeAlias

from splitveil.common.errors import SettingsError
from splitveil.common.privacy.attacks import ATTACKS, SideInformation
from splitveil.common.record.progress import ProgressBar
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.settings import Section
from splitveil.deploy.overrides import NamedDefense, Overrides, override
from splitveil.library.choices import (
    AttackChoice,
    DefenseChoice,
    attack_settings,
    model_settings,
    named_defense,
    section,
)
from splitveil.library.loading import Scratch, from_here, load, naming_parties, source_of
from splitveil.library.runs import Run, Runs
from splitveil.library.sweeping import TAKEN, Job, Notify, run_here, run_side_by_side

_logger = logging.getLogger(__name__)


class OnEpoch(Protocol):
    def on_epoch(self, run: Run, /) -> object: ...


class OnEnd(Protocol):
    def on_end(self, run: Run, /) -> object: ...


Callback: TypeAlias = Callable[[Run], object] | OnEpoch | OnEnd

EVERY_BATCH: Mapping[str, Any] = {"max_cpu_share": None}
"""Audits that leave no batch out: figures do not depend on how fast the machine is."""


def simulate(
    example: str | Path | None = None,
    *others: Never,
    active: Any = None,
    passive: Any = None,
    label: str = "label",
    key: str | None = "",
    label_range: tuple[float, float] | None = None,
    positive_label: str | float | Sequence[str | float] | None = None,
    defense: DefenseChoice | Iterable[DefenseChoice] | None = None,
    attacks: AttackChoice | Iterable[AttackChoice] | None = None,
    seeds: int | Sequence[int] = 1,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    jobs: int = 1,
    runs: str | Path | None = None,
    callbacks: Callback | Iterable[Callback] = (),
    progress: bool = True,
    **unknown: Never,
) -> Runs:
    """Run both parties in this process, once for each defense and seed.

    A run learns, bit for bit, what two processes with the same settings learn on the CPU, except
    with dropout, whose draws come from one generator here. Its folder has the files of a real run,
    including the settings of each party.

    Args:
        example: the name of an example of the package, or a folder with ``contract.yaml``,
            ``active.yaml`` and ``passive.yaml``; this, or ``active`` and ``passive``.
        active: the label owner's table: a data frame, a ``pyarrow.Table``, a mapping of columns, or
            an array (rows, columns).
        passive: the feature owner's table, or a mapping from names of feature owners to tables.
        label: the column of ``active`` with the labels: 0 and 1, whole numbers from 0, texts, or
            numbers within ``label_range``.
        key: the column or index of ids that all tables have. Without it, data frames are joined by
            an index of unique ids that has one name or holds texts in all of them; otherwise row n
            is the same example everywhere, and tables of different lengths or row labels are
            refused. With None, row n is the same example whatever the row labels are, and rows
            that only a longer table has are left out.
        label_range: the least and the most that a label can be, if labels are numbers and the model
            predicts a number; None for classes.
        positive_label: the text or texts of ``label`` that stand for 1; all others stand for 0. By
            default words for yes, and each of three or more texts is a class.
        defense: a defense or several: names (``marvell``), names with settings
            (``marvell:power_ratio=8``), mappings, sections of settings, subclasses of
            ``splitveil.defenses.Defense``, or functions of gradients, labels and noise; or
            ``one_shot``, a run without gradients. By default the example's.
        attacks: the attack or attacks to measure: names, or functions of a batch's gradients that
            return one score per row. By default the example's.
        seeds: the number of seeds from 0, or the seeds themselves. A seed decides batches, split,
            initial weights and noise.
        settings: settings to override, by their dotted names as with ``--set``:
            ``{"contract.epochs": 3, "passive.bottom_model.hidden": [64]}``. A model may be a
            subclass of ``torch.nn.Module``, a function of `FeatureShapes` that returns a module, or
            a module; every run trains a copy of it. With tables in memory, paths are relative to
            the current folder.
        threads: the number of cores to compute on; by default the settings' number, or all. With
            small models, one core is often as fast as all; with several jobs, each has one.
        jobs: the number of runs side by side, each in a process of its own.
        runs: the folder of all runs. By default they are in a temporary folder, which is deleted
            with the last reference to the result. Tables in memory are written there, too. A
            finished run with the same settings and tables is reused, which is logged, so that the
            same call continues an interrupted one. A run with custom code (a model, defense or
            attack) or with a file that has changed since runs again.
        callbacks: objects with ``on_epoch(run)``, called after every epoch with the run so far, or
            ``on_end(run)``, called with a run that has ended, or both; a function is an
            ``on_epoch``. A run waits for them; what one raises ends its run and the simulation, and
            reaches the caller. They are not called for a run that is reused.
        progress: whether a terminal or a notebook shows a bar, of the runs if there are several,
            and of the epochs otherwise.

    Returns:
        The runs: frames, report, bounds and ledgers.

    Raises:
        SplitveilError: settings or data cannot be used, or a run failed. A run that its budget
            has ended is a result.
        ValueError: neither an example nor tables are given, or both, or seeds or jobs are none.
    """
    _check_given(example, others, label, settings, unknown)
    if (active is None) != (passive is None):
        raise ValueError("expected the tables of both parties, active and passive")
    if jobs < 1:
        raise ValueError("jobs: expected at least one")
    scratch: Scratch | None = None
    if runs is None:
        scratch = Scratch()
        runs = scratch.path
    folder = Path(runs)
    labels = {"label_range": label_range, "positive_label": positive_label}
    source = source_of(example, folder, active, passive, label=label, key=key, **labels)
    given = dict(settings or {})
    if threads is not None:
        given |= {f"{party}.torch_threads": threads for party in (ACTIVE, "passive")}
    elif jobs > 1:
        given = {f"{party}.torch_threads": 1 for party in (ACTIVE, "passive")} | given
    if example is None:
        given = from_here(given)
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers or min(numbers) < 0:
        raise ValueError("seeds: expected at least one, and none below 0")

    def run_of(job: Job) -> Run:
        return Run(job.folder, owner=scratch, base_dir=source)

    with naming_parties(source) if example is None else nullcontext():
        chosen = _chosen(defense)
        base = _base(source, given, attacks, chosen)
        chosen = chosen or [named_defense(load(source, base).active.defense)]
        planned = {
            (one.title, seed): _job(source, base, one, seed, folder, is_only=len(chosen) == 1)
            for seed in numbers
            for one in chosen
        }
        bar = ProgressBar("simulating", "runs", len(planned), shows=progress)
        notify = _notifier(_several(callbacks), run_of, bar)
        # The bar of a single run shows its epochs.
        with bar if len(planned) > 1 or not progress else nullcontext():
            if jobs > 1:
                run_side_by_side([*planned.values()], jobs, notify)
            else:
                run_here([*planned.values()], notify)
    return Runs({key: run_of(job) for key, job in planned.items()}, folder)


def _check_given(
    example: object, others: object, label: object, settings: object, unknown: Mapping[str, object]
) -> None:
    """Raise TypeError, with what is meant, for the arguments that people try first."""
    if others or not (example is None or isinstance(example, str | Path)):
        raise TypeError("tables have names: simulate(active=..., passive=..., label='column')")
    if not isinstance(label, str):
        raise TypeError("label: expected the name of a column of active, which has the labels")
    if not (settings is None or isinstance(settings, Mapping)):
        raise TypeError("settings: expected a mapping, such as {'contract.epochs': 3}")
    for name in unknown:
        owners = ["contract"] if name in Contract.model_fields else ["active", "passive"]
        ways = " or ".join(f"settings={{'{owner}.{name}': ...}}" for owner in owners)
        raise TypeError(f"simulate has no argument {name!r}; a setting of that name: {ways}")


def _several(given: Any) -> list[Any]:
    is_iterable = isinstance(given, Iterable) and not isinstance(given, str | Mapping | Section)
    is_one = callable(given) or hasattr(given, "on_epoch") or hasattr(given, "on_end")
    return [*given] if is_iterable and not is_one else [given]


def _notifier(
    callbacks: Sequence[Callback], run_of: Callable[[Job], Run], bar: ProgressBar
) -> Notify:
    handlers: dict[str, list[Callable[[Run], object]]] = {"on_epoch": [], "on_end": []}
    for one in callbacks:
        own = {event: getattr(one, event) for event in handlers if hasattr(one, event)}
        if not own and not callable(one):
            raise ValueError("callbacks: expected functions, or objects with on_epoch or on_end")
        for event, handler in (own or {"on_epoch": one}).items():
            handlers[event].append(handler)

    def notify(event: str, job: Job) -> None:
        if event == TAKEN:
            name = Path(job.folder).name
            _logger.warning("%s: taken from an earlier call: not run again", name)
        for handler in handlers.get(event, ()):
            handler(run_of(job))
        if event != "on_epoch":
            bar.advance()

    return notify


def _base(
    source: Path,
    settings: Mapping[str, Any],
    attacks: AttackChoice | Iterable[AttackChoice] | None,
    defenses: Sequence[NamedDefense],
) -> Overrides:
    base = Overrides(override(name, model_settings(value)) for name, value in settings.items())
    # The example's own defense may not fit to the settings.
    parties = load(source, base.adding(*(defenses[0].overrides if defenses else ())))
    chosen = None if attacks is None else [attack_settings(one) for one in _several(attacks)]
    if parties.active.leak_monitor is not None or chosen:
        of_activations = {
            str(name) for name, one in ATTACKS.items() if SideInformation.ACTIVATIONS in one.needs
        }
        of_gradients = [
            one
            for one in chosen or []
            if (
                one not in of_activations
                if isinstance(one, str)
                else "activations" not in one.get("needs", ())
            )
        ]
        base = base.adding(*_audits("active.leak_monitor", chosen and of_gradients))
    if all(one.adversary is not None for one in parties.passive.values()):
        base = base.adding(*_audits("passive.adversary", chosen))
    return base


def _audits(place: str, attacks: Sequence[str | Mapping[str, Any]] | None) -> list[str]:
    if attacks is not None and not attacks:
        return [f"{place}=null"]
    values = EVERY_BATCH if attacks is None else {**EVERY_BATCH, "attacks": attacks}
    return [override(f"{place}.{name}", value) for name, value in values.items()]


def _chosen(defense: DefenseChoice | Iterable[DefenseChoice] | None) -> list[NamedDefense]:
    if defense is None:
        return []
    chosen = [named_defense(one) for one in _several(defense)]
    titles = [one.title for one in chosen]
    if len(set(titles)) < len(titles):
        raise SettingsError(f"defense: expected each defense once, got {', '.join(titles)}")
    return chosen


def _job(
    source: Path, base: Overrides, defense: NamedDefense, seed: int, runs: Path, *, is_only: bool
) -> Job:
    name = load(source, base.adding(*defense.overrides)).active.contract.run_name
    title = f"seed {seed}" if is_only else f"{defense.title} seed {seed}"
    own = NamedDefense(title, defense.settings).run_name(name)
    seeded = dict(defense.settings)
    if "insecure_noise_seed" in type(section(seeded)).model_fields:
        seeded.setdefault("insecure_noise_seed", seed)
    overrides = base.adding(
        override("contract.run_name", own),
        *defense._replace(settings=seeded).overrides,
        *(override(f"{party}.model_seed", seed) for party in (ACTIVE, "passive")),
        *(override(f"{party}.runs_dir", runs) for party in (ACTIVE, "passive")),
        override("active.insecure_nonce_seed", seed),
    )
    return Job(str(source), overrides.texts(), seed, str(runs / own))

"""What a run's folder holds, read for a report: settings, summary and metrics of both parties.

A run that was killed has no summary, and perhaps half a last line; a party that keeps its files to
itself has no folder here. What is absent is empty, never an error, except the active party's
metrics, without which there is nothing to report.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.errors import SettingsError
from splitveil.common.text.yaml_text import RESOLVED, load_yaml

Line = Mapping[str, Any]
"""One line of ``metrics.jsonl``."""
Numbers = npt.NDArray[np.float64]

_ACTIVE, _ALONE = "active", "passive"
"""Folders of the active party, and of a passive party that is the only one."""

_LEAK_SUFFIX = "_leak_auc"
_ACCUMULATED = "accumulated_"


class PartyFiles(NamedTuple):
    """What one party wrote down."""

    name: str
    """``active``, ``passive`` or, of several passive parties, one's name in the contract."""
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: Mapping[str, list[Line]]
    """Kind -> its lines, in the order written."""

    def layer(self, name: str) -> str:
        """Return what a layer of this party is called beside other parties' layers."""
        return name if self.name in {_ACTIVE, _ALONE} else f"{self.name}: {name}"


class RunFiles(NamedTuple):
    """What a report is made of."""

    folder: Path
    name: str
    active: PartyFiles
    passives: tuple[PartyFiles, ...]
    """Without those whose files are not there, or are of another run."""

    @property
    def parties(self) -> tuple[PartyFiles, ...]:
        """All of which there are files, the active party first."""
        return self.active, *self.passives


class LeakSeries(NamedTuple):
    """One attack on one layer, batch by batch."""

    party: str
    """Who measured it."""
    layer: str
    attack: str
    epochs: Numbers
    steps: Numbers
    """Counted through all epochs, from 0."""
    leak: Numbers
    random: Numbers
    """The leak AUC of random scores on the same batches."""


class ClassHistogram(NamedTuple):
    """Counts of one batch's gradients by one figure, class by class and before and after."""

    figure: str
    epoch: int
    step: int
    """Counted through all epochs, from 0."""
    edges: Numbers
    counts: Mapping[str, Numbers]
    """``<before|after>/<negative|positive>`` -> examples in each bin."""


class Noted(NamedTuple):
    """One thing that happened to one attack on one layer: an alarm, a finding, a reply."""

    epoch: int
    step: int | None
    layer: str
    attack: str
    leak_auc: float
    numbers: Mapping[str, float]
    """What else the line says."""


def read_run(run_dir: Path) -> RunFiles:
    """Read a run.

    Args:
        run_dir: ``runs/<run name>``, or the active party's folder in it.

    Raises:
        SettingsError: there are no metrics of an active party, or a file cannot be read.
    """
    folder = run_dir if (run_dir / "active").is_dir() else run_dir.resolve().parent
    if run_dir != folder and run_dir.resolve().name != "active":
        folder = run_dir
    if not (folder / "active" / "metrics.jsonl").is_file():
        raise SettingsError(f"{run_dir}: expected a run's folder, with active/metrics.jsonl in it")
    active = _read_party(folder / _ACTIVE)
    contract = _mapping(active.settings.get("contract"))
    passives = tuple(_read_passives(folder, contract, active))
    name = contract.get("run_name")
    return RunFiles(folder, str(name or folder.resolve().name), active, passives)


def leak_series(run: RunFiles) -> list[LeakSeries]:
    """Return what every attack measured, the cut layer first.

    The active party's figures where it has some, whose oracle attacks know a clean gradient; at
    earlier layers the passive party's, who alone sees those. Of several passive parties each one's
    cut layer counts, too: it is another than the joint one.
    """
    series = list(_series_of(run.active, steps_per_epoch_of(run)))
    seen = {one.layer for one in series}
    series += [one for one in adversary_series(run) if one.layer not in seen]
    return sorted(series, key=lambda one: one.layer != "cut")


def adversary_series(run: RunFiles) -> list[LeakSeries]:
    """Return what the passive parties' adversaries measured, each one's cut layer first."""
    return [
        one
        for party in run.passives
        for one in sorted(
            _series_of(party, steps_per_epoch_of(run)),
            key=lambda one: one.layer != party.layer("cut"),
        )
    ]


def class_histograms(run: RunFiles) -> list[ClassHistogram]:
    """Return the counts of gradients by class, in the order of their steps."""
    steps_per_epoch = steps_per_epoch_of(run)
    found = [
        ClassHistogram(
            str(line["figure"]),
            int(line["epoch"]),
            int(line["epoch"]) * steps_per_epoch + int(line["step"]),
            np.array(line["edges"], dtype=np.float64),
            {name: np.array(counts, dtype=np.float64) for name, counts in line["counts"].items()},
        )
        for line in run.active.metrics.get("histogram", [])
    ]
    # A run that was taken up again may have counted a batch twice, and to the same counts.
    by_place = {(one.step, one.figure): one for one in found}
    return sorted(by_place.values(), key=lambda one: one.step)


def noted(run: RunFiles, kind: str) -> list[Noted]:
    """Return what the active party wrote of one kind: ``audit``, ``leak_gate``, ``leak_alarm``."""
    found = []
    for line in run.active.metrics.get(kind, []):
        numbers = {name: _number(value) for name, value in line.items()}
        for name in line:
            layer, slash, attack = name.rpartition("/")
            if slash:
                place = (int(line["epoch"]), line.get("step"))
                found.append(Noted(*place, layer, attack, numbers[name], numbers))
    return found


def accumulated_series(run: RunFiles) -> dict[tuple[str, str], tuple[Numbers, Numbers]]:
    """Return (layer, attack) -> epochs, leak AUC of all gradients up to the end of each."""
    found: dict[tuple[str, str], tuple[Numbers, Numbers]] = {}
    for party in run.parties:
        lines = party.metrics.get("epoch_leak", [])
        for name in dict.fromkeys(name for line in lines for name in line):
            layer, slash, attack = name.rpartition("/")
            if slash and attack.startswith(_ACCUMULATED):
                place = party.layer(layer), attack
                found.setdefault(place, (column(lines, "epoch"), column(lines, name)))
    return found


def num_classes(run: RunFiles) -> int:
    """Return how many classes a run has; 2 where it declares none."""
    declared = (run.active.settings.get("data") or {}).get("classes")
    if isinstance(declared, int):
        return declared
    return len(declared) if isinstance(declared, list) else 2


def steps_per_epoch_of(run: RunFiles) -> int:
    """Return how many steps the longest epoch had."""
    lines = run.active.metrics.get("train", []) + run.active.metrics.get("leak", [])
    return max((int(line["step"]) + 1 for line in lines), default=1)


def column(lines: list[Line], name: str) -> Numbers:
    """Return one number of every line, NaN where it is absent."""
    return np.array([_number(line.get(name)) for line in lines], dtype=np.float64)


def _series_of(party: PartyFiles, steps_per_epoch: int) -> Iterator[LeakSeries]:
    lines = party.metrics.get("leak", [])
    names = dict.fromkeys(
        name for line in lines for name in line if name.endswith(_LEAK_SUFFIX) and "/" in name
    )
    epochs, random = column(lines, "epoch"), column(lines, "random_leak_auc")
    steps = epochs * steps_per_epoch + column(lines, "step")
    for name in names:
        layer, _, attack = name.removesuffix(_LEAK_SUFFIX).rpartition("/")
        leak = column(lines, name)
        kept = ~(np.isnan(leak) | np.isnan(steps))
        if kept.any():
            yield LeakSeries(
                party.name,
                party.layer(layer),
                attack,
                epochs[kept],
                steps[kept],
                leak[kept],
                random[kept],
            )


def _read_passives(
    folder: Path, contract: Mapping[str, Any], active: PartyFiles
) -> Iterator[PartyFiles]:
    declared = contract.get("passive_parties") or []
    for name in map(str, declared) if len(declared) > 1 else (_ALONE,):
        # Its summary comes last: without one the party still runs, or did not end.
        if name != Path(name).name or not (folder / name / "summary.json").is_file():
            continue
        passive = _read_party(folder / name)
        if all(
            passive.summary.get(shared) == active.summary.get(shared)
            for shared in ("aligned_rows", "steps")
        ):
            yield passive


def _read_party(folder: Path) -> PartyFiles:
    path = folder / "settings.yaml"
    settings = _mapping(load_yaml(_text(path) or "{}", str(path), RESOLVED))
    summary = _json(folder / "summary.json")
    metrics: dict[str, list[Line]] = {}
    for line in _lines(_text(folder / "metrics.jsonl")):
        metrics.setdefault(str(line.get("kind")), []).append(line)
    ahead = _json(folder / "ledger_ahead.json")
    if ahead:
        metrics["ledger_ahead"] = [ahead]
    return PartyFiles(folder.name, settings, summary, metrics)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(_text(path) or "{}"))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid JSON") from error


def _lines(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        try:
            yield _mapping(json.loads(line))
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed, or is being written


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:  # a passive party's own file may hold a number of any length
        return float("nan")

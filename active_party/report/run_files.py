"""The files of a run, read for a report: settings, summary and metrics of all its parties.

A killed run does not have a summary, and its last line may be cut off; a party that keeps its files
private does not have a folder here. Missing files are read as empty and never cause an error,
except the active party's metrics, which every report needs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.data.settings import ONE_NUMBER
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record import run_record
from splitveil.common.record.assessment import LeakAssessment, assess_figures, bounds_by_peers
from splitveil.common.record.run_record import (
    EvaluationLine,
    LeakLine,
    LedgerLine,
    Summary,
    TrainingLine,
)
from splitveil.common.text.files import why_unreadable
from splitveil.common.text.yaml_text import RESOLVED, load_yaml

Numbers = npt.NDArray[np.float64]

_ACTIVE, _ALONE = "active", "passive"


class PartyFiles(NamedTuple):
    folder: Path
    name: str
    settings: Mapping[str, Any]
    summary: Summary  # empty if the run has not ended
    has_ended: bool
    metrics: run_record.Metrics
    ledger_ahead: LeakBounds | None = None  # on answers after the point resumed from

    def setting(self, *path: str) -> Any:
        """Return a setting by the names of its sections and its own; None if it is not there."""
        value: Any = self.settings
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def disclosure(self) -> tuple[float, float | None] | None:
        """What its columns give away, 0 to 1, as a passive party has measured it.

        The mean over columns, and that of the most exposed one.
        """
        path = self.folder / "exposure.json"
        found = _mapping(load_yaml(run_record.text_of(path) or "{}", str(path), RESOLVED))
        value, most = found.get("disclosure"), found.get("strongest_disclosure")
        most = most if isinstance(most, float) else None
        return (value, most) if isinstance(value, float) else None

    def layer(self, name: str) -> str:
        return name if self.name in {_ACTIVE, _ALONE} else f"{self.name}: {name}"


class RunFiles(NamedTuple):
    folder: Path
    name: str
    active: PartyFiles
    passives: tuple[PartyFiles, ...]  # whose files are there, and belong to this run

    def with_target(self, leak_auc: float) -> "RunFiles":
        settings = dict(self.active.settings)
        settings["report"] = {**(settings.get("report") or {}), "target_leak_auc": leak_auc}
        return self._replace(active=self.active._replace(settings=settings))

    @property
    def parties(self) -> tuple[PartyFiles, ...]:
        return self.active, *self.passives

    @property
    def num_classes(self) -> int:
        """The number of classes, ``ONE_NUMBER`` for numbers; 2 if not declared."""
        if self.active.setting("data", "label_range"):
            return ONE_NUMBER
        declared = self.active.setting("data", "classes")
        if isinstance(declared, int):
            return declared
        return len(declared) if isinstance(declared, list) else 2

    @property
    def label(self) -> str:
        """The label that counts as positive, as ``churned: yes``; empty if not declared."""
        column = self.active.setting("data", "label_column")
        value = self.active.setting("data", "positive_label")
        return "" if column is None else f"{column}: {1 if value is None else value}"

    @property
    def defense(self) -> str:
        return str(self.active.setting("defense", "name") or "unknown")

    @property
    def is_one_shot(self) -> bool:
        return bool(self.active.setting("contract", "exchange") == "one_shot")

    @property
    def ledger(self) -> LeakBounds | None:
        """The ledger's last entry, or the bounds of a run abandoned after it went back."""
        if self.active.summary.of_active.ledger is not None:
            return self.active.summary.of_active.ledger
        entries = [line.bounds for line in self.active.metrics.of(LedgerLine)[-1:]]
        if self.active.ledger_ahead is not None:
            entries.append(self.active.ledger_ahead)
        return max(entries, key=lambda bounds: bounds.sum_kl.max, default=None)

    @property
    def guarantee(self) -> float:
        """The bound for anybody on the leak AUC of the most exposed example; NaN without one."""
        return bounds_by_peers(self.ledger).get(Adversary.ANYBODY, math.nan)

    @property
    def assessment(self) -> LeakAssessment:
        """What its attacks reveal, judged by the ledger's last entry if it has no summary."""
        leak = self.active.summary.of_leak
        return replace(
            assess_figures(leak.beyond, self.ledger, self.active.setting("defense") or {}),
            has_gradients=not self.is_one_shot,
            is_computational=self.active.setting("contract", "release") == "noisy_sums",
            explained=leak.strongest_of_numbers,
        )


class LeakSeries(NamedTuple):
    party: str
    layer: str
    attack: str
    epochs: Numbers
    steps: Numbers  # counted through all epochs, from 0
    leak: Numbers
    random: Numbers  # the leak AUC of random scores on the same batches


def read_run(run_dir: Path) -> RunFiles:
    """Read a run: ``runs/<run name>``, or the active party's folder in it; or SettingsError."""
    folder = run_dir if (run_dir / _ACTIVE).is_dir() else run_dir.resolve().parent
    if run_dir != folder and run_dir.resolve().name != _ACTIVE:
        folder = run_dir
    if not (folder / _ACTIVE / run_record.METRICS).is_file():
        gone = "" if run_dir.exists() else f": {why_unreadable(run_dir, FileNotFoundError())}"
        expected = f"expected a run's folder, with active/{run_record.METRICS} in it"
        raise SettingsError(f"{run_dir}: {expected}{gone}")
    active = _read_party(folder / _ACTIVE)
    contract = _mapping(active.settings.get("contract"))
    passives = tuple(_read_passives(folder, contract, active))
    name = contract.get("run_name")
    return RunFiles(folder, str(name or folder.resolve().name), active, passives)


def leak_series(run: RunFiles) -> list[LeakSeries]:
    """Return the measurements of every attack, the cut layer first.

    The active party's measurements come first, if it has any, because its oracle attacks know a
    clean gradient; at earlier layers, which only the passive party sees, they are the passive
    party's. With several passive parties, each party's own cut layer counts, too, because it is not
    the joint one.
    """
    series = list(_series_of(run.active, steps_per_epoch_of(run)))
    seen = {one.layer for one in series}
    for party in run.passives:
        of_party = list(_series_of(party, steps_per_epoch_of(run)))
        of_party.sort(key=lambda one: one.layer != party.layer("cut"))
        series += [one for one in of_party if one.layer not in seen]
    return sorted(series, key=lambda one: one.layer != "cut")


def test_lines(run: RunFiles) -> list[EvaluationLine]:
    """Return the evaluations of the test rows, one per epoch."""
    return [line for line in run.active.metrics.of(EvaluationLine) if line.split == "test"]


def undefended_beside(run: RunFiles) -> Iterator[Path]:
    """Yield the active party's folder of each run beside this one that has no defense."""
    for folder in sorted(run.folder.resolve().parent.glob("*/active")):
        settings = _settings_of(folder)
        names = settings.get("defense"), settings.get("contract")
        defense, contract = map(_mapping, names)
        is_undefended = defense.get("name") == "none" and contract.get("exchange") != "one_shot"
        if is_undefended and folder != run.active.folder.resolve():
            yield folder


def steps_per_epoch_of(run: RunFiles) -> int:
    metrics = run.active.metrics
    steps = [line.step for line in metrics.of(TrainingLine)]
    steps += [line.step for line in metrics.of(LeakLine)]
    return max(steps, default=0) + 1


def column(values: Iterable[float | None]) -> Numbers:
    """Return numbers as an array, with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _series_of(party: PartyFiles, steps_per_epoch: int) -> Iterator[LeakSeries]:
    lines = party.metrics.of(LeakLine)
    epochs, random = column(line.epoch for line in lines), column(line.random for line in lines)
    steps = epochs * steps_per_epoch + column(line.step for line in lines)
    by_attack: dict[tuple[str, str], Numbers] = {}
    for row, line in enumerate(lines):
        for layer, attack, leak_auc in line.figures:
            if (layer, attack) not in by_attack:
                by_attack[layer, attack] = np.full(len(lines), np.nan)
            if leak_auc is not None:
                by_attack[layer, attack][row] = leak_auc
    for (layer, attack), leak in by_attack.items():
        measured = ~np.isnan(leak)
        if measured.any():
            yield LeakSeries(
                party.name,
                party.layer(layer),
                attack,
                epochs[measured],
                steps[measured],
                leak[measured],
                random[measured],
            )


def _read_passives(
    folder: Path, contract: Mapping[str, Any], active: PartyFiles
) -> Iterator[PartyFiles]:
    declared = contract.get("passive_parties") or []
    for name in map(str, declared) if len(declared) > 1 else (_ALONE,):
        # The summary is written last: without one the party still runs, or was stopped.
        if name != Path(name).name or not run_record.has_summary(folder / name):
            continue
        passive = _read_party(folder / name)
        found, expected = passive.summary.counts, active.summary.counts
        if (found.aligned_rows, found.steps) == (expected.aligned_rows, expected.steps):
            yield passive


def _read_party(folder: Path) -> PartyFiles:
    summary = run_record.find_summary(folder)
    return PartyFiles(
        folder,
        folder.name,
        _settings_of(folder),
        Summary() if summary is None else summary,
        summary is not None,
        run_record.read_metrics(folder),
        run_record.find_ledger_ahead(folder),
    )


def _settings_of(folder: Path) -> Mapping[str, Any]:
    path = folder / "settings.yaml"
    return _parsed(run_record.text_of(path) or "{}", str(path))


@lru_cache(maxsize=64)  # to read a run's other files takes a tenth of the time
def _parsed(text: str, source: str) -> Mapping[str, Any]:
    return _mapping(load_yaml(text, source, RESOLVED))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}

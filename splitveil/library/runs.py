"""Runs as their folders describe them, finished or still running: one, or several side by side."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args, overload

from torch import nn

from splitveil.active_party.commands.refit import Refitted, refit_again
from splitveil.active_party.predict.predictor import ModelChoice
from splitveil.active_party.report import write_comparison, write_report
from splitveil.active_party.report.run_files import RunFiles, read_run
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.features import Features
from splitveil.common.models.device import torch_device
from splitveil.common.privacy.attacks import CUT
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import LeakFigures
from splitveil.common.record import run_record
from splitveil.common.record.assessment import LeakAssessment
from splitveil.common.record.run_folder import finite_or_null
from splitveil.library.example_ledger import Ledger
from splitveil.library.frames import Frame, Row, Tabular, frame
from splitveil.library.loading import write_settings_of
from splitveil.library.trained import Format, Half, export, own_modules, settings_of
from splitveil.passive_party.report_page import read_exposure

Kind: TypeAlias = Literal["epochs", "attacks", "steps", "batches"]
KindOfRuns: TypeAlias = Literal["runs", "defenses"] | Kind
_MEASURED = ("test_auc", "leak_auc", *(peers.column for peers in Adversary), "disclosure")
_FIGURES = {
    "features": {"leak_auc": "value", "low": "low", "high": "high"},
    "batches": {"leak_auc": "mean", "q95": "q95", "random_q95": "random_q95"},
    "run": {"leak_auc": "auc", "low": "low", "high": "high", "examples": "examples"},
}
"""Scope of the leak AUCs -> a column of a frame -> the name of the figure."""
_SCALE = "leak AUC: 0.5 is guessing, 1 every label; its 99.99 % interval; bound: for these peers"


class Run(Tabular):
    """A run in its folder: figures, bounds, ledger and report.

    Figures are read anew whenever they are asked for, so that a run can be watched while it trains.

    Args:
        path: the run's folder ``runs/<run name>``, or the active party's folder in it.
        owner: an object to keep as long as the run, such as one that deletes a temporary folder.
        base_dir: the folder that the paths of the settings are relative to, if known.

    Raises:
        SettingsError: there are no metrics of an active party in it.
    """

    def __init__(
        self, path: str | Path, *, owner: object = None, base_dir: Path | None = None
    ) -> None:
        self.path = read_run(Path(path)).folder.absolute()
        self.base_dir = (base_dir or Path()).absolute()
        self._owner = owner

    @property
    def name(self) -> str:
        """The run's name, from the contract."""
        return self._files().name

    @property
    def has_ended(self) -> bool:
        """True if the active party has written its summary."""
        return self._files().active.has_ended

    @property
    def settings(self) -> Mapping[str, Any]:
        """The active party's settings with every default, the contract among them."""
        return MappingProxyType(dict(self._files().active.settings))

    @property
    def defense(self) -> str:
        chosen = self.settings.get("defense")
        return str(chosen.get("name")) if isinstance(chosen, dict) else "unknown"

    @property
    def summary(self) -> Mapping[str, Any]:
        """The active party's summary as in ``summary.json``; empty until the run has ended."""
        active = self._files().active
        return MappingProxyType(active.summary.form() if active.has_ended else {})

    @property
    def test_auc(self) -> float | None:
        """The test AUC after the last epoch that was evaluated; None before the first."""
        evaluated = self._files().active.metrics.of(run_record.EvaluationLine)
        return next(
            (line.figures.auc for line in reversed(evaluated) if line.split == "test"), None
        )

    @property
    def leak(self) -> LeakAssessment:
        """The attacks' findings beside the run's bound, as its report and its log state them."""
        return self._files().assessment

    @property
    def bounds(self) -> Mapping[str, float]:
        """Peers -> the AUC that no score of theirs exceeds, for the most exposed label.

        1 means that there is no bound. Empty before the first epoch is over.
        """
        found = self._files().ledger
        if found is None:
            return {}
        spreads = found.by_peers().items()
        return {str(p): one.max if math.isfinite(one.max) else 1.0 for p, one in spreads}

    @property
    def ledger(self) -> Ledger:
        """The ledger that the run has left, by example.

        Raises:
            SettingsError: there is none, because the run has not ended.
        """
        return Ledger.load(self.path / "active" / "checkpoint")

    def frame(self, of: Kind = "epochs") -> Frame:
        """Return the run's figures as a data frame (a ``pyarrow.Table`` without pandas).

        Args:
            of: what a row is about. ``epochs``: evaluations, losses and bounds. ``attacks``: each
                attack at each layer; ``over`` says whether its leak AUC is feature-adjusted
                (``features``), or raw, over ``batches`` or the ``run``: a raw one contains what
                features reveal anyway. ``steps``: each training step. ``batches``: each
                attack on each audited batch.

        Raises:
            ValueError: there is no such kind of frame.
        """
        return frame(self.rows(of))

    def rows(self, of: Kind = "epochs") -> list[Row]:
        """Return the rows of a frame as mappings, column -> value; errors as for ``frame``."""
        match of:
            case "epochs":
                return self._epochs()
            case "attacks":
                return [
                    {"party": party.name, "layer": layer, "attack": attack, "over": over}
                    | {column: getattr(found, name) for column, name in _FIGURES[over].items()}
                    for party in self._files().parties
                    for over, layers in _measured(party.summary.of_leak).items()
                    for layer, attacks in layers.items()
                    for attack, found in attacks.items()
                ]
            case "steps":
                return [
                    asdict(line)
                    for line in self._files().active.metrics.of(run_record.TrainingLine)
                ]
            case "batches":
                return [
                    {
                        "party": party.name,
                        "epoch": line.epoch,
                        "step": line.step,
                        "layer": one.layer,
                        "attack": one.attack,
                        "leak_auc": one.leak_auc,
                        "random": line.random,
                    }
                    for party in self._files().parties
                    for line in party.metrics.of(run_record.LeakLine)
                    for one in line.figures
                ]
        raise ValueError(f"expected one of {', '.join(get_args(Kind))}, got {of!r}")

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report, one HTML page without further files, and return its path.

        By default it is ``active/report.html`` in the run's folder.

        Raises:
            StorageError: the file cannot be written.
        """
        return write_report(self.path, None if output is None else Path(output))

    def model(self, party: str, model: ModelChoice = "trained") -> nn.Module:
        """Return a party's trained half, in eval mode on the CPU.

        A bottom model is called with ``features(party)`` and returns the activation, (rows, *cut
        shape); a top model with the activation (of several parties: aggregated) and its own
        features or None, and returns logits, (rows,) or (rows, classes). A custom model takes
        tensors, too, if its ``forward`` does.

        Args:
            party: ``active``, ``passive``, or the name of one of several passive parties.
            model: the top model: ``trained``, ``refitted`` or ``best``, the refitted one if there
                is one. The refitted one was fitted to the true labels after training (see the
                setting ``refit``) and may reveal them: keep it within the label owner.

        Raises:
            SettingsError: there is no such party or model, its folder with the trained weights is
                not beside the active party's, or its model is of a class that is not here.
        """
        return Half.of(self.path, party, self.base_dir, model).model

    def features(
        self, party: str, ids: Iterable[Any] | None = None, *, table: Any = None
    ) -> Features:
        """Return rows of a party as its trained half takes them: numbers, and slots.

        Numbers are scaled or, for ``tabular``, places among the bins of their column.

        Args:
            party: as for ``model``.
            ids: the ids of the rows, in this order; by default all rows, in the order of the table.
            table: other rows than those of the party's settings: a table as for ``simulate``.

        Raises:
            DataError: the table lacks a column or an id, or cannot be read.
            SettingsError: as for ``model``, or the party has no features.
        """
        return Half.of(self.path, party, self.base_dir).features(ids, table)

    def refit(self, settings: Mapping[str, Any] | None = None) -> Refitted:
        """Fit another top model on the files of the run, as ``splitveil refit`` does.

        Nothing is sent, and nothing is charged. ``predict`` takes the new model if it is better on
        held-out training rows than the refitted model before.

        Args:
            settings: changes to the label owner's settings: ``model_seed``, ``refit.epochs``,
                ``top_model``.

        Raises:
            SettingsError: the run has not ended, or has kept no activations (see ``refit``).
            DataError: the table lacks the run's rows.
        """
        changed = [f"{name}={json.dumps(value)}" for name, value in (settings or {}).items()]
        own = settings_of(ActiveSettings, self.path / "active", self.base_dir, *changed)
        with own_modules(self.base_dir):
            return refit_again(own, torch_device(own.device))

    def export(
        self,
        folder: str | Path,
        format: Format = "torch.export",  # noqa: A002
        model: ModelChoice = "trained",
    ) -> list[Path]:
        """Write the trained halves for programs without this package, and return the files.

        ``passive.pt2`` is for ``torch.export.load``, ``passive.onnx`` for ONNX runtimes; and so for
        every party whose folder is there. The inputs are tensors by name, with any number of rows:
        ``activation`` (of the top model), ``numeric`` (float64: numbers as in the table, NaN for a
        gap, which the half fills, marks and scales; then a 1 or 0 per category of each list),
        ``categorical``, ``image``, ``tokens`` and ``lengths``, as by ``features``.
        ``passive.encoder.json`` has the order of the columns and the slots of the categories: from
        2, in the order of ``categories``. ``model`` chooses the top model, as in ``model``.

        Raises:
            SettingsError: as for ``model``, or ``onnx`` is not installed.
        """
        return export(self.path, Path(folder), self.base_dir, format, model)

    def export_settings(
        self,
        folder: str | Path,
        *,
        tables: Mapping[str, str | Path] | None = None,
        seeds: bool = True,
    ) -> Path:
        """Write contract and settings files that let real parties repeat the run.

        ``splitveil local FOLDER`` runs them on one machine, with the run's bits on the CPU.

        Args:
            folder: where ``contract.yaml``, ``active.yaml`` and ``passive.yaml`` are written, or
                one ``passive_NAME.yaml`` for each of several feature owners.
            tables: each party's file by its name (``active`` for the label owner); a table that was
                in memory is otherwise written into the folder, and a file named where it lies.
            seeds: whether the files hold the seeds of batches and noise. Without them, no two runs
                have the same bits, and no peer can guess the noise: a run between organisations
                needs that, beside addresses and certificates of their own.

        Returns:
            The folder.

        Raises:
            SplitveilError: a file of the folder exists, the run has code without a name that others
                can import, or a party's table is not where its settings say.
        """
        write_settings_of(self.path, self.base_dir, Path(folder), tables or {}, seeds=seeds)
        return Path(folder)

    def overview(self) -> Row:
        """Return the run in one row: defense, quality, leak and bounds."""
        bounds, leak = self.bounds, self.leak
        strongest = leak.strongest
        low_high = (None,) * 3 if strongest is None else strongest.leak
        return {
            "run": self.name,
            "defense": self.defense,
            "test_auc": self.test_auc,
            "strongest_attack": leak.not_measured if strongest is None else strongest.attack,
            **dict(zip(("leak_auc", "leak_auc_low", "leak_auc_high"), low_high, strict=True)),
            **{peers.column: bounds.get(str(peers)) for peers in Adversary},
            **self._exposure(),
        }

    def _table(self) -> tuple[str, Sequence[Row], str]:
        state = "ended" if self.has_ended else "no summary: running, or stopped"
        return f"Run {str(self.path)!r} ({state})", [_figures(self)], _SCALE

    def _exposure(self) -> Row:
        """Return the disclosure of the passive party that gives away most of its columns."""
        found = (read_exposure(party.folder) for party in self._files().passives)
        most = max(filter(None, found), key=lambda one: one.disclosure, default=None)
        strongest = None if most is None else most.strongest
        return {
            "disclosure": None if most is None else most.disclosure,
            "strongest_column": None if strongest is None else strongest.name,
        }

    def _files(self) -> RunFiles:
        return read_run(self.path)

    def _epochs(self) -> list[Row]:
        metrics = self._files().active.metrics
        by_epoch: dict[int, dict[str, object]] = {}
        for line in metrics.of(run_record.EvaluationLine):
            row = by_epoch.setdefault(line.epoch, {"epoch": line.epoch})
            row["train_loss"] = line.train_loss
            measured = ("loss", "auc", "average_precision", "calibration_error")
            row |= {f"{line.split}_{name}": getattr(line.figures, name) for name in measured}
            if line.class_aucs:
                row[f"{line.split}_accuracy"] = line.figures.accuracy
        for ledger in metrics.of(run_record.LedgerLine):
            row = by_epoch.setdefault(ledger.epoch, {"epoch": ledger.epoch})
            row["sum_kl"] = finite_or_null(ledger.bounds.sum_kl.max)
            bounds = ledger.bounds.by_peers().items()
            row |= {peers.column: finite_or_null(one.max) for peers, one in bounds}
        for leak in metrics.of(run_record.EpochLeakLine):
            row = by_epoch.setdefault(leak.epoch, {"epoch": leak.epoch})
            row |= {f"{one.layer}/{one.attack}": one.leak_auc for one in leak.figures}
        return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _figures(run: Run) -> Row:
    """Return the figures beside their intervals and the bound, in words."""
    leak, row = run.leak, run.overview()
    return {
        "defense": run.defense,
        "test AUC": run.test_auc,
        "strongest attack": row["strongest_attack"],
        "leak AUC": None if leak.strongest is None else leak.strongest.figures,
        "bound": leak.bound_in_words,
        "disclosure": row["disclosure"],
    }


def _measured(leak: LeakFigures) -> dict[str, Mapping[str, Mapping[str, Any]]]:
    adjusted = {} if leak.beyond is None else leak.beyond.adjusted
    return {"features": {CUT: adjusted}, "batches": leak.batches, "run": leak.run_level}


class Runs(Tabular, Sequence[Run]):
    """The runs of a simulation, in the order they ran.

    Args:
        runs: by the title of the defense and the seed.
        folder: of all runs.
    """

    def __init__(self, runs: Mapping[tuple[str, int], Run], folder: Path) -> None:
        self.folder = folder
        self._runs = dict(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | list[Run]:
        return list(self._runs.values())[index]

    def __len__(self) -> int:
        return len(self._runs)

    def of(self, defense: str | None = None, seed: int | None = None) -> list[Run]:
        """Return the runs with a defense, given by its title, or a seed, or both."""
        return [
            run
            for (title, its_seed), run in self._runs.items()
            if defense in {None, title} and seed in {None, its_seed}
        ]

    @property
    def defenses(self) -> list[str]:
        """The titles of the defenses."""
        return list(dict.fromkeys(defense for defense, _ in self._runs))

    @property
    def bounds(self) -> Mapping[str, Mapping[str, float]]:
        """Defense -> peers -> the largest bound of its runs, each by itself; 1 is no bound."""
        return {
            defense: {
                str(peers): max(run.bounds.get(str(peers), 1.0) for run in self.of(defense))
                for peers in Adversary
            }
            for defense in self.defenses
        }

    def frame(self, of: KindOfRuns = "runs") -> Frame:
        """Return the figures of all runs as one data frame, with columns ``defense`` and ``seed``.

        Args:
            of: what a row is about. ``runs``: one run. ``defenses``: mean and standard deviation
                over the seeds of one defense. All others as in ``Run.frame``.

        Raises:
            ValueError: there is no such kind of frame.
        """
        return frame(self.rows(of))

    def rows(self, of: KindOfRuns = "runs") -> list[Row]:
        """Return the rows of a frame as mappings, column -> value; errors as for ``frame``."""
        if of == "defenses":
            return list(self._of_defenses())
        if of not in (expected := ("runs", "defenses", *get_args(Kind))):
            raise ValueError(f"expected one of {', '.join(expected)}, got {of!r}")
        rows: list[Row] = []
        for (defense, seed), run in self._runs.items():
            head = {"defense": defense, "seed": seed}
            own = [run.overview()] if of == "runs" else run.rows(of)
            # The title says more than the name that a run's own overview has.
            rows += [{**head, **row, **head} for row in own]
        return rows

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report of the only run, or a comparison of several, and return its path.

        By default it is ``active/report.html`` in the only run's folder, or ``comparison.html``
        beside the folders of several.

        Raises:
            StorageError: the file cannot be written.
        """
        path = None if output is None else Path(output)
        if len(self) == 1:
            return self[0].report(path)
        return write_comparison([run.path for run in self], path or self.folder / "comparison.html")

    def _table(self) -> tuple[str, Sequence[Row], str]:
        rows = [
            {**_figures(run), "defense": defense, "seed": seed}
            for (defense, seed), run in self._runs.items()
        ]
        return f"{len(self)} runs in {str(self.folder)!r}", rows, _SCALE

    def _of_defenses(self) -> Iterator[Row]:
        for defense in self.defenses:
            runs = [run.overview() for run in self.of(defense)]
            row: dict[str, object] = {"defense": defense, "seeds": len(runs)}
            for name in _MEASURED:
                values = [value for run in runs if isinstance(value := run[name], float)]
                row[name] = statistics.fmean(values) if values else None
                if not name.startswith("bound"):
                    row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else math.nan
            yield row

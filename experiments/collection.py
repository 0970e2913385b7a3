"""Collects the figures of finished runs in one tidy table: a row per figure, as Parquet.

Columns: experiment, size, dataset, variant, series, setting (the swept value, where there is one),
seed, party, layer, attack, statistic, epoch, step, value. The party is ``active``, ``passive`` or,
with several passive parties, a name in the contract. A figure of a run has neither epoch nor
step; ``epoch_...`` statistics have an epoch, ``step_leak`` a step, counted over the run. Of the
gradients that an adversary stored with its evaluation labels, ``epoch_norm_q05``, ``_q50`` and
``_q95`` are quantiles over examples, with ``label N`` in place of an attack; behind
`experiments.models.DeepBesideLogit` also ``epoch_error_...``, of the predictions' distance
from the labels, and ``epoch_slope_...``, of the norm divided by it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from splitveil.common.errors import StorageError
from splitveil.common.privacy.figures import AttackFigure
from splitveil.common.record.run_record import (
    EpochLeakLine,
    EvaluationLine,
    LeakLine,
    LedgerLine,
    Metrics,
    Summary,
    read_metrics,
    read_summary,
)
from splitveil.common.text.values import ByAttack, ValueT
from splitveil.experiments.cells import RUN_NAME, Cell, passive_parties
from splitveil.experiments.execution import FINISHED, read_marker

STRETCHES = 200
"""Parts of a run over which the leak of single batches is averaged."""

BESIDE_LOGIT = "splitveil.experiments.models:DeepBesideLogit"
_BOUNDS_OF_EPOCHS = ("anybody_max", "honest_but_curious_max", "knows_class_means_only_max")


class FigureRow(NamedTuple):
    experiment: str
    size: str
    dataset: str
    variant: str
    series: str
    setting: float | None
    seed: int
    party: str
    layer: str | None
    attack: str | None
    statistic: str
    epoch: int | None
    step: int | None
    value: float


_TYPES = {"setting": pa.float64(), "value": pa.float64()} | dict.fromkeys(
    ("seed", "epoch", "step"), pa.int64()
)
SCHEMA = pa.schema([(name, _TYPES.get(name, pa.string())) for name in FigureRow._fields])


class _Found(NamedTuple):
    party: str
    statistic: str
    value: float | None
    layer: str | None = None
    attack: str | None = None
    epoch: int | None = None
    step: int | None = None


def collect(experiment: str, size: str, cell: Cell, results: Path) -> list[FigureRow]:
    folder = results / cell.folder
    setting = None
    with suppress(ValueError):  # not one setting is swept, or it is no number
        (swept,) = cell.variant.removeprefix(cell.series).split()
        setting = float(swept)
    whose = (experiment, size, cell.dataset, cell.variant, cell.series, setting, cell.seed)
    found = [_Found("active", "wall_s", read_marker(folder / FINISHED)["wall_s"])]
    parties = {"active": cell.settings["active"], **passive_parties(cell.settings)}
    for party, settings in parties.items():
        beside_logit = settings.get("bottom_model", {}).get("module") == BESIDE_LOGIT
        run = folder / "runs" / RUN_NAME / party
        metrics = read_metrics(run)
        found += _of_summary(party, read_summary(run))
        found += _of_epochs(party, metrics)
        found += _of_steps(party, metrics.of(LeakLine))
        for epoch, path in enumerate(sorted(run.glob("received-*.npz"))):
            found += _of_received(party, epoch, path, beside_logit=beside_logit)
    return [
        FigureRow(*whose, f.party, f.layer, f.attack, f.statistic, f.epoch, f.step, float(f.value))
        for f in found
        if f.value is not None
    ]


def write_rows(path: Path, rows: Sequence[FigureRow], circumstances: Mapping[str, str]) -> None:
    """Write the table; ``circumstances`` become the file's metadata."""
    schema = SCHEMA.with_metadata(dict(circumstances))
    table = pa.Table.from_pylist([row._asdict() for row in rows], schema=schema)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def read_rows(path: Path) -> tuple[list[FigureRow], dict[str, str]]:
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    columns = [table.column(name).to_pylist() for name in SCHEMA.names]
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    return [FigureRow(*values) for values in zip(*columns, strict=True)], metadata


def circumstances_of(cell: Cell, results: Path) -> dict[str, Any]:
    return read_marker(results / cell.folder / FINISHED)


def _of_summary(party: str, summary: Summary) -> Iterator[_Found]:
    counts, active, leak = summary.counts, summary.of_active, summary.of_leak
    of_model = active.model.form()
    for name in ("test_auc", "test_auc_refit", "test_loss", "train_loss"):
        yield _Found(party, name, of_model.get(name))
    yield _Found(party, "calibration_error", active.model.test.calibration_error)
    for name in ("steps", "steps_per_s", "aligned_rows"):
        yield _Found(party, name, getattr(counts, name))
    for name, value in ({} if active.ledger is None else active.ledger.form()).items():
        yield _Found(party, f"ledger_{name}", value)
    yield _Found(party, "left_out_batches", leak.counts.left_out)
    for layer, attack, found in _each(leak.batches):
        for name in ("mean", "q95", "last_epoch", "random_q95"):
            yield _Found(party, name, getattr(found, name), layer, attack)
    for layer, attack, worst in _each(leak.worst_epoch):
        yield _Found(party, "worst_epoch", worst, layer, attack)
    for layer, attack, gathered in _each(leak.run_level):
        yield _Found(party, "run_level", gathered.auc, layer, attack)
        for name in ("low", "high", "examples"):
            yield _Found(party, name, getattr(gathered, name), layer, attack)
        over = gathered.over_features
        yield _Found(party, "over_features", over and over.value, layer, attack)
    for attack, adjusted in ({} if leak.beyond is None else leak.beyond.adjusted).items():
        yield _Found(party, "adjusted", adjusted.value, "cut", attack)


def _each(figures: ByAttack[ValueT]) -> Iterator[tuple[str, str, ValueT]]:
    for layer, attacks in figures.items():
        for attack, found in attacks.items():
            yield layer, attack, found


def _of_epochs(party: str, metrics: Metrics) -> Iterator[_Found]:
    for _, line in metrics.timed:
        match line:
            case EvaluationLine(split="test"):
                for name in ("auc", "loss", "calibration_error"):
                    value = getattr(line.figures, name)
                    yield _Found(party, f"epoch_test_{name}", value, epoch=line.epoch)
                yield _Found(party, "epoch_train_loss", line.train_loss, epoch=line.epoch)
            case LedgerLine(epoch, bounds):
                for name in _BOUNDS_OF_EPOCHS:
                    value = bounds.form()[name]
                    yield _Found(party, f"epoch_ledger_{name}", value, epoch=epoch)
            case EpochLeakLine(epoch, figures):
                for layer, attack, value in figures:
                    yield _Found(party, "epoch_leak", value, layer, attack, epoch)
                    if epoch == 0:
                        yield _Found(party, "first_epoch", value, layer, attack)
    tests = [line for line in metrics.of(EvaluationLine) if line.split == "test"]
    if tests:
        yield _Found(party, "best_test_auc", max(line.figures.auc or 0.0 for line in tests))


def _of_steps(party: str, measured: Sequence[LeakLine]) -> Iterator[_Found]:
    steps_per_epoch = max((line.step for line in measured), default=0) + 1
    courses: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for line in measured:
        step = line.epoch * steps_per_epoch + line.step
        # Random scores know nothing of layers: theirs are shown with the gradients as received.
        for layer, attack, value in (*line.figures, AttackFigure("cut", "random", line.random)):
            if value is not None:
                courses[layer, attack].append((step, value))
    for (layer, attack), course in courses.items():
        course.sort()
        length = max(math.ceil(len(course) / STRETCHES), 1)
        for begin in range(0, len(course), length):
            part = course[begin : begin + length]
            mean = math.fsum(value for _, value in part) / len(part)
            yield _Found(party, "step_leak", mean, layer, attack, step=part[len(part) // 2][0])


def _of_received(party: str, epoch: int, path: Path, *, beside_logit: bool) -> Iterator[_Found]:
    with np.load(path, allow_pickle=False) as stored:
        gradients, labels = stored["gradients"], stored.get("labels", np.zeros(0))
        _, batch, sizes = np.unique(stored["batches"], return_inverse=True, return_counts=True)
    # Scaled to an example's own loss: the gradient received is of the batch's mean loss.
    rows = gradients.reshape(len(gradients), -1) * sizes[batch][:, None]
    of_cut, error = (rows[:, :-1], np.abs(rows[:, -1])) if beside_logit else (rows, None)
    figures = {"norm": np.linalg.norm(of_cut, axis=1)}
    if error is not None:
        slope = figures["norm"] / np.maximum(error, np.finfo(error.dtype).tiny)
        figures |= {"error": error, "slope": slope}
    for (name, values), label in itertools.product(figures.items(), np.unique(labels)):
        for quantile in (5, 50, 95):
            value = float(np.percentile(values[labels == label], quantile))
            yield _Found(
                party, f"epoch_{name}_q{quantile:02}", value, "cut", f"label {label:g}", epoch
            )

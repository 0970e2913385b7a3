"""Turns what runs left behind into one tidy table: a row per figure, as Parquet.

Columns: experiment, size, dataset, variant, series, setting (the swept value, where there is one),
seed, party, layer, attack, statistic, epoch, step, value. The party is ``active``, ``passive`` or,
of several passive parties, one's name in the contract. A figure of a run has neither epoch nor
step; ``epoch_...`` statistics have an epoch, ``step_leak`` a step, counted over the run.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet

from splitveil.common.errors import StorageError
from splitveil.experiments.cells import RUN_NAME, Cell, passive_parties
from splitveil.experiments.execution import FINISHED

STRETCHES = 200
"""Parts of a run over which the leak of single batches is averaged."""

_LEAK_STATISTICS = ("mean", "q95", "last_epoch", "random_q95")
_OF_A_BATCH = "_leak_auc"


class Row(NamedTuple):
    """One figure."""

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


SCHEMA = pa.schema(
    [
        ("experiment", pa.string()),
        ("size", pa.string()),
        ("dataset", pa.string()),
        ("variant", pa.string()),
        ("series", pa.string()),
        ("setting", pa.float64()),
        ("seed", pa.int32()),
        ("party", pa.string()),
        ("layer", pa.string()),
        ("attack", pa.string()),
        ("statistic", pa.string()),
        ("epoch", pa.int32()),
        ("step", pa.int64()),
        ("value", pa.float64()),
    ]
)


class _Found(NamedTuple):
    """A figure before it is known whose."""

    party: str
    statistic: str
    value: float | None
    layer: str | None = None
    attack: str | None = None
    epoch: int | None = None
    step: int | None = None


def collect(experiment: str, size: str, cell: Cell, results: Path) -> list[Row]:
    """Return all figures of a finished cell."""
    folder = results / cell.folder
    swept = cell.variant.removeprefix(cell.series).split()
    setting = _number(swept[0]) if len(swept) == 1 else None
    whose = (experiment, size, cell.dataset, cell.variant, cell.series, setting, cell.seed)
    return [
        Row(*whose, f.party, f.layer, f.attack, f.statistic, f.epoch, f.step, float(f.value))
        for f in _found(folder, ("active", *passive_parties(cell.settings)))
        if f.value is not None
    ]


def write_rows(path: Path, rows: Sequence[Row], circumstances: Mapping[str, str]) -> None:
    """Write the table; ``circumstances`` become the file's metadata.

    Raises:
        StorageError: it cannot be written.
    """
    schema = SCHEMA.with_metadata(dict(circumstances))
    table = pa.Table.from_pylist([row._asdict() for row in rows], schema=schema)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Read the table and its circumstances.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    columns = [table.column(name).to_pylist() for name in SCHEMA.names]
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    return [Row(*values) for values in zip(*columns, strict=True)], metadata


def circumstances_of(cell: Cell, results: Path) -> dict[str, Any]:
    """Return on what and with what a finished cell was run."""
    marker: dict[str, Any] = json.loads((results / cell.folder / FINISHED).read_text("utf-8"))
    return marker


def _found(folder: Path, parties: Iterable[str]) -> Iterator[_Found]:
    marker = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
    yield _Found("active", "wall_s", marker["wall_s"])
    for party in parties:
        run = folder / "runs" / RUN_NAME / party
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        yield from _of_summary(party, summary)
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        yield from _of_epochs(party, lines)
        yield from _of_steps(party, lines)


def _of_summary(party: str, summary: Mapping[str, Any]) -> Iterator[_Found]:
    for name in ("test_auc", "test_loss", "train_loss", "steps", "steps_per_s", "aligned_rows"):
        yield _Found(party, name, summary.get(name))
    yield _Found(party, "calibration_error", summary.get("test_calibration_error"))
    for name, value in (summary.get("ledger") or {}).items():
        yield _Found(party, f"ledger_{name}", value)
    yield _Found(party, "left_out_batches", (summary.get("leak_batches") or {}).get("left_out"))
    for layer, attack, found in _by_attack(summary, "leak"):
        for name in _LEAK_STATISTICS:
            yield _Found(party, name, found.get(name), layer, attack)
    for layer, attack, worst in _by_attack(summary, "leak_worst_epoch"):
        yield _Found(party, "worst_epoch", worst, layer, attack)
    for layer, attack, found in _by_attack(summary, "leak_run_level"):
        names = {"auc": "run_level", "low": "low", "high": "high", "examples": "examples"}
        for key, name in names.items():
            yield _Found(party, name, found.get(key), layer, attack)


def _by_attack(summary: Mapping[str, Any], part: str) -> Iterator[tuple[str, str, Any]]:
    for layer, attacks in (summary.get(part) or {}).items():
        for attack, found in attacks.items():
            yield layer, attack, found


def _of_epochs(party: str, lines: Iterable[Mapping[str, Any]]) -> Iterator[_Found]:
    best: dict[str, float] = {}
    for line in lines:
        epoch = line["epoch"]
        match line["kind"]:
            case "test":
                for name in ("auc", "loss", "calibration_error"):
                    yield _Found(party, f"epoch_test_{name}", line[name], epoch=epoch)
                yield _Found(party, "epoch_train_loss", line["train_loss"], epoch=epoch)
                best["best_test_auc"] = max(line["auc"], best.get("best_test_auc", 0.0))
            case "ledger":
                value = line["guarantee_max"]
                yield _Found(party, "epoch_ledger_guarantee_max", value, epoch=epoch)
            case "epoch_leak":
                for name, value in _numbers(line):
                    layer, _, attack = name.partition("/")
                    yield _Found(party, "epoch_leak", value, layer, attack, epoch)
                    if epoch == 0:
                        yield _Found(party, "first_epoch", value, layer, attack)
    for name, value in best.items():
        yield _Found(party, name, value)


def _of_steps(party: str, lines: Iterable[Mapping[str, Any]]) -> Iterator[_Found]:
    measured = [line for line in lines if line["kind"] == "leak"]
    steps_per_epoch = max((line["step"] for line in measured), default=0) + 1
    courses: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in measured:
        step = line["epoch"] * steps_per_epoch + line["step"]
        for name, value in _numbers(line):
            if name.endswith(_OF_A_BATCH) and value is not None:
                courses[name.removesuffix(_OF_A_BATCH)].append((step, value))
    for name, course in courses.items():
        # Random scores know nothing of layers: theirs are shown with the gradients as received.
        layer, _, attack = name.rpartition("/")
        for step, value in _stretches(sorted(course)):
            yield _Found(party, "step_leak", value, layer or "cut", attack, step=step)


def _stretches(course: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    length = max(math.ceil(len(course) / STRETCHES), 1)
    for begin in range(0, len(course), length):
        part = course[begin : begin + length]
        yield part[len(part) // 2][0], math.fsum(value for _, value in part) / len(part)


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in line.items():
        if name not in {"time_s", "kind", "epoch", "step"}:
            yield name, value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

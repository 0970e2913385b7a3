"""The record that a run leaves in each party's folder: metrics, summary, and an earlier ledger.

    metrics.jsonl       one line per step, batch, epoch or event, written while the run trains
    summary.json        written when the run has ended
    ledger_ahead.json   bounds on all answers, written when a run resumes before some of them

A line is a JSON object with ``time_s``, ``kind``, ``epoch`` and ``step``, followed by the fields of
its kind: there is one type for each. Names such as ``cut/norm_leak_auc`` are composed and parsed
only here. The numbers are about batches, epochs and runs, never about one example.

Both parties write a summary. Only the active party's contains the quality of the model and the
bounds of the ledger; both may contain the figures of attacks.

A record names its format unless it is the first: ``"format": 2`` in a JSON object, or a line
``{"kind": "format", "format": 2}``. A file without it has format 1, which is written here.
"""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from pydantic import BeforeValidator

from splitveil.common.errors import SettingsError
from splitveil.common.privacy.figures import (
    LEAK_TABLES,
    AttackFigure,
    Groups,
    LeakBounds,
    LeakFigures,
    PredictionFigures,
)
from splitveil.common.record.run_folder import finite_or_null, write_json_atomically
from splitveil.common.record.transcript import TranscriptEnd
from splitveil.common.run.sample_order import SplitName
from splitveil.common.text.values import (
    IF_ANY,
    Count,
    Flat,
    Form,
    Key,
    KnownCount,
    Maybe,
    Number,
    Object,
    Text,
    as_count,
    as_mapping,
    as_number,
    from_form,
)


def _write_figures(figures: tuple[AttackFigure, ...]) -> dict[str, float | None]:
    return {f"{one.layer}/{one.attack}": one.leak_auc for one in figures}


def _read_figures(values: Mapping[str, Any]) -> tuple[AttackFigure, ...]:
    """Parse the names of layers and attacks; an attack's name never contains a slash."""
    return tuple(
        AttackFigure(layer, attack, as_number(value))
        for name, value in values.items()
        for layer, slash, attack in [name.rpartition("/")]
        if slash
    )


Figures: TypeAlias = Annotated[tuple[AttackFigure, ...], BeforeValidator(_read_figures)]
Figure: TypeAlias = Annotated[
    AttackFigure,
    BeforeValidator(lambda values: next(iter(_read_figures(values)), None)),
    Flat(write=lambda figure: _write_figures((figure,))),
]
OF_A_BATCH = Flat(suffix="_leak_auc", write=_write_figures)


@dataclass(frozen=True)
class AlignmentLine(Form):
    aligned_rows: Count = None
    own_rows: Annotated[Count, IF_ANY] = None  # of this party's whole file


@dataclass(frozen=True)
class TrainingLine(Form):
    epoch: KnownCount
    step: KnownCount
    loss: Number = None
    noise_power: Number = None


@dataclass(frozen=True)
class LeakLine(Form):
    epoch: KnownCount
    step: KnownCount
    figures: Annotated[Figures, OF_A_BATCH]
    random: Annotated[Number, Key("random_leak_auc")] = None  # of random scores on the batch


@dataclass(frozen=True)
class EpochLeakLine(Form):
    """The attacks over one epoch: means of its batches, or AUCs of all gradients so far."""

    epoch: KnownCount
    figures: Annotated[Figures, Flat(write=_write_figures)]


@dataclass(frozen=True)
class NumberLeakLine(Form):
    """The attacks on labels that are numbers, over one epoch or up to its end."""

    epoch: KnownCount
    figures: Annotated[Object[Number], Flat(suffix="_r2")]
    """Attack -> the share of the labels' variance that it explains."""


@dataclass(frozen=True)
class LedgerLine(Form):
    epoch: KnownCount
    bounds: Annotated[LeakBounds, Flat()]


@dataclass(frozen=True)
class EvaluationLine(Form):
    epoch: KnownCount
    split: Annotated[SplitName, Key("kind")]
    figures: Annotated[PredictionFigures, Flat()] = field(default_factory=PredictionFigures)
    train_loss: Number = None  # mean over the training steps of the epoch
    class_aucs: Annotated[Object[Number], Flat("auc/")] = field(default_factory=dict)
    """Class -> AUC against the rest, in place of an object in ``figures``."""


@dataclass(frozen=True)
class AlarmLine(Form):
    """A leak alarm: an attack measured more than the ledger states for one answer."""

    epoch: KnownCount  # the last epoch that was judged
    figure: Figure
    margin: Number = None  # the part of the figure that chance may account for
    bound: Number = None


Line: TypeAlias = (
    AlignmentLine
    | TrainingLine
    | LeakLine
    | EpochLeakLine
    | NumberLeakLine
    | LedgerLine
    | EvaluationLine
    | AlarmLine
)
LineT = TypeVar("LineT", bound=Line)

_TYPES: Mapping[str, type[Line]] = {
    "alignment": AlignmentLine,
    "train": TrainingLine,
    "leak": LeakLine,
    "epoch_leak": EpochLeakLine,
    "epoch_leak_of_numbers": NumberLeakLine,
    "ledger": LedgerLine,
    "validation": EvaluationLine,
    "test": EvaluationLine,
    "leak_alarm": AlarmLine,
}
_KINDS = {kind: name for name, kind in _TYPES.items()}


def parts_of(line: Line, time_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first fields of a line as a JSON object, and the others, in the order written.

    The first are time, kind, the epoch, counted from 0, and the step within it, None for a whole
    epoch or run. A number that is not finite becomes null.
    """
    values: dict[str, Any] = finite_or_null(line.form())
    kind = values.pop("kind", _KINDS[type(line)])
    head = {"time_s": round(time_s, 6), "kind": kind, "epoch": values.pop("epoch", None)}
    return head | {"step": values.pop("step", None)}, values


def from_json(document: object) -> Line | None:
    """Return the line that a decoded JSON document holds; None if it is unknown or incomplete."""
    values = as_mapping(document)
    kind = _TYPES.get(str(values.get("kind")))
    try:
        return None if kind is None else from_form(kind, values)
    except ValueError:  # an essential field is missing
        return None


class Provenance(NamedTuple):
    ended: str  # date and time, UTC, ISO 8601 to the second
    system: str  # operating system and processor architecture
    python: str
    torch: str
    device: str = ""  # of a GPU its model, its driver and torch's version of CUDA, too


def provenance_of_process(device: str) -> Provenance:
    return Provenance(
        datetime.now(UTC).isoformat(timespec="seconds"),
        f"{platform.system()} {platform.release()}, {platform.machine()}",
        ".".join(map(str, sys.version_info[:3])),
        version("torch"),
        device,
    )


class RunCounts(NamedTuple):
    aligned_rows: Count = None
    epochs: Count = None
    steps: Count = None
    steps_per_s: Number = None


@dataclass(frozen=True)
class ModelFigures(Form):
    test: Annotated[PredictionFigures, Flat("test_")] = field(default_factory=PredictionFigures)
    train_loss: Number = None
    refit: Annotated[PredictionFigures | None, Flat("test_", "_refit")] = None
    """Of the copy fitted to the true labels, on the test rows."""
    alone: Annotated[PredictionFigures | None, Flat("test_", "_alone")] = None
    """Of a model of the active party's own features only, on the test rows."""
    groups: Annotated[Maybe[Groups], Key("test_groups"), IF_ANY] = None
    """Of the model that predicts, all test rows first (``report.group_column``)."""


@dataclass(frozen=True)
class EarlierAnswers(Form):
    examples: Count  # number of training rows of this run about which earlier runs answered
    bounds: Annotated[LeakBounds, Flat()]


@dataclass(frozen=True, kw_only=True)
class ActiveFigures(Form):
    model: Annotated[ModelFigures, Flat()] = field(default_factory=ModelFigures)
    defense: Object[Any] = field(default_factory=dict)
    ledger: Maybe[LeakBounds] = None  # of all answers; None before the first one
    refused_messages: Object[Annotated[int, BeforeValidator(lambda n: as_count(n) or 0)]] = field(
        default_factory=dict
    )
    """Status word -> number."""
    earlier_answers: Annotated[Maybe[EarlierAnswers], IF_ANY] = None
    leak_alarms: Annotated[Count, IF_ANY] = None  # None without a leak monitor

    def form(self) -> dict[str, Any]:
        ledger, bounds = self.ledger, list[dict[str, Any]]()
        if ledger is not None:
            bounds = [
                {"adversary": peers, "leak_auc": spread.max, "mu": ledger.mu_by_peers()[peers]}
                for peers, spread in ledger.by_peers().items()
            ]
        written: dict[str, Any] = {}
        for name, value in super().form().items():
            written |= {name: value} | ({"bounds": bounds} if name == "ledger" else {})
        return written


@dataclass(frozen=True, kw_only=True)
class Summary(Form):
    counts: Annotated[RunCounts, Flat()] = field(default_factory=RunCounts)
    active: Annotated[ActiveFigures | None, Flat()] = None  # None in a passive party's summary
    leak: Annotated[LeakFigures | None, Flat()] = None  # None if attacks were not run
    transcript: Annotated[Maybe[TranscriptEnd], IF_ANY] = None
    version: Annotated[Text, IF_ANY] = None
    provenance: Annotated[Maybe[Provenance], IF_ANY] = None  # where and when the run ended

    @property
    def of_active(self) -> ActiveFigures:
        return self.active or ActiveFigures()

    @property
    def of_leak(self) -> LeakFigures:
        return self.leak or LeakFigures()


def plain_figures(summary: Summary) -> dict[str, Any]:
    """Return the figures that are not in a separate table, by their names, in order."""
    return {name: value for name, value in summary.form().items() if name not in _WITH_TABLES}


_WITH_TABLES = {*LEAK_TABLES, "test_groups", "ledger", "bounds", "transcript", "provenance"}


METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LEDGER_AHEAD = "ledger_ahead.json"

_FORMAT, _FORMAT_KEY = 1, "format"


class Metrics:
    def __init__(self, timed_lines: list[tuple[float | None, Line]]) -> None:
        self.timed = timed_lines
        """Each with the seconds from the run's start, while the party was running."""

    def of(self, kind: type[LineT]) -> list[LineT]:
        return [line for _, line in self.timed if isinstance(line, kind)]


def write_summary(folder: Path, written: Summary) -> None:
    write_json_atomically(folder / SUMMARY, written.form())


def read_summary(folder: Path) -> Summary:
    found = find_summary(folder)
    if found is None:
        raise SettingsError(f"{folder / SUMMARY}: expected the summary of a run that has ended")
    return found


def find_summary(folder: Path) -> Summary | None:
    found = _read_object(folder / SUMMARY)
    return from_form(Summary, found) if found else None


def has_summary(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def read_metrics(folder: Path) -> Metrics:
    """Read a party's metrics, without lines cut off or unknown; empty without any.

    Raises SettingsError.
    """
    path, found = folder / METRICS, list[tuple[float | None, Line]]()
    for text in text_of(path).splitlines():
        try:
            document = as_mapping(json.loads(text))
        except (ValueError, RecursionError):
            continue
        _check_format(path, document)
        if (line := from_json(document)) is not None:
            found.append((as_number(document.get("time_s")), line))
    return Metrics(found)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}: line {line:,} is damaged: it is not UTF-8") from error
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error


def write_ledger_ahead(folder: Path, bounds: LeakBounds) -> None:
    write_json_atomically(folder / LEDGER_AHEAD, bounds.form())


def find_ledger_ahead(folder: Path) -> LeakBounds | None:
    found = _read_object(folder / LEDGER_AHEAD)
    return from_form(LeakBounds, found) if found else None


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        document = as_mapping(json.loads(text_of(path) or "{}"))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid JSON") from error
    _check_format(path, document)
    return document


def _check_format(path: Path, document: Mapping[str, Any]) -> None:
    written = document.get(_FORMAT_KEY, _FORMAT)
    if written != _FORMAT:
        raise SettingsError(
            f"{path}: written in format {written!r}, by another version of splitveil; expected "
            f"format {_FORMAT}"
        )

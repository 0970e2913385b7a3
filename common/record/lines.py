"""The lines of ``metrics.jsonl``: one type for each kind, and their form in the file.

Each line is a JSON object with ``time_s``, ``kind``, ``epoch`` and ``step``, followed by the fields
of its kind. Names such as ``cut/norm_leak_auc`` are composed and parsed only here. The numbers are
about batches, epochs and runs, never about one example.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from pydantic import BeforeValidator

from splitveil.common.privacy.figures import AttackFigure, LeakBounds, PredictionFigures
from splitveil.common.record.run_folder import finite_or_null
from splitveil.common.run.sample_order import SplitName
from splitveil.common.text.values import (
    IF_ANY,
    Count,
    Flat,
    Form,
    Key,
    KnownCount,
    Number,
    Object,
    as_mapping,
    as_number,
    from_form,
)


def _write_figures(figures: tuple[AttackFigure, ...]) -> dict[str, float | None]:
    return {f"{one.layer}/{one.attack}": one.leak_auc for one in figures}


def _write_figure(figure: AttackFigure) -> dict[str, float | None]:
    return _write_figures((figure,))


def _read_figures(values: Mapping[str, Any]) -> tuple[AttackFigure, ...]:
    """Parse the names of layers and attacks; an attack's name never contains a slash."""
    return tuple(
        AttackFigure(layer, attack, as_number(value))
        for name, value in values.items()
        for layer, slash, attack in [name.rpartition("/")]
        if slash
    )


def _read_figure(values: Mapping[str, Any]) -> AttackFigure | None:
    return next(iter(_read_figures(values)), None)


Figures: TypeAlias = Annotated[tuple[AttackFigure, ...], BeforeValidator(_read_figures)]
Figure: TypeAlias = Annotated[
    AttackFigure, BeforeValidator(_read_figure), Flat(write=_write_figure)
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


class LineFields(NamedTuple):
    """A line as it stands in the file, without its time."""

    kind: str
    epoch: int | None  # counted from 0
    step: int | None  # within the epoch, from 0; None for a whole epoch or run
    values: Mapping[str, Any]  # everything else, in the order written


def to_fields(line: Line) -> LineFields:
    written = line.form()
    kind, epoch = written.pop("kind", _KINDS[type(line)]), written.pop("epoch", None)
    return LineFields(kind, epoch, written.pop("step", None), written)


def to_json(fields: LineFields, time_s: float) -> dict[str, Any]:
    """Return a line as a JSON object; a number that is not finite becomes null."""
    kind, epoch, step, values = fields
    head = {"time_s": round(time_s, 6), "kind": kind, "epoch": epoch, "step": step}
    finite: dict[str, Any] = finite_or_null(values)
    return head | finite


def from_json(document: object) -> Line | None:
    """Return the line that a decoded JSON document holds; None if it is unknown or incomplete."""
    values = as_mapping(document)
    kind = _TYPES.get(str(values.get("kind")))
    try:
        return None if kind is None else from_form(kind, values)
    except ValueError:  # an essential field is missing
        return None

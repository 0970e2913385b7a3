"""The lines of ``metrics.jsonl``: one type for each kind, and their form in the file.

Each line is a JSON object with ``time_s``, ``kind``, ``epoch`` and ``step``, followed by the fields
of its kind. Names such as ``cut/norm_leak_auc`` are composed and parsed only here. The numbers are
about batches, epochs and runs, never about one example.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from splitveil.common.record.figures import AttackFigure, LedgerFigures, NumberFigures
from splitveil.common.record.histogram_line import HistogramLine
from splitveil.common.record.values import as_count, as_list, as_mapping, as_number, as_text
from splitveil.common.run.splits import SplitName
from splitveil.common.storage.run_folder import finite_or_null

_OF_A_BATCH = "_leak_auc"
_RANDOM = "random"
_OF_A_CLASS = "auc/"
_OF_NUMBERS = "_r2"


class AlignmentLine(NamedTuple):
    """The end of the alignment: the parties hold the same rows."""

    aligned_rows: int | None


class TrainingLine(NamedTuple):
    """One training step of the active party."""

    epoch: int
    step: int
    loss: float | None
    noise_power: float | None


class LeakLine(NamedTuple):
    """The attacks on the gradients of one batch."""

    epoch: int
    step: int
    figures: tuple[AttackFigure, ...]
    random: float | None
    """The leak AUC of random scores on the same batch."""


class EpochLeakLine(NamedTuple):
    """The attacks over one epoch.

    For an attack on single batches the figure is its mean over the epoch's batches, and for an
    attack that accumulates over the run it is the leak AUC of all gradients up to the epoch's end.
    """

    epoch: int
    figures: tuple[AttackFigure, ...]


class NumberLeakLine(NamedTuple):
    """The attacks on labels that are numbers, over one epoch or up to its end."""

    epoch: int
    figures: Mapping[str, float | None]
    """Attack -> the share of the labels' variance that it explains."""


class LedgerLine(NamedTuple):
    """The bounds of the leak ledger after an epoch."""

    epoch: int
    bounds: LedgerFigures


class EvaluationLine(NamedTuple):
    """The model on a held-out split after an epoch."""

    epoch: int
    split: SplitName
    loss: float | None
    auc: float | None
    calibration_error: float | None
    train_loss: float | None
    """Mean over the training steps of the epoch."""
    accuracy: float | None = None
    """Only with more than two classes."""
    class_aucs: Mapping[str, float | None] = MappingProxyType({})
    """Class -> AUC against the rest; only with more than two classes."""
    number: NumberFigures | None = None
    """Only with labels that are numbers, which have neither AUC nor calibration."""


class AuditLine(NamedTuple):
    """A reply to scores that a passive party chose."""

    epoch: int
    figure: AttackFigure


class GateLine(NamedTuple):
    """A finding of the leak gate, at the last batch of its window."""

    epoch: int
    step: int
    figure: AttackFigure
    random: float | None
    """The same figure of random scores on the same batches."""
    limit: float | None


class AlarmLine(NamedTuple):
    """A leak alarm: an attack measured more than the ledger states for one answer."""

    epoch: int
    """The last epoch that was judged."""
    figure: AttackFigure
    margin: float | None
    """The part of the figure that chance may account for."""
    bound: float | None


Line: TypeAlias = (
    AlignmentLine
    | TrainingLine
    | LeakLine
    | EpochLeakLine
    | NumberLeakLine
    | LedgerLine
    | EvaluationLine
    | AuditLine
    | GateLine
    | AlarmLine
    | HistogramLine
)
LineT = TypeVar("LineT", bound=Line)


class LineFields(NamedTuple):
    """A line as it stands in the file, without its time."""

    kind: str
    epoch: int | None
    """Counted from 0."""
    step: int | None
    """Within the epoch, from 0; None for a line about a whole epoch or the whole run."""
    values: Mapping[str, Any]
    """Everything else, in the order written."""


def to_fields(line: Line) -> LineFields:
    """Return a line's form in the file."""
    return _FORMS_BY_TYPE[type(line)].write(line)


def to_json(fields: LineFields, time_s: float) -> dict[str, Any]:
    """Return a line as a JSON object; a number that is not finite becomes null.

    Args:
        fields: of the line, from ``to_fields``.
        time_s: seconds since the start of the run.
    """
    kind, epoch, step, values = fields
    head = {"time_s": round(time_s, 6), "kind": kind, "epoch": epoch, "step": step}
    finite: dict[str, Any] = finite_or_null(values)
    return head | finite


def from_json(document: object) -> Line | None:
    """Return the line that a decoded JSON document holds; None for an unknown kind of line."""
    values = as_mapping(document)
    form = _FORMS_BY_KIND.get(str(values.get("kind")))
    if form is None:
        return None
    fields = LineFields(
        str(values["kind"]), as_count(values.get("epoch")), as_count(values.get("step")), values
    )
    try:
        line: Line = form.read(fields)
    except ValueError:  # an essential field is missing
        return None
    return line


class _Form(NamedTuple, Generic[LineT]):
    """One type of line: the functions that write and read it."""

    type: type[LineT]
    kinds: tuple[str, ...]
    write: Callable[[Any], LineFields]
    read: Callable[[LineFields], LineT]


def _epoch_of(fields: LineFields) -> int:
    return _required(fields.epoch)


def _step_of(fields: LineFields) -> int:
    return _required(fields.step)


def _required(value: int | None) -> int:
    if value is None:
        raise ValueError
    return value


def _flat(figures: Iterable[AttackFigure], suffix: str = "") -> dict[str, float | None]:
    return {f"{one.layer}/{one.attack}{suffix}": one.leak_auc for one in figures}


def _figures(values: Mapping[str, Any], suffix: str = "") -> tuple[AttackFigure, ...]:
    """Parse the names of layers and attacks; an attack's name never contains a slash."""
    return tuple(
        AttackFigure(layer, attack.removesuffix(suffix), as_number(value))
        for name, value in values.items()
        for layer, slash, attack in [name.rpartition("/")]
        if slash and name.endswith(suffix)
    )


def _figure(values: Mapping[str, Any]) -> AttackFigure:
    found = _figures(values)
    if not found:
        raise ValueError
    return found[0]


def _write_alignment(line: AlignmentLine) -> LineFields:
    return LineFields("alignment", None, None, line._asdict())


def _read_alignment(fields: LineFields) -> AlignmentLine:
    return AlignmentLine(as_count(fields.values.get("aligned_rows")))


def _write_training(line: TrainingLine) -> LineFields:
    values = {"loss": line.loss, "noise_power": line.noise_power}
    return LineFields("train", line.epoch, line.step, values)


def _read_training(fields: LineFields) -> TrainingLine:
    numbers = (as_number(fields.values.get(name)) for name in ("loss", "noise_power"))
    return TrainingLine(_epoch_of(fields), _step_of(fields), *numbers)


def _write_leak(line: LeakLine) -> LineFields:
    values = _flat(line.figures, _OF_A_BATCH) | {f"{_RANDOM}{_OF_A_BATCH}": line.random}
    return LineFields("leak", line.epoch, line.step, values)


def _read_leak(fields: LineFields) -> LeakLine:
    random = as_number(fields.values.get(f"{_RANDOM}{_OF_A_BATCH}"))
    figures = _figures(fields.values, _OF_A_BATCH)
    return LeakLine(_epoch_of(fields), _step_of(fields), figures, random)


def _write_epoch_leak(line: EpochLeakLine) -> LineFields:
    return LineFields("epoch_leak", line.epoch, None, _flat(line.figures))


def _read_epoch_leak(fields: LineFields) -> EpochLeakLine:
    return EpochLeakLine(_epoch_of(fields), _figures(fields.values))


def _write_number_leak(line: NumberLeakLine) -> LineFields:
    values = {f"{attack}{_OF_NUMBERS}": r2 for attack, r2 in line.figures.items()}
    return LineFields("epoch_leak_of_numbers", line.epoch, None, values)


def _read_number_leak(fields: LineFields) -> NumberLeakLine:
    figures = {
        name.removesuffix(_OF_NUMBERS): as_number(value)
        for name, value in fields.values.items()
        if name.endswith(_OF_NUMBERS)
    }
    return NumberLeakLine(_epoch_of(fields), figures)


def _write_ledger(line: LedgerLine) -> LineFields:
    return LineFields("ledger", line.epoch, None, line.bounds.flat())


def _read_ledger(fields: LineFields) -> LedgerLine:
    return LedgerLine(_epoch_of(fields), LedgerFigures.from_flat(fields.values))


def _write_evaluation(line: EvaluationLine) -> LineFields:
    names = ("loss", "auc", "calibration_error", "train_loss")
    values = {name: getattr(line, name) for name in names}
    if line.number is not None:
        losses = {"loss": line.loss, "train_loss": line.train_loss}
        return LineFields(line.split, line.epoch, None, losses | line.number.flat())
    if line.class_aucs:
        values |= {"accuracy": line.accuracy}
        values |= {f"{_OF_A_CLASS}{name}": auc for name, auc in line.class_aucs.items()}
    return LineFields(line.split, line.epoch, None, values)


def _read_evaluation(fields: LineFields) -> EvaluationLine:
    split: SplitName = "validation" if fields.kind == "validation" else "test"
    loss, auc, calibration_error, train_loss, accuracy = (
        as_number(fields.values.get(name))
        for name in ("loss", "auc", "calibration_error", "train_loss", "accuracy")
    )
    aucs = {
        name.removeprefix(_OF_A_CLASS): as_number(value)
        for name, value in fields.values.items()
        if name.startswith(_OF_A_CLASS)
    }
    epoch = _epoch_of(fields)
    number = NumberFigures.from_flat(fields.values)
    return EvaluationLine(
        epoch, split, loss, auc, calibration_error, train_loss, accuracy, aucs, number
    )


def _write_audit(line: AuditLine) -> LineFields:
    return LineFields("audit", line.epoch, None, _flat([line.figure]))


def _read_audit(fields: LineFields) -> AuditLine:
    return AuditLine(_epoch_of(fields), _figure(fields.values))


def _write_gate(line: GateLine) -> LineFields:
    values = _flat([line.figure]) | {_RANDOM: line.random, "limit": line.limit}
    return LineFields("leak_gate", line.epoch, line.step, values)


def _read_gate(fields: LineFields) -> GateLine:
    numbers = (as_number(fields.values.get(name)) for name in (_RANDOM, "limit"))
    return GateLine(_epoch_of(fields), _step_of(fields), _figure(fields.values), *numbers)


def _write_alarm(line: AlarmLine) -> LineFields:
    values = _flat([line.figure]) | {"margin": line.margin, "bound": line.bound}
    return LineFields("leak_alarm", line.epoch, None, values)


def _read_alarm(fields: LineFields) -> AlarmLine:
    numbers = (as_number(fields.values.get(name)) for name in ("margin", "bound"))
    return AlarmLine(_epoch_of(fields), _figure(fields.values), *numbers)


def _write_histogram(line: HistogramLine) -> LineFields:
    counts = {name: list(series) for name, series in line.counts.items()}
    values = {"figure": line.figure, "edges": list(line.edges), "counts": counts}
    return LineFields("histogram", line.epoch, line.step, values)


def _read_histogram(fields: LineFields) -> HistogramLine:
    figure = as_text(fields.values.get("figure"))
    if figure is None:
        raise ValueError
    edges = _all_of(as_list(fields.values.get("edges")), as_number)
    counts = {
        name: tuple(_all_of(as_list(series), as_count))
        for name, series in as_mapping(fields.values.get("counts")).items()
    }
    return HistogramLine(_epoch_of(fields), _step_of(fields), figure, tuple(edges), counts)


ValueT = TypeVar("ValueT")


def _all_of(values: Sequence[object], read: Callable[[object], ValueT | None]) -> list[ValueT]:
    found = [one for one in map(read, values) if one is not None]
    if len(found) != len(values):
        raise ValueError
    return found


_FORMS: tuple[_Form[Any], ...] = (
    _Form(AlignmentLine, ("alignment",), _write_alignment, _read_alignment),
    _Form(TrainingLine, ("train",), _write_training, _read_training),
    _Form(LeakLine, ("leak",), _write_leak, _read_leak),
    _Form(EpochLeakLine, ("epoch_leak",), _write_epoch_leak, _read_epoch_leak),
    _Form(NumberLeakLine, ("epoch_leak_of_numbers",), _write_number_leak, _read_number_leak),
    _Form(LedgerLine, ("ledger",), _write_ledger, _read_ledger),
    _Form(EvaluationLine, ("validation", "test"), _write_evaluation, _read_evaluation),
    _Form(AuditLine, ("audit",), _write_audit, _read_audit),
    _Form(GateLine, ("leak_gate",), _write_gate, _read_gate),
    _Form(AlarmLine, ("leak_alarm",), _write_alarm, _read_alarm),
    _Form(HistogramLine, ("histogram",), _write_histogram, _read_histogram),
)
_FORMS_BY_TYPE: Mapping[type, _Form[Any]] = {form.type: form for form in _FORMS}
_FORMS_BY_KIND: Mapping[str, _Form[Any]] = {kind: form for form in _FORMS for kind in form.kinds}

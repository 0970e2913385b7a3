"""The summary of a run, ``summary.json``: its types, and their form in the file.

Both parties write one. Only the active party's summary contains the quality of the model and the
bounds of the ledger; both may contain the figures of attacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from splitveil.common.party.transcript import TranscriptEnd
from splitveil.common.privacy.covers import Covers
from splitveil.common.record.figures import LedgerFigures, NumberFigures
from splitveil.common.record.leak_figures import (
    LEAK_TABLES,
    LeakFigures,
    leak_from_json,
    leak_to_json,
)
from splitveil.common.record.provenance import Provenance, provenance_from_json
from splitveil.common.record.values import (
    ByAttack,
    as_count,
    as_mapping,
    as_number,
    as_numbers,
    as_text,
    by_attack,
)


class RunCounts(NamedTuple):
    """The size of the run: rows, epochs, steps and speed."""

    aligned_rows: int | None = None
    epochs: int | None = None
    steps: int | None = None
    steps_per_s: float | None = None


class ModelFigures(NamedTuple):
    """The quality of the model after the last epoch; None if it was not measured."""

    test_auc: float | None = None
    """With more than two classes, the mean of each class's AUC against the rest."""
    test_loss: float | None = None
    test_calibration_error: float | None = None
    train_loss: float | None = None
    test_accuracy: float | None = None
    """Only with more than two classes."""
    test_auc_by_class: Mapping[str, float | None] | None = None
    """Only with more than two classes."""
    test_auc_refit: float | None = None
    """Of the copy of the top model that was fitted to the true labels after the last gradient."""
    test_auc_alone: float | None = None
    """Of a model that the active party trained on its own features alone, on the same test rows."""
    test_number: NumberFigures | None = None
    """Only with labels that are numbers, which have neither AUC nor calibration."""
    test_rmse_refit: float | None = None
    """As ``test_auc_refit``, for labels that are numbers."""
    test_rmse_alone: float | None = None
    """As ``test_auc_alone``, for labels that are numbers."""


class PeerBound(NamedTuple):
    """The bound on the leak of the whole run for one circle of peers."""

    covers: Covers
    leak_auc: float | None
    """AUC that no score of such a peer exceeds, for the most exposed example; 1 without a bound."""
    mu: float | None
    """Parameter of the Gaussian mechanism that all answers are together; None if they are not."""


class EarlierAnswers(NamedTuple):
    """The bounds on what earlier runs revealed about the same labels."""

    examples: int | None
    """Number of training rows of this run about which earlier runs answered."""
    bounds: LedgerFigures


class GateFigures(NamedTuple):
    """The actions of the leak gate."""

    findings: int | None
    closed: bool
    """Whether it ended the run."""


@dataclass(frozen=True, kw_only=True)
class ActiveFigures:
    """The part of a summary that only the active party writes."""

    model: ModelFigures = field(default_factory=ModelFigures)
    defense: Mapping[str, Any] = field(default_factory=dict)
    """Its settings."""
    ledger: LedgerFigures | None = None
    """The bounds on what all answers revealed; None before the first answer."""
    bounds: tuple[PeerBound, ...] = ()
    """One for each circle of peers, in the order of ``Covers``; empty before the first answer."""
    audits_answered: int | None = None
    """None if audits are not allowed and none was answered."""
    refused_messages: Mapping[str, int] = field(default_factory=dict)
    """Status word -> number."""
    earlier_answers: EarlierAnswers | None = None
    leak_alarms: int | None = None
    """None without a leak monitor."""
    gate: GateFigures | None = None
    """None without a leak gate."""


class AuditedFigures(NamedTuple):
    """The replies to a passive party about scores of its own."""

    leak_aucs: ByAttack[float]
    left_out_batches: int | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One party's summary of a run."""

    counts: RunCounts = field(default_factory=RunCounts)
    active: ActiveFigures | None = None
    """None in a passive party's summary."""
    audited: AuditedFigures | None = None
    """None if the party did not request audits."""
    leak: LeakFigures | None = None
    """None if attacks were not run."""
    transcript: TranscriptEnd | None = None
    version: str | None = None
    """The version of splitveil that ended the run."""
    provenance: Provenance | None = None
    """Where and when the run ended; None in a summary written by an earlier version."""

    @property
    def of_active(self) -> ActiveFigures:
        """The active party's part, empty in another party's summary."""
        return self.active or ActiveFigures()

    @property
    def of_leak(self) -> LeakFigures:
        """The part about the leak, empty if attacks were not run."""
        return self.leak or LeakFigures()


def to_json(summary: Summary) -> dict[str, Any]:
    """Return the summary's form in the file."""
    counts, active = summary.counts, summary.active
    return {
        "aligned_rows": counts.aligned_rows,
        "epochs": counts.epochs,
        "steps": counts.steps,
        **({} if active is None else _write_model(active.model)),
        "steps_per_s": counts.steps_per_s,
        **({} if active is None else _write_active(active)),
        **({} if summary.audited is None else _write_audited(summary.audited)),
        **({} if summary.leak is None else leak_to_json(summary.leak)),
        **({} if active is None or active.gate is None else _write_gate(active.gate)),
        **({} if summary.transcript is None else {"transcript": summary.transcript._asdict()}),
        **({} if summary.version is None else {"version": summary.version}),
        **({} if summary.provenance is None else {"provenance": summary.provenance._asdict()}),
    }


def from_json(document: object) -> Summary:
    """Return the summary that a decoded JSON document holds, without entries of another form."""
    values = as_mapping(document)
    aligned_rows, epochs, steps = (
        as_count(values.get(name)) for name in ("aligned_rows", "epochs", "steps")
    )
    counts = RunCounts(aligned_rows, epochs, steps, as_number(values.get("steps_per_s")))
    return Summary(
        counts=counts,
        active=_read_active(values) if _OF_ACTIVE & values.keys() else None,
        audited=_read_audited(values) if "audit" in values else None,
        leak=leak_from_json(values),
        transcript=_read_transcript(values),
        version=as_text(values.get("version")),
        provenance=provenance_from_json(values.get("provenance")),
    )


def plain_figures(summary: Summary) -> dict[str, Any]:
    """Return the figures that are not in a separate table, by their names, in order."""
    written = to_json(summary)
    return {name: value for name, value in written.items() if name not in _WITH_TABLES}


_MODEL = ("test_auc", "test_loss", "test_calibration_error", "train_loss")
_OF_CLASSES = ("test_accuracy", "test_auc_by_class")
_REFIT = "test_auc_refit"
_ALONE = "test_auc_alone"
_OF_TEST = "test_"
_OF_NUMBERS = tuple(f"{_OF_TEST}{name}" for name in NumberFigures._fields)
_RMSE_REFIT = "test_rmse_refit"
_RMSE_ALONE = "test_rmse_alone"
_GATE = ("leak_gate_findings", "leak_gate_closed")
_OF_ACTIVE = {
    *_MODEL,
    *_OF_CLASSES,
    *_GATE,
    *_OF_NUMBERS,
    _REFIT,
    _ALONE,
    *("defense", "ledger", "bounds", "audits_answered", "refused_messages", "earlier_answers"),
    "leak_alarms",
}
_WITH_TABLES = {*LEAK_TABLES, "ledger", "bounds", "audit", "transcript", "provenance"}


def _write_model(model: ModelFigures) -> dict[str, Any]:
    if model.test_number is not None:
        return {
            **model.test_number.flat(_OF_TEST),
            **({} if model.test_rmse_refit is None else {_RMSE_REFIT: model.test_rmse_refit}),
            **({} if model.test_rmse_alone is None else {_RMSE_ALONE: model.test_rmse_alone}),
            "test_loss": model.test_loss,
            "train_loss": model.train_loss,
        }
    return {
        "test_auc": model.test_auc,
        **({} if model.test_auc_refit is None else {_REFIT: model.test_auc_refit}),
        **({} if model.test_auc_alone is None else {_ALONE: model.test_auc_alone}),
        "test_loss": model.test_loss,
        "test_calibration_error": model.test_calibration_error,
        "train_loss": model.train_loss,
    }


def _write_active(active: ActiveFigures) -> dict[str, Any]:
    written: dict[str, Any] = {
        "defense": active.defense,
        "ledger": None if active.ledger is None else active.ledger.flat(),
        "bounds": [bound._asdict() for bound in active.bounds],
    }
    if active.audits_answered is not None:
        written |= {"audits_answered": active.audits_answered}
    written |= {"refused_messages": active.refused_messages}
    if active.earlier_answers is not None:
        examples, bounds = active.earlier_answers
        written |= {"earlier_answers": {"examples": examples, **bounds.flat()}}
    if active.model.test_auc_by_class is not None:
        written |= {
            "test_accuracy": active.model.test_accuracy,
            "test_auc_by_class": active.model.test_auc_by_class,
        }
    return written if active.leak_alarms is None else written | {"leak_alarms": active.leak_alarms}


def _read_active(values: Mapping[str, Any]) -> ActiveFigures:
    ledger, earlier = as_mapping(values.get("ledger")), as_mapping(values.get("earlier_answers"))
    refused = as_mapping(values.get("refused_messages"))
    return ActiveFigures(
        model=_read_model(values),
        defense=as_mapping(values.get("defense")),
        ledger=LedgerFigures.from_flat(ledger) if ledger else None,
        bounds=_read_bounds(values.get("bounds")),
        audits_answered=as_count(values.get("audits_answered")),
        refused_messages={str(word): as_count(number) or 0 for word, number in refused.items()},
        earlier_answers=_read_earlier(earlier) if earlier else None,
        leak_alarms=as_count(values.get("leak_alarms")),
        gate=_read_gate(values) if values.keys() & set(_GATE) else None,
    )


def _read_model(values: Mapping[str, Any]) -> ModelFigures:
    auc, loss, calibration_error, train_loss = (as_number(values.get(name)) for name in _MODEL)
    figures = ModelFigures(auc, loss, calibration_error, train_loss)
    figures = figures._replace(
        test_auc_refit=as_number(values.get(_REFIT)),
        test_auc_alone=as_number(values.get(_ALONE)),
        test_number=NumberFigures.from_flat(values, _OF_TEST),
        test_rmse_refit=as_number(values.get(_RMSE_REFIT)),
        test_rmse_alone=as_number(values.get(_RMSE_ALONE)),
    )
    if not values.keys() & set(_OF_CLASSES):
        return figures
    accuracy, aucs = (values.get(name) for name in _OF_CLASSES)
    return figures._replace(test_accuracy=as_number(accuracy), test_auc_by_class=as_numbers(aucs))


def _read_bounds(values: object) -> tuple[PeerBound, ...]:
    entries = [as_mapping(entry) for entry in values] if isinstance(values, list) else []
    known = {str(peers): peers for peers in Covers}
    return tuple(
        PeerBound(
            known[entry["covers"]], as_number(entry.get("leak_auc")), as_number(entry.get("mu"))
        )
        for entry in entries
        if as_text(entry.get("covers")) in known
    )


def _read_earlier(values: Mapping[str, Any]) -> EarlierAnswers:
    return EarlierAnswers(as_count(values.get("examples")), LedgerFigures.from_flat(values))


def _write_gate(gate: GateFigures) -> dict[str, Any]:
    return {"leak_gate_findings": gate.findings, "leak_gate_closed": gate.closed}


def _read_gate(values: Mapping[str, Any]) -> GateFigures:
    closed = values.get("leak_gate_closed") is True
    return GateFigures(as_count(values.get("leak_gate_findings")), closed)


def _write_audited(audited: AuditedFigures) -> dict[str, Any]:
    return {"audit": audited.leak_aucs, "audit_left_out_batches": audited.left_out_batches}


def _read_audited(values: Mapping[str, Any]) -> AuditedFigures:
    left_out = as_count(values.get("audit_left_out_batches"))
    return AuditedFigures(by_attack(values.get("audit"), as_number), left_out)


def _read_transcript(values: Mapping[str, Any]) -> TranscriptEnd | None:
    written = as_mapping(values.get("transcript"))
    entries, last_link = as_count(written.get("entries")), as_text(written.get("last_link"))
    return None if entries is None or last_link is None else TranscriptEnd(entries, last_link)

"""The summary of a run, ``summary.json``: its types, and their form in the file.

Both parties write one. Only the active party's summary contains the quality of the model and the
bounds of the ledger; both may contain the figures of attacks.
"""

import platform
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from splitveil.common.privacy.figures import LEAK_TABLES, LeakBounds, LeakFigures, PredictionFigures
from splitveil.common.record.transcript import TranscriptEnd
from splitveil.common.text.values import (
    IF_ANY,
    Count,
    Flat,
    Form,
    Maybe,
    Number,
    Object,
    Text,
    as_count,
)


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


_WITH_TABLES = {*LEAK_TABLES, "ledger", "bounds", "transcript", "provenance"}

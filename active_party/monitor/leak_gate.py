"""The leak gate: reports when the leak monitor has measured more than the label owner accepts.

It judges the last ``window_steps`` batches of an attack together, because the leak AUC of one batch
deviates too far to justify ending a run; it judges nothing until there are that many batches.
Random scores reach more than 1/2 on small batches, because an attacker may invert a score: their
leak AUC on the same batches is reported beside the figure.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from splitveil.active_party.settings import LeakGateSettings
from splitveil.common.errors import LeakGateClosed
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.record.figures import AttackFigure
from splitveil.common.record.lines import GateLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.summary import GateFigures
from splitveil.common.run.course import batch_in_words
from splitveil.common.run.progress import State

logger = logging.getLogger(__name__)


class GateFinding(NamedTuple):
    """An attack that measured more than the limit."""

    epoch: int
    step: int
    """Step of the last batch of the window."""
    attack: str
    layer: str
    measured: float
    """Mean or quantile of the leak AUC over the window."""
    random: float
    """The same figure of random scores on the same batches."""


class LeakGate:
    """Judges every measured batch together with those before it."""

    def __init__(self, settings: LeakGateSettings) -> None:
        self._settings = settings
        self._windows: dict[tuple[str, str], _Window] = {}
        self._until_next = 0

    def note(self, measured: AuditedBatch) -> GateFinding | None:
        """Judge the next batch.

        Returns:
            The attack furthest above the limit, at most once per window; None if all are below it.
        """
        settings = self._settings
        for layer, attacks in measured.leak.items():
            for attack, value in attacks.items():
                if settings.attack in (None, attack):
                    window = self._windows.setdefault((layer, attack), _Window.of(settings))
                    window.leak.append(value)
                    window.random.append(measured.random)
        self._until_next -= 1
        if self._until_next > 0:
            return None
        found = [
            GateFinding(
                measured.epoch,
                measured.step,
                attack,
                layer,
                self._together(window.leak),
                self._together(window.random),
            )
            for (layer, attack), window in self._windows.items()
            if len(window.leak) == settings.window_steps
        ]
        worst = max(found, key=lambda finding: finding.measured, default=None)
        if worst is None or worst.measured <= settings.max_leak_auc:
            return None
        self._until_next = settings.window_steps
        return worst

    def sentence(self, finding: GateFinding) -> str:
        settings = self._settings
        figure = "the mean" if settings.quantile == "mean" else f"the {settings.quantile} quantile"
        place = batch_in_words(finding.epoch, finding.step)
        return (
            f"leak_gate: {place}: {figure} of the leak AUC of {finding.attack} at "
            f"{finding.layer} over the last {settings.window_steps} audited batches is "
            f"{finding.measured:.4f}, above the limit of {settings.max_leak_auc:g} "
            f"(random scores: {finding.random:.4f})"
        )

    def state_dict(self) -> dict[str, Any]:
        windows: dict[str, dict[str, Any]] = {}
        for (layer, attack), window in self._windows.items():
            lists = {"leak": list(window.leak), "random": list(window.random)}
            windows.setdefault(layer, {})[attack] = lists
        return {"windows": windows, "until_next": self._until_next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of ``state_dict``; a shorter window keeps its latest batches."""
        self._windows = {}
        for layer, attacks in state["windows"].items():
            for attack, lists in attacks.items():
                window = self._windows.setdefault((layer, attack), _Window.of(self._settings))
                window.leak.extend(lists["leak"])
                window.random.extend(lists["random"])
        self._until_next = state["until_next"]

    def _together(self, values: Sequence[float]) -> float:
        quantile = self._settings.quantile
        return float(np.mean(values) if quantile == "mean" else np.quantile(values, quantile))


class _Window(NamedTuple):
    """The last batches on which an attack was measured."""

    leak: deque[float]
    random: deque[float]

    @classmethod
    def of(cls, settings: LeakGateSettings) -> "_Window":
        return cls(deque(maxlen=settings.window_steps), deque(maxlen=settings.window_steps))


class GateKeeper:
    """Shows measured batches to a leak gate, and acts on its findings as the settings say.

    Args:
        settings: limit, window and action; None without a gate.
    """

    def __init__(self, settings: LeakGateSettings | None, metrics: MetricsLog) -> None:
        self.objection: LeakGateClosed | None = None
        """The reason why the run must end, once the gate is closed."""
        self._metrics = metrics
        self._settings = settings
        self._gate = None if settings is None else LeakGate(settings)
        self._findings = 0

    def note_leak(self, measured: AuditedBatch) -> None:
        if self._gate is None or self._settings is None:
            return
        finding = self._gate.note(measured)
        if finding is None or self.objection is not None:
            return
        self._findings += 1
        self._write(finding, self._settings.max_leak_auc)
        sentence = self._gate.sentence(finding)
        if self._settings.action == "stop":
            self.objection = LeakGateClosed(sentence)
        else:
            logger.warning(sentence)

    def figures(self) -> GateFigures | None:
        """Return the gate's actions for the summary; None without a gate."""
        if self._gate is None:
            return None
        return GateFigures(self._findings, self.objection is not None)

    def state_dict(self) -> State:
        gate = None if self._gate is None else self._gate.state_dict()
        return {"gate": gate, "gate_findings": self._findings}

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned; other entries are ignored."""
        if self._gate is not None and state["gate"] is not None:
            self._gate.load_state_dict(state["gate"])
        self._findings = state["gate_findings"]

    def _write(self, finding: GateFinding, limit: float) -> None:
        figure = AttackFigure(finding.layer, finding.attack, finding.measured)
        self._metrics.write(GateLine(finding.epoch, finding.step, figure, finding.random, limit))

"""Acts on the findings of the leak gate: records them, and warns or objects to the run."""

import logging

from splitveil.active_party.settings import LeakGateSettings
from splitveil.active_party.watch.leak_gate import GateFinding, LeakGate
from splitveil.common.errors import LeakGateClosed
from splitveil.common.privacy.audit import BatchLeak
from splitveil.common.record.figures import AttackFigure
from splitveil.common.record.lines import GateLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.summary import GateFigures
from splitveil.common.run.progress import State

logger = logging.getLogger(__name__)


class GateKeeper:
    """Shows measured batches to a leak gate, and acts on its findings as the settings say.

    Args:
        settings: limit, window and action; None without a gate.
        metrics: gets a line for each finding.
    """

    def __init__(self, settings: LeakGateSettings | None, metrics: MetricsLog) -> None:
        self.objection: LeakGateClosed | None = None
        """The reason why the run must end, once the gate is closed."""
        self._metrics = metrics
        self._settings = settings
        self._gate = None if settings is None else LeakGate(settings)
        self._findings = 0

    def note_leak(self, measured: BatchLeak) -> None:
        """Show the gate a measured batch."""
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
        """Return everything that was noted."""
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

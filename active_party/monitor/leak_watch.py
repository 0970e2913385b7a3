"""Watches the leak of a run: attacks the gradients that are sent, and acts on the measurements."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from splitveil.active_party.monitor.leak_alarm import AlarmBell
from splitveil.active_party.monitor.leak_gate import GateKeeper
from splitveil.active_party.monitor.row_covariates import RowCovariates
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.common.errors import LeakGateClosed
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import FINAL_ATTACKS, SideInformation
from splitveil.common.privacy.audit import BatchLeak
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.record.figures import LeakFigures
from splitveil.common.record.leak_recorder import AuditedRun, LeakRecorder
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.summary import GateFigures
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import State


class LeakWatch:
    """The leak monitor of a run with its alarm and its gate, each of which may be switched off."""

    def __init__(self, settings: ActiveSettings, metrics: MetricsLog) -> None:
        # Its attacks tell classes apart; `NumberWatch` has those on numbers.
        is_of_classes = settings.data.label_range is None
        self._settings = settings.leak_monitor if is_of_classes else None
        self._class_names: Sequence[str] = settings.data.class_names
        self._keeps_activations = settings.leak_monitor is not None and any(
            name in FINAL_ATTACKS for name in settings.leak_monitor.attack_names
        )
        self._metrics = metrics
        self._bell = AlarmBell(metrics, _class_oracles(settings))
        self._gate = GateKeeper(settings.leak_gate, metrics)
        self.monitor: LeakRecorder | None = None
        """None without a leak monitor in the settings, or before the rows are known."""
        self._covariates: RowCovariates | None = None

    @contextmanager
    def watching(self, seed: bytes, rows: AlignedRows) -> Iterator[None]:
        """Run the monitor within the block; the last batches are measured and judged at its end."""
        if self._settings is None:
            yield
            return
        run = AuditedRun(seed, len(rows), self._class_names, keeps_scores=True)
        num_classes = len(self._class_names) or 2
        self._covariates = RowCovariates(rows.splits["train"], len(rows), num_classes)
        self.monitor = LeakRecorder(self._settings, self._metrics, run, self._on_leak)
        try:
            with self.monitor:
                yield
        finally:
            self._bell.judge_measured()

    def note_step(self, batch: Batch, result: StepResult) -> None:
        """Note the charge of an answer, and hand its gradients to the monitor."""
        charge = result.report.charge
        # A bound for everybody is about a label beyond what features tell, and the scores of a
        # batch also tell what features do: only figures adjusted for that are held against it.
        is_for_all = charge.adversary is Adversary.ANYBODY
        self._bell.note_charge(batch.epoch, math.inf if is_for_all else charge.sum_kl)
        if self.monitor is None or self._settings is None:
            return
        if self._covariates is not None:
            self._covariates.note_step(batch, result)
        clean = {"cut": result.raw} if self._settings.reference == "clean" else None
        known = result.slopes
        self.monitor.submit(
            batch,
            {"cut": result.defended},
            result.labels,
            clean,
            result.activation if self._keeps_activations else None,
            None if known is None else KnownPredictions(result.probabilities, known),
        )

    def note_evaluation(self, evaluation: Evaluation) -> None:
        """Note how well the model tells the labels of held-out rows."""
        if self._covariates is not None:
            self._covariates.note_held_out(evaluation.auc)

    def end_epoch(self, epoch: int) -> None:
        if self._covariates is not None:
            self._covariates.end_epoch(epoch)
        if self.monitor is not None:
            self.monitor.end_epoch(epoch)

    def shown(self) -> dict[str, float]:
        return {} if self.monitor is None else self.monitor.shown()

    def objection(self) -> LeakGateClosed | None:
        """Return the reason why the gate is closed; None while it is open."""
        return self._gate.objection

    def alarms(self) -> int | None:
        """Return the number of leak alarms; None without a monitor."""
        return None if self.monitor is None else self._bell.alarms

    def gate(self) -> GateFigures | None:
        """Return the gate's actions; None without a gate."""
        return self._gate.figures()

    def figures(self) -> LeakFigures | None:
        """Return the attacks' figures; None without a monitor."""
        if self.monitor is None:
            return None
        covariates = None if self._covariates is None else self._covariates.result()
        return self.monitor.summary(covariates)

    def state_dict(self) -> State:
        """Return everything noted, once the monitor has measured all gradients sent so far."""
        leaks = None if self.monitor is None else self.monitor.state_dict()
        covariates = None if self._covariates is None else self._covariates.state_dict()
        watched = {"leaks": leaks, "covariates": covariates}
        return watched | self._bell.state_dict() | self._gate.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned; other entries are ignored.

        Raises:
            SettingsError: the state belongs to attacks other than those in the settings.
        """
        if self.monitor is not None and state["leaks"] is not None:
            self.monitor.load_state_dict(state["leaks"])
        if self._covariates is not None and state["covariates"] is not None:
            self._covariates.load_state_dict(state["covariates"])
        self._bell.load_state_dict(state)
        self._gate.load_state_dict(state)

    def _on_leak(self, measured: BatchLeak) -> None:
        self._bell.note_leak(measured)
        self._gate.note_leak(measured)


def _class_oracles(settings: ActiveSettings) -> list[str]:
    """Return the leak monitor's attacks that know the classes of half a batch."""
    monitor = settings.leak_monitor
    needs = {} if monitor is None else monitor.batch_attack_needs
    return [name for name, needed in needs.items() if SideInformation.CLASSES in needed]

"""Watches the leak of a run: attacks the gradients that are sent, and acts on the measurements."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.monitor.leak_alarm import AlarmRecorder
from splitveil.active_party.monitor.row_covariates import RowCovariates
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.label_kinds import ClassLabels, kind_of
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import SideInformation
from splitveil.common.privacy.figures import LeakFigures
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.record.leak_recorder import AuditedRun, LeakRecorder
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import State


class LeakWatch:
    """The leak monitor of a run with its alarm; either may be switched off.

    The duration of attacks depends on labels, so the training never waits for them: a checkpoint
    has the monitor's last copy. The monitor never goes back with a run, because it has already got
    the answers that are given again: a peer that returns to checkpoints hides none from it. Only a
    process that is killed loses the last batches before the checkpoint where the next one resumes.
    """

    def __init__(self, settings: ActiveSettings, metrics: MetricsLog) -> None:
        # A one-shot run sends no gradient to attack.
        self._settings = None if settings.contract.is_one_shot else settings.leak_monitor
        self._kind = kind_of(settings.data)
        # The charges that it judges are about leak AUCs of single answers.
        self._has_alarm = isinstance(self._kind, ClassLabels)
        self._metrics = metrics
        self._alarm = AlarmRecorder(metrics, _class_oracles(settings))
        self.monitor: LeakRecorder | None = None
        """None without a leak monitor in the settings, or before the rows are known."""
        self._handed: tuple[int, int] | None = None
        """Epoch and step of the last batch whose gradients this process has got."""
        self._covariates: RowCovariates | None = None

    @contextmanager
    def watching(self, seed: bytes, rows: AlignedRows) -> Iterator[None]:
        """Run the monitor within the block; the last batches are measured and judged at its end."""
        self._handed = None
        if self._settings is None:
            yield
            return
        run = AuditedRun(seed, len(rows), self._kind.audited, keeps_scores=True)
        self._covariates = RowCovariates(rows.splits["train"], len(rows), self._kind)
        self.monitor = LeakRecorder(
            self._settings,
            self._metrics,
            run,
            self._alarm.note_leak if self._has_alarm else None,
            copied_with=self._guards,
        )
        try:
            with self.monitor:
                yield
        finally:
            self._alarm.judge_measured()

    def note_step(self, batch: Batch, step: Step) -> None:
        """Note the charge of an answer, and hand its gradients to the monitor."""
        if self._covariates is not None:
            self._covariates.note_step(batch, step)
        if self._handed is not None and (batch.epoch, batch.step) <= self._handed:
            return  # given again
        self._handed = (batch.epoch, batch.step)
        charge = step.defended.charge
        # Only the class means of a batch contain what features reveal. Other bounds are about the
        # label beyond that, and only figures adjusted for it are held against them.
        is_raw = charge.adversary is Adversary.CLASS_MEANS
        self._alarm.note_charge(batch.epoch, charge.sum_kl if is_raw else math.inf)
        if self.monitor is None or self._settings is None:
            return
        clean = {"cut": step.gradients} if self._settings.reference == "clean" else None
        known = step.slopes
        self.monitor.submit(
            batch,
            {"cut": step.defended.gradient},
            step.labels,
            clean,
            step.activation if self.monitor.needs_activations else None,
            None if known is None else KnownPredictions(step.probabilities, known),
        )

    def note_evaluation(self, evaluation: Evaluation) -> None:
        if self._covariates is not None:
            self._covariates.note_held_out(evaluation.figures.agreement)

    def end_epoch(self, epoch: int) -> None:
        if self._covariates is not None:
            self._covariates.end_epoch(epoch)
        if self.monitor is not None:
            self.monitor.end_epoch(epoch)

    def shown(self) -> dict[str, float]:
        return {} if self.monitor is None else self.monitor.shown()

    def alarms(self) -> int | None:
        """Return the number of leak alarms; None without a monitor, or where labels are numbers."""
        return self._alarm.alarms if self.monitor is not None and self._has_alarm else None

    def figures(self) -> LeakFigures | None:
        """Return the attacks' figures; None without a monitor."""
        if self.monitor is None or self._covariates is None:
            return None
        return self.monitor.summary(self._covariates.result())

    def state_dict(self) -> State:
        """Return everything noted, and of the monitor what it has copied last."""
        leaks = None if self.monitor is None else self.monitor.latest_copy()
        covariates = None if self._covariates is None else self._covariates.state_dict()
        return {"leaks": leaks, "covariates": covariates}

    def load_state_dict(self, state: State) -> bool:
        """Resume from a state that ``state_dict`` returned; other entries are ignored.

        Returns whether the monitor has gone there as well: not in a process that has measured on.

        Raises:
            SettingsError: the state belongs to attacks other than those in the settings.
        """
        goes_back = self._handed is None
        if self.monitor is not None and state["leaks"] is not None and goes_back:
            found = state["leaks"]["with"]
            self._handed = None if found["handed"] is None else tuple(found["handed"])
            self._alarm.load_state_dict(found)
            self.monitor.load_state_dict(state["leaks"])
        if self._covariates is not None and state["covariates"] is not None:
            self._covariates.load_state_dict(state["covariates"])
        return goes_back

    def _guards(self) -> State:
        return self._alarm.state_dict() | {"handed": self._handed}


def _class_oracles(settings: ActiveSettings) -> list[str]:
    monitor = settings.leak_monitor
    needs = {} if monitor is None else monitor.batch_attack_needs
    return [name for name, needed in needs.items() if SideInformation.CLASSES in needed]

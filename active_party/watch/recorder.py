"""What the active party writes down of a run: metrics, leak monitor, progress, summary."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from splitveil.active_party.ledger.ledger import LeakBounds, Spread
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.predictions import ClassFigures
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.active_party.watch.distributions import gradient_distributions, spread_epochs
from splitveil.active_party.watch.leak_alarm import LeakAlarm
from splitveil.active_party.watch.leak_gate import GateFinding, LeakGate
from splitveil.common.errors import LeakGateClosed
from splitveil.common.privacy.attacks import SideInformation
from splitveil.common.privacy.audit import BatchLeak
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.record.leak_recorder import LeakRecorder
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.training_progress import TrainingProgress
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.splits import SplitName
from splitveil.common.storage.run_folder import write_json_atomically
from splitveil.common.storage.run_store import State
from splitveil.common.text.upper_bounds import at_most, auc_at_most
from splitveil.common.wire.audit_codec import AuditQuestion

logger = logging.getLogger(__name__)

LEDGER_AHEAD = "ledger_ahead.json"
"""What was told in all when the run last went back behind some of its answers."""


class ActiveRecorder:
    """Observes a session. Its numbers are about batches and epochs, never about one example.

    Raises:
        SettingsError: an attack of the user's own cannot be used.
    """

    def __init__(self, settings: ActiveSettings, folder: Path) -> None:
        try_custom_attacks(settings.leak_monitor, settings.contract.aggregate_shape)
        self.aligned_rows = 0
        self._folder = folder
        self._settings = settings
        self._resources = ExitStack()
        self._of_run = ExitStack()
        self._metrics = self._resources.enter_context(MetricsLog(folder))
        self._progress: TrainingProgress | None = None
        self._steps = 0
        self._epoch_losses: list[float] = []
        self._train_loss = float("nan")
        self._evaluations: dict[str, Evaluation] = {}
        self._bounds: LeakBounds | None = None
        self._ahead: LeakBounds | None = None
        """What was told in all when the run went back: no checkpoint takes that away."""
        self._earlier: dict[str, float | None] | None = None
        self._alarm = LeakAlarm(_class_oracles(settings))
        self._alarms = 0
        self._measured_epoch = 0
        self._audits = 0
        gate = settings.leak_gate
        self._gate = None if gate is None else LeakGate(gate)
        self._gate_findings = 0
        self._objection: LeakGateClosed | None = None
        self._leaks: LeakRecorder | None = None
        self._uncounted_epochs = set(_epochs_to_count(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Start the progress bar and the leak monitor."""
        self._of_run.close()
        self._of_run = self._resources.enter_context(ExitStack())
        self.aligned_rows = len(rows)
        self._metrics.steps_per_epoch = rows.order.steps_per_epoch
        self._metrics.write("alignment", {"aligned_rows": len(rows)})
        if self._settings.leak_monitor is not None:
            # Called once the monitor has measured its last batch, before the metrics are closed.
            self._of_run.callback(lambda: self._judge(self._measured_epoch))
            self._leaks = self._of_run.enter_context(
                LeakRecorder(
                    self._settings.leak_monitor,
                    self._metrics,
                    seed,
                    len(rows),
                    self._on_leak,
                    self._settings.data.class_names,
                )
            )
        total = rows.total_steps(self._settings.contract)
        self._progress = self._of_run.enter_context(TrainingProgress("active", total))

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        """Note what earlier runs may have told."""
        self._earlier = {"examples": examples, **bounds.numbers()}
        logger.info(
            "earlier runs answered about %d of the training rows: sum_kl %s, leak AUC guaranteed "
            "below %s (largest of all examples)",
            examples,
            at_most(bounds.sum_kl.max),
            auc_at_most(bounds.guarantee.max),
        )

    def on_step(self, batch: Batch, result: StepResult) -> None:
        """Note the loss, and hand the gradients to the leak monitor."""
        loss = float(result.loss.detach())
        if batch.step == 0:
            self._epoch_losses.clear()
        self._epoch_losses.append(loss)
        self._steps += 1
        numbers = {"loss": loss, "noise_power": result.report.noise_power}
        self._metrics.write("train", numbers, epoch=batch.epoch, step=batch.step)
        self._alarm.note_charge(batch.epoch, result.report.charge.sum_kl)
        if self._leaks is not None and self._settings.leak_monitor is not None:
            told_clean = self._settings.leak_monitor.reference == "clean"
            clean = {"cut": result.raw} if told_clean else None
            self._leaks.submit(batch, {"cut": result.defended}, result.labels, clean)
        self._count_gradients(batch, result)
        if self._progress is not None:
            self._progress.advance(loss=loss, **self._shown_leak())

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        """Note what the run so far may have told."""
        self._bounds = bounds
        self._metrics.write("ledger", bounds.numbers(), epoch=epoch)
        bounds = bounds.or_more(self._ahead)
        logger.info(
            "epoch %d: leak ledger: sum_kl %s, leak AUC estimated %.3f, guaranteed below %s "
            "(largest of all examples)",
            epoch + 1,
            at_most(bounds.sum_kl.max),
            bounds.estimate.max,
            auc_at_most(bounds.guarantee.max),
        )

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        """Note what was told in answers beyond where the run goes on."""
        if bounds != self._ahead:
            logger.info(
                "the run was ahead of where it goes on: the ledger keeps what was told there: "
                "sum_kl %s, leak AUC guaranteed below %s (largest of all examples)",
                at_most(bounds.sum_kl.max),
                auc_at_most(bounds.guarantee.max),
            )
        self._ahead = bounds
        # For the report of a run that is left here. The metrics are those of where the run is.
        write_json_atomically(self._folder / LEDGER_AHEAD, bounds.numbers())

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Note loss and AUC of a split."""
        self._train_loss = sum(self._epoch_losses) / len(self._epoch_losses)
        self._evaluations[evaluation.split] = evaluation
        numbers = {
            "loss": evaluation.loss,
            "auc": evaluation.auc,
            "calibration_error": evaluation.calibration_error,
            "train_loss": self._train_loss,
        }
        if evaluation.classes is not None:
            by_class = self._by_class(evaluation.classes)
            numbers |= {"accuracy": evaluation.classes.accuracy}
            numbers |= {f"auc/{name}": auc for name, auc in by_class.items()}
        self._metrics.write(evaluation.split, numbers, epoch=evaluation.epoch)
        if evaluation.split == "test" and self._leaks is not None:  # the epoch's last split
            self._leaks.end_epoch(evaluation.epoch)

    def on_audit(self, question: AuditQuestion, leak_auc: float, party: str) -> None:
        """Note what a passive party is told of its scores."""
        several = len(self._settings.contract.passive_parties) > 1
        layer = f"{party}: {question.layer}" if several else question.layer
        numbers = {f"{layer}/{question.attack}": leak_auc}
        self._metrics.write("audit", numbers, epoch=question.epoch)

    def on_audits_answered(self, count: int) -> None:
        """Note how many audits were answered: what a run goes back behind counts, too."""
        self._audits = count

    def on_resumed(self, epoch: int | None) -> None:
        """Say where the run goes on."""
        logger.info("going on %s", "at the end" if epoch is None else f"in epoch {epoch + 1}")

    def state_dict(self) -> State:
        """Return all that is noted, once the leak monitor has measured what was sent so far.

        Raises:
            StorageError: a line of the metrics could not be written.
        """
        leaks = None if self._leaks is None else self._leaks.state_dict()
        evaluations = {split: _figures(e) for split, e in self._evaluations.items()}
        return {
            "steps": self._steps,
            "epoch_losses": list(self._epoch_losses),
            "train_loss": self._train_loss,
            "evaluations": evaluations,
            "bounds": None if self._bounds is None else _plain(self._bounds),
            "leaks": leaks,
            "alarm": self._alarm.state_dict(),
            "alarms": self._alarms,
            "measured_epoch": self._measured_epoch,
            "gate": None if self._gate is None else self._gate.state_dict(),
            "gate_findings": self._gate_findings,
            "uncounted_epochs": sorted(self._uncounted_epochs),
            "metrics": self._metrics.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where ``state_dict`` left off; call it after `on_aligned`.

        Raises:
            SettingsError: the state is of other attacks than the settings name.
            StorageError: the metrics cannot be changed.
        """
        if self._leaks is not None and state["leaks"] is not None:
            self._leaks.load_state_dict(state["leaks"])
        self._steps, self._train_loss = state["steps"], state["train_loss"]
        self._epoch_losses = list(state["epoch_losses"])
        self._evaluations = {
            split: _evaluation(split, *figures) for split, figures in state["evaluations"].items()
        }
        self._bounds = None if state["bounds"] is None else _bounds(*state["bounds"])
        self._alarm.load_state_dict(state["alarm"])
        self._alarms, self._measured_epoch = state["alarms"], state["measured_epoch"]
        if self._gate is not None and state["gate"] is not None:
            self._gate.load_state_dict(state["gate"])
        self._gate_findings = state["gate_findings"]
        self._uncounted_epochs = set(state["uncounted_epochs"])
        self._metrics.load_state_dict(state["metrics"])
        if self._progress is not None:
            self._progress.go_on_at(self._steps)

    def objection(self) -> LeakGateClosed | None:
        """Return why the leak gate is closed, once it is."""
        return self._objection

    def summary(self, refused: dict[str, int]) -> dict[str, Any]:
        """Return what ``summary.json`` holds; call it after the recorder was closed."""
        test = self._evaluations.get("test")
        told = self._ahead if self._bounds is None else self._bounds.or_more(self._ahead)
        summary: dict[str, Any] = {
            "aligned_rows": self.aligned_rows,
            "epochs": 0 if test is None else test.epoch + 1,
            "steps": self._steps,
            "test_auc": None if test is None else test.auc,
            "test_loss": None if test is None else test.loss,
            "test_calibration_error": None if test is None else test.calibration_error,
            "train_loss": self._train_loss,
            "steps_per_s": self._progress.steps_per_s if self._progress else None,
            "defense": self._settings.defense.model_dump(mode="json"),
            "ledger": None if told is None else told.numbers(),
        }
        if self._settings.allow_audits or self._audits:
            summary |= {"audits_answered": self._audits}  # the ledger does not count them
        summary |= {"refused_messages": refused}
        if self._earlier is not None:
            summary |= {"earlier_answers": self._earlier}
        if test is not None and test.classes is not None:
            summary |= {
                "test_accuracy": test.classes.accuracy,
                "test_auc_by_class": self._by_class(test.classes),
            }
        if self._leaks is not None:
            summary |= {"leak_alarms": self._alarms} | self._leaks.summary()
        if self._gate is not None:
            summary |= {
                "leak_gate_findings": self._gate_findings,
                "leak_gate_closed": self._objection is not None,
            }
        return summary

    def _by_class(self, figures: ClassFigures) -> dict[str, float]:
        """Return the AUC of each class by its name."""
        return dict(zip(self._settings.data.class_names, figures.aucs, strict=True))

    def _count_gradients(self, batch: Batch, result: StepResult) -> None:
        if batch.epoch not in self._uncounted_epochs:
            return
        found = gradient_distributions(result.raw, result.defended, result.labels)
        if found is None:  # too few of a class: another batch of this epoch may have more
            return
        self._uncounted_epochs.remove(batch.epoch)
        for figure, edges, counts in found:
            self._metrics.write_histogram(figure, edges, counts, epoch=batch.epoch, step=batch.step)

    def _shown_leak(self) -> dict[str, float]:
        shown = {}
        if self._bounds is not None:
            told = self._bounds.or_more(self._ahead)
            shown = {"ledger_leak_auc": float(auc_at_most(told.guarantee.max))}
        return shown if self._leaks is None else shown | self._leaks.shown()

    def _on_leak(self, measured: BatchLeak) -> None:
        if measured.epoch > self._measured_epoch:  # the monitor may lag behind the training
            self._judge(self._measured_epoch)
            self._measured_epoch = measured.epoch
        self._alarm.note_leak(measured)
        finding = None if self._gate is None else self._gate.note(measured)
        if finding is not None:
            self._on_gate(finding)

    def _on_gate(self, finding: GateFinding) -> None:
        settings = self._settings.leak_gate
        if self._gate is None or settings is None or self._objection is not None:
            return
        self._gate_findings += 1
        numbers = {
            f"{finding.layer}/{finding.attack}": finding.measured,
            "random": finding.random,
            "limit": settings.max_leak_auc,
        }
        self._metrics.write("leak_gate", numbers, epoch=finding.epoch, step=finding.step)
        sentence = self._gate.sentence(finding)
        if settings.action == "stop":
            self._objection = LeakGateClosed(sentence)
        else:
            logger.warning(sentence)

    def _judge(self, last_epoch: int) -> None:
        for alarm in self._alarm.judge(last_epoch):
            self._alarms += 1
            numbers = {
                f"{alarm.layer}/{alarm.attack}": alarm.measured,
                "margin": alarm.margin,
                "guarantee": alarm.guarantee,
            }
            self._metrics.write("leak_alarm", numbers, epoch=last_epoch)
            logger.error(
                "LEAK ALARM: up to epoch %d: %s at %s measures a leak AUC of %.3f (+- %.3f), above "
                "the %s that the ledger guarantees for one answer: the charges of this defense "
                "do not describe these gradients",
                last_epoch + 1,
                *alarm[:-1],
                auc_at_most(alarm.guarantee),
            )


def _class_oracles(settings: ActiveSettings) -> list[str]:
    """Return the leak monitor's attacks that are told the classes of half a batch."""
    monitor = settings.leak_monitor
    needs = {} if monitor is None else monitor.batch_attack_needs
    return [name for name, needed in needs.items() if SideInformation.CLASSES in needed]


def _epochs_to_count(settings: ActiveSettings) -> Iterable[int]:
    """Return the epochs of which one batch's gradients are counted by class."""
    chosen = settings.distributions
    if chosen is None or settings.data.classes is not None:
        return ()
    return spread_epochs(settings.contract.epochs) if chosen.epochs is None else chosen.epochs


def _figures(of: Evaluation) -> list[Any]:
    figures = [of.epoch, of.loss, of.auc, of.calibration_error]
    return figures if of.classes is None else [*figures, of.classes.accuracy, *of.classes.aucs]


def _evaluation(split: SplitName, epoch: int, *figures: float) -> Evaluation:
    loss, auc, calibration_error, *of_classes = figures
    classes = ClassFigures(of_classes[0], tuple(of_classes[1:])) if of_classes else None
    return Evaluation(epoch, split, loss, auc, calibration_error, classes)


_Figures = tuple[float, float, float]


def _plain(bounds: LeakBounds) -> tuple[_Figures, _Figures, _Figures, float | None]:
    parts = bounds.sum_kl, bounds.estimate, bounds.guarantee
    sum_kl, estimate, guarantee = ((part.max, part.q95, part.mean) for part in parts)
    return sum_kl, estimate, guarantee, bounds.epsilon


def _bounds(
    sum_kl: _Figures, estimate: _Figures, guarantee: _Figures, epsilon: float | None
) -> LeakBounds:
    return LeakBounds(Spread(*sum_kl), Spread(*estimate), Spread(*guarantee), epsilon)

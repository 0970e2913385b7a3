"""Records a run at the active party: metrics, progress, their state in checkpoints, summary.

Figures of attacks are held against what the ledger states as they are recorded.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from splitveil.active_party.defenses.dp_bounds import epsilon_of
from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.monitor.leak_watch import LeakWatch
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.privacy.figures import (
    BeyondFigures,
    Groups,
    LeakBounds,
    LeakFigures,
    PredictionFigures,
)
from splitveil.common.privacy.observational_audit import p_value
from splitveil.common.record.assessment import assess_figures, passes_stated
from splitveil.common.record.metrics_log import OF_MONITOR, ChartClock, RunRecorder
from splitveil.common.record.run_record import (
    ActiveFigures,
    EarlierAnswers,
    EvaluationLine,
    LedgerLine,
    ModelFigures,
    RunCounts,
    Summary,
    TrainingLine,
    write_ledger_ahead,
)
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import Phase, State
from splitveil.common.text.log_lines import log_fields
from splitveil.common.text.values import from_form, to_form
from splitveil.common.text.wording import at_least, at_most, auc_at_most, in_short

logger = logging.getLogger(__name__)

_ALL_CHARTED = 200
"""Number of steps of a process that are all charted, so that a short run has a whole curve."""


class ActiveRecorder(RunRecorder):
    """Observes a session. Its numbers are about batches and epochs, never about one example.

    Args:
        status: of the run, for its operators; one of its own by default.

    Raises:
        SettingsError: a user-defined attack cannot be used.
    """

    def __init__(
        self, settings: ActiveSettings, folder: Path, status: ActiveStatus | None = None
    ) -> None:
        try_custom_attacks(settings.leak_monitor, settings.contract.aggregate_shape)
        self._status = status or ActiveStatus(settings)
        super().__init__(folder, self._status.note_line)
        self._settings = settings
        self._watch = LeakWatch(settings, self._metrics)
        self._charting = ChartClock()
        self._epoch_losses: list[float] = []
        self._train_loss = float("nan")
        self._evaluations: dict[str, Evaluation] = {}
        self._bounds: LeakBounds | None = None
        self._ahead: LeakBounds | None = None
        """The bounds on all answers when the run went back: restoring a checkpoint keeps them."""
        self._earlier: EarlierAnswers | None = None
        self._refit: PredictionFigures | None = None
        self._groups: Groups = None
        self._alone: PredictionFigures | None = None

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        with self._status.phases(Phase.RECORD):
            self._begin_run(rows)
            self._of_run.enter_context(self._watch.watching(seed, rows))
            self._show_progress(rows, self._settings.contract)
        self._status.note_aligned(rows)

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        self._earlier = EarlierAnswers(examples, bounds)
        self._status.note_bounds(bounds.or_more(self._ahead))
        logger.info(
            "earlier runs answered about %d of the training rows: sum_kl %s, %s (largest of all "
            "examples)",
            examples,
            at_most(bounds.sum_kl.max),
            bounds.in_words(),
        )

    def on_step(self, batch: Batch, step: Step) -> None:
        with self._status.phases(Phase.RECORD):
            loss = float(step.loss.detach())
            if batch.step == 0:
                self._epoch_losses.clear()
            self._epoch_losses.append(loss)
            self._steps += 1
            line = TrainingLine(batch.epoch, batch.step, loss, step.defended.noise_power)
            self._metrics.write(
                line, charted=self._steps <= _ALL_CHARTED or self._charting.is_due()
            )
            self._watch.note_step(batch, step)
            if self._progress is not None:
                shown = {}
                if self._bounds is not None:
                    total = self._bounds.or_more(self._ahead)
                    shown = {"ledger_leak_auc": float(auc_at_most(total.guarantee.max))}
                self._progress.advance(loss=loss, **shown | self._watch.shown())
        self._status.note_step(batch)

    def on_epoch(self, epoch: int) -> None:
        with self._status.phases(Phase.RECORD):
            self._watch.end_epoch(epoch)
            held_out = [self._evaluations.get(split) for split in ("validation", "test")]
            judged = next((one for one in held_out if one is not None and one.epoch == epoch), None)
            is_one_shot = self._settings.contract.is_one_shot
            figures = [] if is_one_shot else [f"loss {in_short(self._train_loss, 3)}"]
            figures += [] if judged is None else [f"{judged.split} {judged.figures.in_short}"]
            bound = None if self._total is None else self._total.guarantee.max
            figures += [] if bound is None or bound >= 1 else [f"bound {auc_at_most(bound)}"]
            self._log_epoch(epoch, self._settings.contract, figures)

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        self._bounds, total = bounds, bounds.or_more(self._ahead)
        self._status.note_bounds(total)
        with self._status.phases(Phase.RECORD):
            self._metrics.write(LedgerLine(epoch, bounds))
        logger.debug(
            "epoch %d: leak ledger: sum_kl %s, leak AUC estimated %.3f, %s (largest of all "
            "examples)",
            epoch + 1,
            at_most(total.sum_kl.max),
            total.estimate.max,
            total.in_words(),
            extra=log_fields(epoch=epoch + 1, sum_kl_max=total.sum_kl.max),
        )

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        if bounds != self._ahead:
            logger.info(
                "the run was ahead of where it resumes: the ledger keeps the later answers: "
                "sum_kl %s, %s (largest of all examples)",
                at_most(bounds.sum_kl.max),
                bounds.in_words(),
            )
        self._ahead = bounds
        self._status.note_bounds((self._bounds or bounds).or_more(bounds))
        # For the report of a run that is abandoned here: its metrics end where it has resumed.
        write_ledger_ahead(self._folder, bounds)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        with self._status.phases(Phase.RECORD):
            if self._epoch_losses:  # there are no steps in a one-shot run
                self._train_loss = sum(self._epoch_losses) / len(self._epoch_losses)
            self._evaluations[evaluation.split] = evaluation
            self._watch.note_evaluation(evaluation)
            epoch, split, figures = evaluation
            plain = replace(figures, auc_by_class={})
            line = EvaluationLine(epoch, split, plain, self._train_loss, figures.auc_by_class)
            self._metrics.write(line)

    def on_resumed(self, epoch: int | None) -> None:
        self._status.note_resumed(epoch)
        logger.info("resuming %s", "at the end" if epoch is None else f"in epoch {epoch + 1}")

    def state_dict(self) -> State:
        """Return everything noted; of the leak monitor what it has copied last."""
        watch = self._watch.state_dict()
        self._status.note_checkpoint()
        return {
            "steps": self._steps,
            "epoch_losses": list(self._epoch_losses),
            "train_loss": self._train_loss,
            # With NaN for what rows of one class leave undefined: no entry depends on labels.
            "evaluations": {
                split: {"epoch": epoch, "figures": dict(vars(figures))}
                for split, (epoch, _, figures) in self._evaluations.items()
            },
            "bounds": to_form(self._bounds),
            **watch,
            "metrics": self._metrics.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned; call it after `on_aligned`.

        Raises:
            SettingsError: the state belongs to attacks other than those in the settings.
        """
        has_gone_back = self._watch.load_state_dict(state)
        self._steps, self._train_loss = state["steps"], state["train_loss"]
        self._epoch_losses = list(state["epoch_losses"])
        self._evaluations = {
            split: Evaluation(one["epoch"], split, PredictionFigures(**one["figures"]))
            for split, one in state["evaluations"].items()
        }
        bounds = state["bounds"]
        self._bounds = None if bounds is None else from_form(LeakBounds, bounds)
        if self._total is not None:
            self._status.note_bounds(self._total)
        self._metrics.load_state_dict(state["metrics"], () if has_gone_back else OF_MONITOR)
        if self._progress is not None:
            self._progress.resume_at(self._steps)

    def note_refit(self, figures: PredictionFigures | None, groups: Groups) -> None:
        self._refit, self._groups = figures, groups

    def note_alone(self, figures: PredictionFigures | None) -> None:
        self._alone = figures

    def summary(self, refused: dict[str, int]) -> Summary:
        """Return the run's summary; call it after closing the recorder.

        Args:
            refused: status word -> messages refused with it.
        """
        test = self._evaluations.get("test")
        speed = self._progress.per_s if self._progress else None
        epochs = 0 if test is None else test.epoch + 1
        total = self._total
        active = ActiveFigures(
            model=ModelFigures(
                PredictionFigures() if test is None else test.figures,
                self._train_loss,
                self._refit,
                self._alone,
                self._groups,
            ),
            defense=self._settings.defense.model_dump(mode="json"),
            ledger=total,
            refused_messages=refused,
            earlier_answers=self._earlier,
            leak_alarms=self._watch.alarms(),
        )
        of_steps = () if self._settings.contract.is_one_shot else (epochs, self._steps, speed)
        counts = RunCounts(self.aligned_rows, *of_steps)
        return Summary(counts=counts, active=active, leak=self._leak_figures(total))

    @property
    def _total(self) -> LeakBounds | None:
        """The bounds on all answers; None before the first epoch has ended."""
        return self._ahead if self._bounds is None else self._bounds.or_more(self._ahead)

    def _leak_figures(self, total: LeakBounds | None) -> LeakFigures | None:
        if self._settings.contract.is_one_shot:
            return None
        logger.info("measuring what the attacks reveal beyond features")
        leak = self._watch.figures()
        if leak is not None and (left_out := leak.counts.much_left_out):
            logger.warning(left_out)
        if leak is None or leak.beyond is None:
            return leak
        beyond = hold_against(leak.beyond, total)
        log_beyond(beyond, total, self._settings.defense.model_dump(mode="json"))
        return replace(leak, beyond=beyond)


def stated_epsilon(bounds: LeakBounds, delta: float) -> tuple[float, Adversary] | None:
    """Return the smallest epsilon of label-DP that bounds state at a delta, and for whom.

    A Gaussian mechanism states one at every delta (Dong, Roth and Su 2022, corollary 2.13), a
    randomised label the same at all. None where nothing states one.
    """
    found = []
    if bounds.epsilon is not None:
        found.append((bounds.epsilon, Adversary.ANYBODY))
    for peers, mu in bounds.mu_by_peers().items():
        if mu is not None and math.isfinite(epsilon_of(mu, delta)):
            found.append((epsilon_of(mu, delta), peers))
    return min(found, key=itemgetter(0), default=None)


def hold_against(beyond: BeyondFigures, bounds: LeakBounds | None) -> BeyondFigures:
    """Return the figures with the ledger's own epsilon beside the one that attacks exclude."""
    measured = beyond.epsilon
    if measured is None or bounds is None:
        return beyond
    stated = stated_epsilon(bounds, measured.delta)
    if stated is None:
        return beyond
    guesses = measured.guesses, measured.correct, measured.pairs
    return replace(
        beyond,
        epsilon=measured._replace(
            stated=stated[0],
            stated_for=stated[1],
            p_value_of_stated=p_value(*guesses, stated[0], measured.delta),
        ),
    )


def log_beyond(
    beyond: BeyondFigures, bounds: LeakBounds | None, defense: Mapping[str, Any]
) -> None:
    """Log what attacks reveal beyond features, and an alarm for every bound that they exceed."""
    epsilon = beyond.epsilon
    assessment = assess_figures(beyond, bounds, defense)
    logger.info("feature-adjusted leak AUC, strongest attack: %s", assessment.in_words)
    if epsilon is not None:
        logger.debug(
            "epsilon of label differential privacy is at least %s (delta %g): %s guessed %d of "
            "%d labels right; the ledger states %s",
            at_least(epsilon.epsilon),
            epsilon.delta,
            epsilon.attack,
            epsilon.correct,
            epsilon.guesses,
            "none" if epsilon.stated is None else at_most(epsilon.stated),
        )
        if passes_stated(epsilon, assessment):
            logger.error(
                "LEAK ALARM: attacks exclude the epsilon of %s that the ledger states for %s",
                at_most(epsilon.stated or 0.0),
                epsilon.stated_for,
            )
    for attack in assessment.above_bound:
        logger.error(
            "LEAK ALARM: %s, feature-adjusted leak AUC %s: %s",
            attack.attack,
            attack.figures,
            attack.why,
        )

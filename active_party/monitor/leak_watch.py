"""Watches the leak of a run: attacks the gradients that are sent, and acts on the measurements.

Where labels are numbers, the figures are the share of them that the sent gradients explain, those
of `splitveil.common.privacy.number_attacks`. They contain what features reveal: a gradient of
targets follows the model's predictions, and those explain labels without any leak. At the end of
the run the same attacks are measured beyond features, by `splitveil.common.privacy.number_attacks`:
those whose scores mean the same in every batch, which a direction that is found anew in each batch,
with a sign of its own, does not.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from splitveil.active_party.monitor.leak_alarm import AlarmRecorder
from splitveil.active_party.monitor.row_covariates import NumberRowCovariates, RowCovariates
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.common.privacy import number_attacks
from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import FINAL_ATTACKS, SideInformation
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.audit_worker import CpuBudget
from splitveil.common.privacy.figures import LeakFigures, NumberBeyond, NumberLeak
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.record.leak_recorder import AuditedRun, LeakRecorder
from splitveil.common.record.lines import NumberLeakLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import State

TOP_DIRECTION = "top_direction"
INFORMED = "informed"
ACCUMULATED_TOP = "accumulated_top_direction"
ACCUMULATED_RIDGE = "accumulated_ridge_40"

_LEAST_ROWS = 8
"""Rows below which a batch's R2 is mostly chance."""
_HINT_SEED = 0


class LeakWatch:
    """The leak monitor of a run with its alarm; either may be switched off.

    How long attacks take depends on labels, so that the training never waits for them: a checkpoint
    has what the monitor has copied last. And the monitor never goes back with a run, because the
    answers that are given again are those that it has got already: a peer that returns to
    checkpoints hides none from it. Only a process that is killed loses the last batches before the
    checkpoint from which the next one resumes.
    """

    def __init__(self, settings: ActiveSettings, metrics: MetricsLog) -> None:
        self._all_settings = settings
        # Its attacks separate classes; `NumberWatch` has those on numbers.
        is_one_shot = settings.contract.is_one_shot  # and sends no gradient to attack
        self._has_numbers = settings.data.label_range is not None and not is_one_shot
        self._settings = None if self._has_numbers or is_one_shot else settings.leak_monitor
        self._class_names: Sequence[str] = settings.data.class_names
        self._keeps_activations = settings.leak_monitor is not None and any(
            name in FINAL_ATTACKS for name in settings.leak_monitor.attack_names
        )
        self._metrics = metrics
        self._alarm = AlarmRecorder(metrics, _class_oracles(settings))
        self.monitor: LeakRecorder | None = None
        """None without a leak monitor in the settings, or before the rows are known."""
        self._handed: tuple[int, int] | None = None
        """Epoch and step of the last batch whose gradients this process has got."""
        self._covariates: RowCovariates | None = None
        self._numbers: NumberWatch | None = None

    @contextmanager
    def watching(self, seed: bytes, rows: AlignedRows) -> Iterator[None]:
        """Run the monitor within the block; the last batches are measured and judged at its end."""
        self._handed = None
        if self._has_numbers:
            self._numbers = NumberWatch(self._all_settings, self._metrics, rows)
        if self._settings is None:
            yield
            return
        run = AuditedRun(seed, len(rows), self._class_names, keeps_scores=True)
        num_classes = len(self._class_names) or 2
        self._covariates = RowCovariates(rows.splits["train"], len(rows), num_classes)
        self.monitor = LeakRecorder(
            self._settings, self._metrics, run, self._on_leak, copied_with=self._guards
        )
        try:
            with self.monitor:
                yield
        finally:
            self._alarm.judge_measured()

    def note_step(self, batch: Batch, result: StepResult) -> None:
        """Note the charge of an answer, and hand its gradients to the monitor."""
        if self._numbers is not None:
            self._numbers.note_step(batch, result)
        if self._covariates is not None:
            self._covariates.note_step(batch, result)
        if self._handed is not None and (batch.epoch, batch.step) <= self._handed:
            return  # given again
        self._handed = (batch.epoch, batch.step)
        charge = result.report.charge
        # Only the class means of a batch contain what features reveal. Other bounds are about the
        # label beyond that, and only figures adjusted for it are held against them.
        is_raw = charge.adversary is Adversary.CLASS_MEANS
        self._alarm.note_charge(batch.epoch, charge.sum_kl if is_raw else math.inf)
        if self.monitor is None or self._settings is None:
            return
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
        if self._numbers is not None:
            self._numbers.note_evaluation(evaluation)
        if self._covariates is not None:
            self._covariates.note_held_out(evaluation.auc)

    def end_epoch(self, epoch: int) -> None:
        if self._numbers is not None:
            self._numbers.end_epoch(epoch)
        if self._covariates is not None:
            self._covariates.end_epoch(epoch)
        if self.monitor is not None:
            self.monitor.end_epoch(epoch)

    def shown(self) -> dict[str, float]:
        return {} if self.monitor is None else self.monitor.shown()

    def alarms(self) -> int | None:
        """Return the number of leak alarms; None without a monitor."""
        return None if self.monitor is None else self._alarm.alarms

    def figures(self) -> LeakFigures | None:
        """Return the attacks' figures; None without a monitor."""
        if self._numbers is not None:
            of_numbers = self._numbers.figures()
            return LeakFigures(of_numbers=of_numbers) if of_numbers else None
        if self.monitor is None:
            return None
        covariates = None if self._covariates is None else self._covariates.result()
        return self.monitor.summary(covariates)

    def state_dict(self) -> State:
        """Return everything noted, and of the monitor what it has copied last."""
        leaks = None if self.monitor is None else self.monitor.latest_copy()
        covariates = None if self._covariates is None else self._covariates.state_dict()
        numbers = None if self._numbers is None else self._numbers.state_dict()
        return {"leaks": leaks, "covariates": covariates, "numbers": numbers}

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
        if self._numbers is not None and state["numbers"] is not None:
            self._numbers.load_state_dict(state["numbers"])
        return goes_back

    def _guards(self) -> State:
        return self._alarm.state_dict() | {"handed": self._handed}

    def _on_leak(self, measured: AuditedBatch) -> None:
        self._alarm.note_leak(measured)


def _class_oracles(settings: ActiveSettings) -> list[str]:
    monitor = settings.leak_monitor
    needs = {} if monitor is None else monitor.batch_attack_needs
    return [name for name, needed in needs.items() if SideInformation.CLASSES in needed]


class NumberWatch:
    """Measures batches as they are answered, and the sums of all gradients at the end."""

    def __init__(self, settings: ActiveSettings, metrics: MetricsLog, rows: AlignedRows) -> None:
        monitor = settings.leak_monitor
        self._every_steps = 0 if monitor is None else monitor.every_steps
        share = None if monitor is None else monitor.max_cpu_share
        self._budget = CpuBudget(share, time.process_time())
        self._metrics = metrics
        self._sums = number_attacks.SummedGradients(len(rows))
        self._covariates = NumberRowCovariates(rows.splits["train"], len(rows))
        self._informed = torch.full((len(rows),), torch.nan)
        """Score of each example by ``informed`` in the last batch that was measured."""
        self._r2: dict[str, dict[int, list[float]]] = {}
        """Attack -> epoch -> R2 of each batch."""
        self._random: list[float] = []

    def note_step(self, batch: Batch, result: StepResult) -> None:
        """Measure a batch, unless the settings leave it out."""
        if not self._every_steps:
            return
        self._covariates.note_step(batch, result)
        if batch.step % self._every_steps:
            return
        if not self._budget.allows(time.process_time()):
            return
        began_s = time.thread_time()
        gradients, labels = result.defended.detach().cpu(), result.labels.cpu()
        positions = torch.from_numpy(batch.positions.copy())
        self._sums.add(positions, gradients, labels, result.activation)
        if len(labels) >= _LEAST_ROWS:
            found = {TOP_DIRECTION: number_attacks.top_direction_r2(gradients, labels)}
            if result.slopes is not None:
                scores = number_attacks.informed_scores(
                    gradients, result.probabilities, result.slopes
                )
                found[INFORMED] = number_attacks.r2_of(scores, labels)
                self._informed[positions] = scores.float()
            for attack, r2 in found.items():
                by_epoch = self._r2.setdefault(attack, {})
                by_epoch.setdefault(batch.epoch, []).append(r2)
            self._random.append(1 / (len(labels) - 1))
        self._budget.pay(time.thread_time() - began_s)

    def note_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.number is not None:
            self._covariates.note_held_out(evaluation.number.r2)

    def end_epoch(self, epoch: int) -> None:
        self._covariates.end_epoch(epoch)
        found = {attack: by_epoch.get(epoch) for attack, by_epoch in self._r2.items()}
        means = {attack: _mean_of_defined(r2) for attack, r2 in found.items() if r2}
        if means:
            self._metrics.write(NumberLeakLine(epoch, means | self._accumulated()))

    def figures(self) -> Mapping[str, NumberLeak]:
        """Return attack -> its R2 over the run; empty if nothing was measured."""
        seen = self._sums.seen()
        examples = 0 if seen is None else len(seen.labels)
        chance = 1 / max(examples - 1, 1)
        found = {attack: self._of_batches(one) for attack, one in self._r2.items()} | {
            attack: NumberLeak(r2, random=chance, examples=examples)
            for attack, r2 in self._accumulated().items()
        }
        found = {attack: one for attack, one in found.items() if not math.isnan(one.r2)}
        for attack, beyond in self._beyond_features().items():
            if attack in found:
                found[attack] = found[attack]._replace(beyond=beyond)
        return found

    def _beyond_features(self) -> Mapping[str, NumberBeyond]:
        covariates, seen = self._covariates.numbers(), self._sums.seen()
        if covariates is None or seen is None:
            return {}
        scores = {ACCUMULATED_TOP: seen.top_direction_scores()}
        if len(seen.labels) > number_attacks.NUM_HINTS:
            scores[ACCUMULATED_RIDGE] = seen.ridge_scores(_HINT_SEED)
        known = (~self._informed.isnan()).numpy().nonzero()[0]
        scores[INFORMED] = RunScores(known, self._informed.double().numpy()[known])
        return number_attacks.measure_numbers_beyond_features(covariates, scores)

    def _of_batches(self, by_epoch: Mapping[int, list[float]]) -> NumberLeak:
        every = [r2 for one in by_epoch.values() for r2 in one if not math.isnan(r2)]
        return NumberLeak(
            _mean_of_defined(every),
            float(np.quantile(every, 0.95)) if every else math.nan,
            _mean_of_defined(by_epoch[max(by_epoch)]),
            float(np.mean(self._random)),
        )

    def state_dict(self) -> State:
        return {
            "sums": self._sums.state_dict(),
            "r2": copy.deepcopy(self._r2),
            "random": list(self._random),
            "covariates": self._covariates.state_dict(),
            "informed": self._informed.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        self._sums.load_state_dict(state["sums"])
        self._r2 = copy.deepcopy(state["r2"])
        self._random = list(state["random"])
        self._covariates.load_state_dict(state["covariates"])
        self._informed = state["informed"].clone()

    def _accumulated(self) -> dict[str, float]:
        seen = self._sums.seen()
        if seen is None:
            return {}
        figures = seen.figures(_HINT_SEED)
        return dict(zip((ACCUMULATED_TOP, ACCUMULATED_RIDGE), figures, strict=True))


def _mean_of_defined(r2: Sequence[float]) -> float:
    """Return the mean over batches; NaN if the labels of each of them were all the same."""
    defined = [one for one in r2 if not math.isnan(one)]
    return float(np.mean(defined)) if defined else math.nan

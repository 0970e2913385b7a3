"""Watches the leak of a run: attacks the gradients that are sent, and acts on the measurements.

The alarm reports that an attack measures more than one answer can have revealed.
A bound on the AUC applies to the mean over many draws, while a batch's AUC deviates from its mean,
the more so the fewer positives the batch holds. Therefore whole epochs are judged, several at once
if one has fewer than ``MIN_BATCHES`` measured batches: the mean over the batches of an attack's
leak AUC, less the gain of random scores on the same batches from being inverted, and less
``STANDARD_ERRORS`` of that mean, is compared with the bound of the largest single charge among
them. The single answer counts here, not the run: each attack of the monitor sees only one.

An alarm means that the charge does not describe the gradients sent: an error in a defense, or
gradients that its model of two classes does not fit.

Oracles that know the classes of half the batch are ignored: the bound is about the information
in one answer about an example's label, and not about what other examples' labels add to it.
"""

import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.monitor.row_covariates import RowCovariates
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.label_kinds import ClassLabels, kind_of
from splitveil.common.privacy.attacks import ATTACKS, SideInformation
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import STANDARD_ERRORS, AttackFigure, LeakFigures
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.record.leak_recorder import AuditedRun, LeakRecorder
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.run_record import AlarmLine
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import State
from splitveil.common.text.wording import auc_at_most

logger = logging.getLogger(__name__)

_CLASS_ORACLES: frozenset[str] = frozenset(
    name for name, attack in ATTACKS.items() if attack.needs_classes
)
MIN_BATCHES = 20


class LeakAlarm:
    """Collects charges and measurements, and judges the epochs that are complete.

    Every alarm is recorded, and one of each attack and layer is logged: an attack that passes its
    bound usually does so in every epoch.
    """

    def __init__(
        self,
        record: Callable[[AlarmLine], object],
        class_oracles: Collection[str] = _CLASS_ORACLES,
    ) -> None:
        self.alarms = 0
        self._record = record
        self._class_oracles = frozenset(class_oracles)
        self._largest: dict[int, float] = {}
        self._gains: dict[tuple[str, str], list[float]] = {}
        self._measured_epoch = 0
        self._said: set[tuple[str, str]] = set()

    def note_charge(self, epoch: int, sum_kl: float) -> None:
        self._largest[epoch] = max(self._largest.get(epoch, 0.0), sum_kl)

    def note_leak(self, measured: AuditedBatch) -> None:
        """Note a measured batch, and judge the epochs before it."""
        if measured.epoch > self._measured_epoch:  # the monitor may lag behind the training
            self.judge_measured()
            self._measured_epoch = measured.epoch
        measured = measured.mirrored()
        for layer, attacks in measured.leak.items():
            for attack, value in attacks.items():
                if attack not in self._class_oracles:
                    self._gains.setdefault((attack, layer), []).append(value - measured.random)

    def state_dict(self) -> State:
        gains = [[*key, list(values)] for key, values in self._gains.items()]
        return {
            "alarm": {"largest": list(map(list, self._largest.items())), "gains": gains},
            "alarms": self.alarms,
            "measured_epoch": self._measured_epoch,
            "said": sorted(map(list, self._said)),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned; other entries are ignored."""
        self._largest = dict(state["alarm"]["largest"])
        gains = state["alarm"]["gains"]
        self._gains = {(attack, layer): list(values) for attack, layer, values in gains}
        self.alarms, self._measured_epoch = state["alarms"], state["measured_epoch"]
        # What this process has said before it went back is said all the same.
        self._said |= {(attack, layer) for attack, layer in state["said"]}

    def judge_measured(self) -> None:
        """Judge the epochs not judged before, up to the last one with a measured batch.

        Few batches wait for those of more epochs.
        """
        if max(map(len, self._gains.values()), default=0) < MIN_BATCHES:
            return
        last = self._measured_epoch
        charges = [self._largest.pop(epoch) for epoch in sorted(self._largest) if epoch <= last]
        bound = leak_auc_bound(max(charges, default=0.0))
        series, self._gains = self._gains, {}
        for (attack, layer), gains in series.items():
            if len(gains) < MIN_BATCHES:
                continue
            measured = 0.5 + statistics.fmean(gains)
            margin = STANDARD_ERRORS * statistics.stdev(gains) / math.sqrt(len(gains))
            if measured - margin <= bound:
                continue
            self.alarms += 1
            figure = AttackFigure(layer, attack, measured)
            self._record(AlarmLine(last, figure, margin, bound))
            if (attack, layer) in self._said:
                continue
            self._said.add((attack, layer))
            logger.error(
                "LEAK ALARM: up to epoch %d: %s at %s measures a leak AUC of %.3f (+- %.3f), above "
                "the %s that the ledger states for one answer: the charges of this defense "
                "do not describe this attack on these gradients; later epochs of the same are in "
                "metrics.jsonl",
                last + 1,
                attack,
                layer,
                measured,
                margin,
                auc_at_most(bound),
            )


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
        monitor = settings.leak_monitor
        needs = {} if monitor is None else monitor.batch_attack_needs
        oracles = [name for name, needed in needs.items() if SideInformation.CLASSES in needed]
        self._alarm = LeakAlarm(metrics.write, oracles)
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

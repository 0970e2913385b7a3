"""The guards of a run: an alarm where attacks pass the ledger, and a gate where they pass a limit.

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

The gate reports when attacks have measured more than the label owner accepts.
It judges the last ``window_steps`` batches of an attack together, because the leak AUC of one batch
deviates too far to justify ending a run; it judges nothing until there are that many batches.
Random scores reach more than 1/2 on small batches, because an attacker may invert a score: their
leak AUC on the same batches is reported beside the figure.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.settings import LeakGateSettings
from splitveil.common.errors import LeakGateClosed
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.figures import STANDARD_ERRORS, AttackFigure
from splitveil.common.record.lines import AlarmLine, GateLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.summary import GateFigures
from splitveil.common.run.course import batch_in_words
from splitveil.common.run.progress import State
from splitveil.common.text.upper_bounds import auc_at_most

logger = logging.getLogger(__name__)

_CLASS_ORACLES: frozenset[str] = frozenset(
    name for name, attack in ATTACKS.items() if attack.needs_classes
)
MIN_BATCHES = 20


class Alarm(NamedTuple):
    attack: str
    layer: str
    measured: float
    """Mean leak AUC over the batches, less the gain of random scores."""
    margin: float
    """The part of the figure that chance may account for."""
    bound: float
    """AUC that no score on one of the answers can exceed."""


class LeakAlarm:
    """Collects charges and measurements, and judges the epochs that are complete."""

    def __init__(self, class_oracles: Collection[str] = _CLASS_ORACLES) -> None:
        self._class_oracles = frozenset(class_oracles)
        self._largest: dict[int, float] = {}
        self._gains: dict[tuple[str, str], list[float]] = {}

    def note_charge(self, epoch: int, sum_kl: float) -> None:
        self._largest[epoch] = max(self._largest.get(epoch, 0.0), sum_kl)

    def note_leak(self, measured: AuditedBatch) -> None:
        measured = measured.mirrored()
        for layer, attacks in measured.leak.items():
            for attack, value in attacks.items():
                if attack not in self._class_oracles:
                    self._gains.setdefault((attack, layer), []).append(value - measured.random)

    def state_dict(self) -> dict[str, Any]:
        gains = [[*key, list(values)] for key, values in self._gains.items()]
        return {"largest": list(map(list, self._largest.items())), "gains": gains}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._largest = dict(state["largest"])
        self._gains = {(attack, layer): list(values) for attack, layer, values in state["gains"]}

    def judge(self, last_epoch: int) -> list[Alarm]:
        """Judge the epochs not judged before, up to the last; few batches wait for more."""
        if max(map(len, self._gains.values()), default=0) < MIN_BATCHES:
            return []
        charges = [
            self._largest.pop(epoch) for epoch in sorted(self._largest) if epoch <= last_epoch
        ]
        bound = leak_auc_bound(max(charges, default=0.0))
        series, self._gains = self._gains, {}
        found = []
        for (attack, layer), gains in series.items():
            if len(gains) < MIN_BATCHES:
                continue
            measured = 0.5 + statistics.fmean(gains)
            margin = STANDARD_ERRORS * statistics.stdev(gains) / math.sqrt(len(gains))
            if measured - margin > bound:
                found.append(Alarm(attack, layer, measured, margin, bound))
        return found


class AlarmRecorder:
    """Has the epochs judged as they are measured; every alarm is recorded, one of each kind logged.

    An alarm's kind is its attack and layer: an attack that passes its bound usually does so in
    every epoch.
    """

    def __init__(self, metrics: MetricsLog, class_oracles: Collection[str]) -> None:
        self.alarms = 0
        self._metrics = metrics
        self._alarm = LeakAlarm(class_oracles)
        self._measured_epoch = 0
        self._said: set[tuple[str, str]] = set()

    def note_charge(self, epoch: int, sum_kl: float) -> None:
        self._alarm.note_charge(epoch, sum_kl)

    def note_leak(self, measured: AuditedBatch) -> None:
        """Note a measured batch, and judge the epochs before it."""
        if measured.epoch > self._measured_epoch:  # the monitor may lag behind the training
            self.judge_measured()
            self._measured_epoch = measured.epoch
        self._alarm.note_leak(measured)

    def judge_measured(self) -> None:
        """Judge all epochs up to the last one with a measured batch."""
        for alarm in self._alarm.judge(self._measured_epoch):
            self.alarms += 1
            self._report(alarm)

    def state_dict(self) -> State:
        return {
            "alarm": self._alarm.state_dict(),
            "alarms": self.alarms,
            "measured_epoch": self._measured_epoch,
            "said": sorted(map(list, self._said)),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned; other entries are ignored."""
        self._alarm.load_state_dict(state["alarm"])
        self.alarms, self._measured_epoch = state["alarms"], state["measured_epoch"]
        # What this process has said before it went back is said all the same.
        self._said |= {(attack, layer) for attack, layer in state["said"]}

    def _report(self, alarm: Alarm) -> None:
        figure = AttackFigure(alarm.layer, alarm.attack, alarm.measured)
        self._metrics.write(AlarmLine(self._measured_epoch, figure, alarm.margin, alarm.bound))
        if (alarm.attack, alarm.layer) in self._said:
            return
        self._said.add((alarm.attack, alarm.layer))
        logger.error(
            "LEAK ALARM: up to epoch %d: %s at %s measures a leak AUC of %.3f (+- %.3f), above "
            "the %s that the ledger states for one answer: the charges of this defense "
            "do not describe this attack on these gradients; later epochs of the same are in "
            "metrics.jsonl",
            self._measured_epoch + 1,
            alarm.attack,
            alarm.layer,
            alarm.measured,
            alarm.margin,
            auc_at_most(alarm.bound),
        )


class GateFinding(NamedTuple):
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
        self._windows: dict[tuple[str, str], deque[tuple[float, float]]] = {}
        """(layer, attack) -> the leak AUC of its last batches, each with that of random scores."""
        self._until_next = 0

    def note(self, measured: AuditedBatch) -> GateFinding | None:
        """Return the attack furthest above the limit, if any, at most once per window."""
        settings, measured = self._settings, measured.mirrored()
        for layer, attacks in measured.leak.items():
            for attack, value in attacks.items():
                if settings.attack in (None, attack):
                    self._window(layer, attack).append((value, measured.random))
        self._until_next -= 1
        if self._until_next > 0:
            return None
        found = [
            GateFinding(measured.epoch, measured.step, attack, layer, *self._together(window))
            for (layer, attack), window in self._windows.items()
            if len(window) == settings.window_steps
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
        windows = [[*key, list(map(list, window))] for key, window in self._windows.items()]
        return {"windows": windows, "until_next": self._until_next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of ``state_dict``; a shorter window keeps its latest batches."""
        self._windows = {}
        for layer, attack, batches in state["windows"]:
            self._window(layer, attack).extend((leak, random) for leak, random in batches)
        self._until_next = state["until_next"]

    def _window(self, layer: str, attack: str) -> deque[tuple[float, float]]:
        empty: deque[tuple[float, float]] = deque(maxlen=self._settings.window_steps)
        return self._windows.setdefault((layer, attack), empty)

    def _together(self, window: deque[tuple[float, float]]) -> tuple[float, float]:
        quantile = self._settings.quantile
        leak, random = (
            float(np.mean(values) if quantile == "mean" else np.quantile(values, quantile))
            for values in zip(*window, strict=True)
        )
        return leak, random


class GateActions:
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
        found = self._gate.note(measured)
        if found is None or self.objection is not None:
            return
        self._findings += 1
        figure = AttackFigure(found.layer, found.attack, found.measured)
        limit = self._settings.max_leak_auc
        self._metrics.write(GateLine(found.epoch, found.step, figure, found.random, limit))
        sentence = self._gate.sentence(found)
        if self._settings.action == "stop":
            self.objection = LeakGateClosed(sentence)
        else:
            logger.warning(sentence)

    def figures(self) -> GateFigures | None:
        """Return the gate's actions for the summary; None without a gate."""
        closed = self.objection is not None
        return None if self._gate is None else GateFigures(self._findings, closed)

    def state_dict(self) -> State:
        gate = None if self._gate is None else self._gate.state_dict()
        return {"gate": gate, "gate_findings": self._findings}

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned; other entries are ignored."""
        if self._gate is not None and state["gate"] is not None:
            self._gate.load_state_dict(state["gate"])
        self._findings = state["gate_findings"]

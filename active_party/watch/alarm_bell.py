"""Operates the leak alarm: passes charges and measurements to it, and reports its alarms."""

import logging
from collections.abc import Collection

from splitveil.active_party.watch.leak_alarm import Alarm, LeakAlarm
from splitveil.common.privacy.audit import BatchLeak
from splitveil.common.record.figures import AttackFigure
from splitveil.common.record.lines import AlarmLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.run.progress import State
from splitveil.common.text.upper_bounds import auc_at_most

logger = logging.getLogger(__name__)


class AlarmBell:
    """Has the epochs judged as they are measured; every alarm is recorded, one of each kind logged.

    An alarm's kind is its attack and layer: an attack that passes its bound usually does so in
    every epoch.

    Args:
        metrics: gets a line for each alarm.
        class_oracles: names of the attacks that know classes, which the alarm ignores.
    """

    def __init__(self, metrics: MetricsLog, class_oracles: Collection[str]) -> None:
        self.alarms = 0
        """Number of alarms so far."""
        self._metrics = metrics
        self._alarm = LeakAlarm(class_oracles)
        self._measured_epoch = 0
        self._said: set[tuple[str, str]] = set()

    def note_charge(self, epoch: int, sum_kl: float) -> None:
        """Note the charge of an answer."""
        self._alarm.note_charge(epoch, sum_kl)

    def note_leak(self, measured: BatchLeak) -> None:
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
        """Return everything that was noted."""
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

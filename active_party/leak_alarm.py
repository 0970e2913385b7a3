"""The leak alarm: notices when an attack measures more than an answer can have told.

A bound on the AUC is about the mean over many draws, and a batch's AUC strays from its mean, the
more so the fewer positives the batch holds. Therefore a whole epoch is judged at once: the mean
over its batches of an attack's leak AUC, less what random scores gained on the same batches by
being turned around, and less ``STANDARD_ERRORS`` of that mean, is compared with the guarantee of
the epoch's largest single charge. It is the single answer that counts here, not the run: an attack
of the monitor sees one answer. Epochs of fewer than ``MIN_BATCHES`` measured batches are not
judged.

An alarm means that the charge does not describe the gradients sent: an error in a defense, or
gradients that its model of two classes does not fit.
"""

import math
import statistics
from collections import defaultdict
from typing import NamedTuple

from active_party.defenses.sum_kl import leak_auc_bound
from common.privacy.audit import BatchLeak

MIN_BATCHES = 20
STANDARD_ERRORS = 4.0


class Alarm(NamedTuple):
    """An attack that found more than it can have been told."""

    attack: str
    layer: str
    measured: float
    """Mean leak AUC over the epoch's batches, less the gain of random scores."""
    margin: float
    """What chance may account for."""
    guarantee: float
    """AUC that no score on one of the epoch's answers can pass."""


class LeakAlarm:
    """Judges one epoch after the other."""

    def __init__(self) -> None:
        self._largest: dict[int, float] = defaultdict(float)
        self._gains: dict[int, dict[tuple[str, str], list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def note_charge(self, epoch: int, sum_kl: float) -> None:
        """Note what an answer of an epoch was charged."""
        self._largest[epoch] = max(self._largest[epoch], sum_kl)

    def note_leak(self, measured: BatchLeak) -> None:
        """Note what the attacks found in an answer of an epoch."""
        series = self._gains[measured.epoch]
        for layer, attacks in measured.leak.items():
            for attack, value in attacks.items():
                series[layer, attack].append(value - measured.random)

    def judge(self, epoch: int) -> list[Alarm]:
        """Return the alarms of an epoch, and forget it."""
        guarantee = leak_auc_bound(self._largest.pop(epoch, 0.0))
        found = []
        for (layer, attack), gains in self._gains.pop(epoch, {}).items():
            if len(gains) < MIN_BATCHES:
                continue
            measured = 0.5 + statistics.fmean(gains)
            margin = STANDARD_ERRORS * statistics.stdev(gains) / math.sqrt(len(gains))
            if measured - margin > guarantee:
                found.append(Alarm(attack, layer, measured, margin, guarantee))
        return found

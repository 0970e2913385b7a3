"""Measures the leak of a run during training, and records the figures."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.privacy.audit import AuditedBatch, LeakAudit, LeakByAttack
from splitveil.common.privacy.audit_worker import AuditWorker
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.custom_attacks import load_custom_attacks
from splitveil.common.privacy.figures import AttackFigure, LeakFigures
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.number_attacks import LabelNumbers
from splitveil.common.privacy.observation import TWO_CLASSES, LabelClasses, Observation
from splitveil.common.privacy.run_level import FeaturesOf
from splitveil.common.privacy.settings import AuditSettings
from splitveil.common.record.metrics_log import ChartClock, MetricsLog
from splitveil.common.record.run_record import EpochLeakLine, LeakLine, NumberLeakLine
from splitveil.common.run.course import Batch

logger = logging.getLogger(__name__)

IDLE_S = 120.0  # time that a checkpoint waits for the attacks on the batches before it
_COPYING = 10  # CPU time of the attacks between two copies, in units of a copy's CPU time


class AuditedRun(NamedTuple):
    seed: bytes  # the joint seed; both parties pick the same positives by it
    num_examples: int
    labels: LabelClasses | LabelNumbers = TWO_CLASSES
    keeps_scores: bool = False  # whether what attacks reveal beyond features will be measured


class LeakRecorder:
    """Attacks the gradients of a run in a separate thread, and records the figures.

    Both parties use one: on the gradients that they received or sent. Metrics get a ``leak`` line
    per batch and an ``epoch_leak`` line per epoch, once its batches are measured: the mean over
    them, and the leak AUC of the sums so far. With more than two classes, figures are about the
    pair separated best; of numbers, there is a line per epoch alone, with R2 in place of AUCs.
    ``on_leak`` is called in the audit's thread after a batch's line. With
    ``copied_with``, the thread copies its state and what that returns for `latest_copy`.
    """

    def __init__(
        self,
        settings: AuditSettings,
        metrics: MetricsLog,
        run: AuditedRun,
        on_leak: Callable[[AuditedBatch], None] | None = None,
        copied_with: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._metrics = metrics
        self._copied_with = copied_with
        self._next_copy_s = 0.0
        self._seed = run.seed
        self._on_leak = on_leak
        self._unwritten: StorageError | None = None
        self._next_epoch = 0
        self._ended_epoch = -1
        self._charting = ChartClock()
        self._audit = LeakAudit(
            settings.attack_names,
            run.num_examples,
            run.labels,
            load_custom_attacks(settings),
            keeps_scores=run.keeps_scores,
            convention=settings.convention,
        )
        self.needs_activations = self._audit.run.needs_activations
        self._worker = AuditWorker(
            self._audit,
            8 if settings.max_cpu_share else 1024,
            self._note,
            settings.max_cpu_share,
            None if copied_with is None else self._copy,
        )
        self._latest_copy = {} if copied_with is None else self._state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        self._audit.run.close_epoch()
        self._write_epochs(self._ended_epoch)

    def submit(
        self,
        batch: Batch,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        clean: Mapping[str, Tensor] | None = None,
        activations: Tensor | None = None,
        predictions: KnownPredictions | None = None,
    ) -> None:
        """Hand over the gradients of one batch without waiting.

        Gradients, (batch, ...) by layer, are as on the wire or derived from it. The oracle takes a
        positive's from ``clean``, those before the defense, if there are any.
        """
        if self._unwritten is not None:
            raise self._unwritten
        seen = Observation(
            batch.epoch,
            batch.step,
            gradients,
            labels,
            positions=torch.from_numpy(batch.positions.copy()),
            activations=activations,
            references_are_clean=clean is not None,
            predictions=predictions,
        )
        self._worker.submit_later(gradients, partial(self._with_clues, seen, clean or gradients))

    def end_epoch(self, epoch: int) -> None:
        """Note that an epoch is over; its line is written when its last batch is measured."""
        self._ended_epoch = max(self._ended_epoch, epoch)

    def shown(self) -> dict[str, float]:
        latest = self._audit.latest()
        if latest is None or self._audit.has_numbers:
            return {}
        layer = next(iter(latest.leak))
        # Raw: unlike the ledger's figure beside them, these contain what features reveal.
        return {f"raw_{name}_leak_auc": value for name, value in latest.leak[layer].items()}

    def summary(
        self, covariates: Covariates | None = None, features: FeaturesOf | None = None
    ) -> LeakFigures:
        """Return the part of the summary about the leak; call it after closing."""
        return self._audit.figures(covariates, features)

    def wait_until_idle(self, timeout_s: float = IDLE_S) -> bool:
        """Wait until all batches handed over are measured and written; return whether they are."""
        idle = self._worker.wait_until_idle(timeout_s)
        if self._unwritten is not None:
            raise self._unwritten
        return idle

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all measurements, once all batches handed over are measured."""
        if not self.wait_until_idle():
            logger.warning(
                "the leak audit is behind: a checkpoint is written without the last batches"
            )
        return self._state()

    def latest_copy(self) -> dict[str, Any]:
        """Return the measurements and what goes with them as the thread has copied them last.

        Nothing is waited for: how long attacks take depends on labels. The last batches may lack.
        """
        return self._latest_copy

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._audit.load_state_dict(state["audit"])
        except ValueError as error:
            raise SettingsError(f"attacks cannot change within a run: {error}") from error
        self._next_epoch = state["next_epoch"]
        self._ended_epoch = state["ended_epoch"]
        self._latest_copy = {} if self._copied_with is None else self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "audit": self._audit.state_dict(),
            "next_epoch": self._next_epoch,
            "ended_epoch": self._ended_epoch,
            "with": None if self._copied_with is None else self._copied_with(),
        }

    def _copy(self) -> None:
        begun_s = time.thread_time()
        if begun_s >= self._next_copy_s:
            self._latest_copy = self._state()
            ended_s = time.thread_time()
            self._next_copy_s = ended_s + _COPYING * (ended_s - begun_s)

    def _with_clues(self, seen: Observation, sources: Mapping[str, Tensor]) -> Observation:
        return dataclasses.replace(seen, clues=self._audit.clues(seen, self._seed, sources))

    def _write_epochs(self, last_epoch: int) -> None:
        while self._next_epoch <= last_epoch:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
            found = (self._audit.epoch_means(epoch), self._audit.run.after_epoch(epoch))
            figures = (*attack_figures(found[0]), *attack_figures(found[1]))
            if not self._audit.has_numbers:
                self._metrics.write(EpochLeakLine(epoch, figures))
            elif found[0]:
                of_attacks = {attack: r2 for _, attack, r2 in figures}
                self._metrics.write(NumberLeakLine(epoch, of_attacks))

    def _note(self, measured: AuditedBatch) -> None:
        try:
            self._write_epochs(measured.epoch - 1)
            if not self._audit.has_numbers:
                figures = attack_figures(measured.leak)
                line = LeakLine(measured.epoch, measured.step, figures, measured.random)
                self._metrics.write(line, charted=self._charting.is_due())
        except StorageError as error:
            # A full disk ends the run; this thread cannot, so the next batch does.
            self._unwritten = error
            raise
        if self._on_leak is not None:
            self._on_leak(measured)


def attack_figures(leak: LeakByAttack) -> tuple[AttackFigure, ...]:
    return tuple(
        AttackFigure(layer, attack, value)
        for layer, attacks in leak.items()
        for attack, value in attacks.items()
    )

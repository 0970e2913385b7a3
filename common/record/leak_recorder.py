"""What a party finds out and writes down of the leak: an audit beside the training, its figures."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.privacy.audit import BatchLeak, LeakAudit
from splitveil.common.privacy.audit_worker import AuditWorker
from splitveil.common.privacy.custom_attacks import load_custom_attacks
from splitveil.common.privacy.observation import Observation
from splitveil.common.privacy.settings import AuditSettings
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.run.course import Batch

logger = logging.getLogger(__name__)

IDLE_S = 120.0
"""How long a checkpoint waits for the attacks on the batches before it."""

_CHARTED_EVERY_S = 0.5
"""Least time between two batches in TensorBoard's charts: a point there costs a thread as much CPU
as some attacks. The metrics file has a line for each batch."""


class LeakRecorder:
    """Attacks the gradients of a run in a thread of its own, and writes down what that finds.

    Both parties have one: the passive party's adversary, on what it received, and the active
    party's leak monitor, on what it sent.

    Args:
        settings: which attacks, how often.
        metrics: gets a ``leak`` line per batch and an ``epoch_leak`` line per epoch, once all its
            batches are measured: the mean over them, and the leak AUC of the sums so far. With
            several classes these are figures of the pair of classes told apart best.
        seed: the joint seed, from which both parties pick the same positives.
        num_examples: aligned examples of the run.
        on_leak: called in the audit's thread with each measured batch, after its line is written.
        class_names: of several classes; none where there are two.
    """

    def __init__(
        self,
        settings: AuditSettings,
        metrics: MetricsLog,
        seed: bytes,
        num_examples: int,
        on_leak: Callable[[BatchLeak], None] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        self._metrics = metrics
        self._seed = seed
        self._on_leak = on_leak
        self._unwritten: StorageError | None = None
        self._next_epoch = 0
        self._ended_epoch = -1
        self._charted_s = -_CHARTED_EVERY_S
        self._audit = LeakAudit(
            settings.attack_names,
            settings.every_steps,
            num_examples,
            class_names,
            load_custom_attacks(settings),
        )
        self._worker = AuditWorker(
            self._audit, settings.queue_batches, self._note, settings.max_cpu_share
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._worker.close()
        self._audit.end_run()
        self._write_epochs(self._ended_epoch)

    def submit(
        self,
        batch: Batch,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        clean: Mapping[str, Tensor] | None = None,
        activations: Tensor | None = None,
    ) -> None:
        """Hand over the gradients of one batch without waiting.

        Args:
            batch: which rows of which step.
            gradients: layer -> gradients, (batch, ...), as they crossed the wire or came of that.
            labels: (batch,).
            clean: layer -> gradients before the defense, from which the oracle takes a positive's;
                without them it takes one of ``gradients``.
            activations: of the cut layer, (batch, ...), for the attacks that use them.

        Raises:
            StorageError: a line of an earlier batch could not be written.
        """
        if self._unwritten is not None:
            raise self._unwritten
        self._worker.submit_later(
            batch.step,
            gradients,
            partial(self._observation, batch, gradients, labels, clean, activations),
        )

    def end_epoch(self, epoch: int) -> None:
        """Note that an epoch is over; its line is written when its last batch is measured."""
        self._ended_epoch = epoch

    def shown(self) -> dict[str, float]:
        """Return the latest leak AUCs of the first layer, for the progress line."""
        latest = self._audit.latest()
        if latest is None:
            return {}
        layer = next(iter(latest.leak))
        return {f"{name}_leak_auc": value for name, value in latest.leak[layer].items()}

    def summary(self) -> dict[str, Any]:
        """Return the parts of ``summary.json`` that are about the leak; call it when closed."""
        found: dict[str, Any] = {
            "leak": self._audit.summary(),
            "leak_worst_epoch": self._audit.worst_epochs(),
        }
        run = self._audit.run_figures()
        found |= {"leak_run_level": run.leak}
        if self._audit.is_multi_class:
            found |= {
                "leak_classes": self._audit.classes(),
                "leak_run_level_classes": run.by_class,
            }
        return found | {"leak_batches": self._audit.counts()._asdict()}

    def wait_until_idle(self, timeout_s: float = IDLE_S) -> bool:
        """Wait until all batches handed over are measured and written, and say whether they are.

        Raises:
            StorageError: a line of one of them could not be written.
        """
        idle = self._worker.wait_until_idle(timeout_s)
        if self._unwritten is not None:
            raise self._unwritten
        return idle

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that was found out, once all batches handed over are measured.

        Their lines are written by then: what the metrics file holds afterwards of later batches
        comes again when the run goes on from here.

        Raises:
            StorageError: a line could not be written.
        """
        if not self.wait_until_idle():
            logger.warning("the leak audit is behind: a checkpoint goes without the last batches")
        return {
            "audit": self._audit.state_dict(),
            "next_epoch": self._next_epoch,
            "ended_epoch": self._ended_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` left off, instead of with what was found out since.

        Raises:
            SettingsError: the state is of other attacks than the settings name.
        """
        self.wait_until_idle()
        try:
            self._audit.load_state_dict(state["audit"])
        except ValueError as error:
            raise SettingsError(f"attacks cannot change within a run: {error}") from error
        self._next_epoch = state["next_epoch"]
        self._ended_epoch = state["ended_epoch"]

    def _observation(
        self,
        batch: Batch,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        clean: Mapping[str, Tensor] | None,
        activations: Tensor | None,
    ) -> Observation:
        """Put together what the attacks see and know."""
        seen = Observation(
            batch.epoch,
            batch.step,
            gradients,
            labels,
            positions=torch.from_numpy(batch.positions.copy()),
            activations=activations,
            references_are_clean=clean is not None,
        )
        sources = gradients if clean is None else clean
        return dataclasses.replace(seen, clues=self._audit.clues(seen, self._seed, sources))

    def _write_epochs(self, last_epoch: int) -> None:
        while self._next_epoch <= last_epoch:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
            numbers = {
                f"{layer}/{attack}": value
                for found in (self._audit.epoch_means(epoch), self._audit.after_epoch(epoch))
                for layer, attacks in found.items()
                for attack, value in attacks.items()
            }
            self._metrics.write("epoch_leak", numbers, epoch=epoch)

    def _is_to_be_charted(self) -> bool:
        now_s = time.monotonic()
        charted = now_s - self._charted_s >= _CHARTED_EVERY_S
        if charted:
            self._charted_s = now_s
        return charted

    def _note(self, measured: BatchLeak) -> None:
        try:
            self._write_epochs(measured.epoch - 1)
            self._metrics.write(
                "leak",
                measured.numbers(),
                epoch=measured.epoch,
                step=measured.step,
                charted=self._is_to_be_charted(),
            )
        except StorageError as error:
            # A full disk ends the run; this thread cannot, so the next batch does.
            self._unwritten = error
            raise
        if self._on_leak is not None:
            self._on_leak(measured)

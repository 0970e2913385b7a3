"""What a party finds out and writes down of the leak: an audit beside the training, its figures."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from common.privacy.audit import (
    AuditWorker,
    BatchLeak,
    LeakAudit,
    Observation,
    pick_reference_row,
)
from common.privacy.settings import AuditSettings
from common.run_course import Batch
from common.telemetry import MetricsLog


class LeakRecorder:
    """Attacks the gradients of a run in a thread of its own, and writes down what that finds.

    Both parties have one: the passive party's adversary, on what it received, and the active
    party's leak monitor, on what it sent.

    Args:
        settings: which attacks, how often.
        metrics: gets a ``leak`` line per batch and an ``epoch_leak`` line per epoch.
        seed: the joint seed, from which both parties pick the same positives.
        on_leak: called in the audit's thread with each measured batch, after its line is written.
    """

    def __init__(
        self,
        settings: AuditSettings,
        metrics: MetricsLog,
        seed: bytes,
        on_leak: Callable[[BatchLeak], None] | None = None,
    ) -> None:
        self._metrics = metrics
        self._seed = seed
        self._on_leak = on_leak
        self._next_epoch = 0
        self._audit = LeakAudit(settings.attacks, settings.every_steps)
        self._worker = AuditWorker(self._audit, settings.queue_batches, self._note)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._worker.close()

    def submit(
        self,
        batch: Batch,
        gradients: Mapping[str, Tensor],
        labels: Tensor,
        clean: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Hand over the gradients of one batch without waiting.

        Args:
            batch: which rows of which step.
            gradients: layer -> gradients, (batch, ...), as they crossed the wire or came of that.
            labels: (batch,).
            clean: layer -> gradients before the defense, from which the oracle takes a positive's;
                without them it takes one of ``gradients``.
        """
        if not self._audit.wants(batch.step):
            return
        row = pick_reference_row(labels, self._seed, batch.epoch, batch.step)
        sources = gradients if clean is None else clean
        references = {} if row is None else {name: rows[row] for name, rows in sources.items()}
        self._worker.submit(
            Observation(batch.epoch, batch.step, gradients, labels, references, row)
        )

    def end_epoch(self, epoch: int) -> None:
        """Write down an epoch's mean leak, once."""
        if epoch < self._next_epoch:
            return
        self._next_epoch = epoch + 1
        means = self._audit.epoch_means(epoch)
        numbers = {f"{k}/{a}": v for k, attacks in means.items() for a, v in attacks.items()}
        self._metrics.write("epoch_leak", numbers, epoch=epoch)

    def shown(self) -> dict[str, float]:
        """Return the latest leak AUCs of the first layer, for the progress line."""
        latest = self._audit.latest()
        if latest is None:
            return {}
        layer = next(iter(latest.leak))
        return {f"{name}_leak_auc": value for name, value in latest.leak[layer].items()}

    def summary(self) -> dict[str, Any]:
        """Return the parts of ``summary.json`` that are about the leak; call it when closed."""
        return {"leak": self._audit.summary(), "leak_batches": self._audit.counts()._asdict()}

    def _note(self, measured: BatchLeak) -> None:
        self._metrics.write("leak", measured.numbers(), epoch=measured.epoch, step=measured.step)
        if self._on_leak is not None:
            self._on_leak(measured)

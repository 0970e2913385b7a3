"""What the passive party writes down of a run: progress, and its adversary's findings."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from common.party_data import PartyData
from common.privacy.audit import (
    AuditWorker,
    BatchLeak,
    LeakAudit,
    Observation,
    pick_reference_row,
)
from common.run_course import AlignedRows, Batch
from common.telemetry import MetricsLog, TrainingProgress
from passive_party.settings import PassiveSettings


class PassiveRecorder:
    """Observes a run, and attacks the gradients that were really received.

    Args:
        settings: the party's settings.
        folder: the run's folder.
        ids: this party's canonical ids.
        evaluation_labels: labels that both sides know, or None: then there is no leak AUC here.
    """

    def __init__(
        self,
        settings: PassiveSettings,
        folder: Path,
        ids: list[str],
        evaluation_labels: PartyData | None,
    ) -> None:
        self.aligned_rows = 0
        self._settings = settings
        self._ids = ids
        self._evaluation_labels = evaluation_labels
        self._resources = ExitStack()
        self._metrics = self._resources.enter_context(MetricsLog(folder))
        self._progress: TrainingProgress | None = None
        self._labels: Tensor | None = None
        self._seed = b""
        self._steps = 0
        self._epochs = 0
        self._audit: LeakAudit | None = None
        self._adversary: AuditWorker | None = None
        if settings.adversary is not None and evaluation_labels is not None:
            self._audit = LeakAudit(settings.adversary.attacks, settings.adversary.every_steps)
            self._adversary = AuditWorker(
                self._audit, settings.adversary.queue_batches, self._on_leak
            )
            self._resources.callback(self._adversary.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        """Show nothing yet: small sets are through before a bar would be drawn."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Look up the evaluation labels and start the progress bar."""
        self.aligned_rows = len(rows)
        self._seed = seed
        self._metrics.steps_per_epoch = rows.order.steps_per_epoch
        self._metrics.write("alignment", {"aligned_rows": len(rows)})
        if self._evaluation_labels is not None:
            ids = [self._ids[row] for row in rows.file_rows]
            self._labels = self._evaluation_labels.labels_of(ids)
        total = rows.total_steps(self._settings.contract)
        self._progress = self._resources.enter_context(TrainingProgress("passive", total))

    def on_step(self, batch: Batch, received: Tensor, layers: dict[str, Tensor]) -> None:
        """Hand the gradients to the adversary."""
        self._steps += 1
        self._attack(batch, received, layers)
        if self._progress is not None:
            self._progress.advance(**self._shown_leak())

    def on_epoch(self, epoch: int) -> None:
        """Note the epoch's mean leak."""
        self._epochs = epoch + 1
        if self._audit is not None:
            means = self._audit.epoch_means(epoch)
            numbers = {f"{k}/{a}": v for k, attacks in means.items() for a, v in attacks.items()}
            self._metrics.write("epoch_leak", numbers, epoch=epoch)

    def summary(self) -> dict[str, Any]:
        """Return what ``summary.json`` holds; call it after the recorder was closed."""
        summary: dict[str, Any] = {
            "aligned_rows": self.aligned_rows,
            "epochs": self._epochs,
            "steps": self._steps,
            "steps_per_s": self._progress.steps_per_s if self._progress else None,
        }
        if self._audit is not None:
            summary["leak"] = self._audit.summary()
            summary["leak_batches"] = self._audit.counts()._asdict()
        return summary

    def _attack(self, batch: Batch, received: Tensor, layers: dict[str, Tensor]) -> None:
        adversary, labels = self._adversary, self._labels
        if adversary is None or labels is None or self._settings.adversary is None:
            return
        chosen = self._settings.adversary.layers
        gradients = {name: received if name == "cut" else layers[name] for name in chosen}
        labels = labels[torch.from_numpy(batch.positions.copy())]
        row = pick_reference_row(labels, self._seed, batch.epoch, batch.step)
        # This side has no clean gradient: its reference is a positive's gradient as received.
        references = {} if row is None else {name: g[row] for name, g in gradients.items()}
        adversary.submit(Observation(batch.epoch, batch.step, gradients, labels, references, row))

    def _shown_leak(self) -> dict[str, float]:
        latest = self._audit.latest() if self._audit is not None else None
        if latest is None:
            return {}
        layer = next(iter(latest.leak))
        return {f"{name}_leak_auc": value for name, value in latest.leak[layer].items()}

    def _on_leak(self, measured: BatchLeak) -> None:
        self._metrics.write("leak", measured.numbers(), epoch=measured.epoch, step=measured.step)

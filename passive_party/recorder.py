"""What the passive party writes down of a run: progress, and its adversary's findings."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from common.leak_recorder import LeakRecorder
from common.party_data import PartyData
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
        self._steps = 0
        self._epochs = 0
        self._leaks: LeakRecorder | None = None

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
        """Look up the evaluation labels, start the progress bar and the adversary."""
        self.aligned_rows = len(rows)
        self._metrics.steps_per_epoch = rows.order.steps_per_epoch
        self._metrics.write("alignment", {"aligned_rows": len(rows)})
        if self._evaluation_labels is not None:
            ids = [self._ids[row] for row in rows.file_rows]
            self._labels = self._evaluation_labels.labels_of(ids)
        if self._settings.adversary is not None and self._labels is not None:
            self._leaks = self._resources.enter_context(
                LeakRecorder(self._settings.adversary, self._metrics, seed, len(rows))
            )
        total = rows.total_steps(self._settings.contract)
        self._progress = self._resources.enter_context(TrainingProgress("passive", total))

    def on_step(self, batch: Batch, received: Tensor, layers: dict[str, Tensor]) -> None:
        """Hand the gradients to the adversary."""
        self._steps += 1
        self._attack(batch, received, layers)
        if self._progress is not None:
            self._progress.advance(**(self._leaks.shown() if self._leaks is not None else {}))

    def on_epoch(self, epoch: int) -> None:
        """Note the epoch's mean leak."""
        self._epochs = epoch + 1
        if self._leaks is not None:
            self._leaks.end_epoch(epoch)

    def summary(self) -> dict[str, Any]:
        """Return what ``summary.json`` holds; call it after the recorder was closed."""
        summary: dict[str, Any] = {
            "aligned_rows": self.aligned_rows,
            "epochs": self._epochs,
            "steps": self._steps,
            "steps_per_s": self._progress.steps_per_s if self._progress else None,
        }
        return summary if self._leaks is None else summary | self._leaks.summary()

    def _attack(self, batch: Batch, received: Tensor, layers: dict[str, Tensor]) -> None:
        if self._leaks is None or self._labels is None or self._settings.adversary is None:
            return
        chosen = self._settings.adversary.layers
        gradients = {name: received if name == "cut" else layers[name] for name in chosen}
        labels = self._labels[torch.from_numpy(batch.positions.copy())]
        # This side has no clean gradient: its reference is a positive's gradient as received.
        self._leaks.submit(batch, gradients, labels)

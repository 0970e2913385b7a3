"""Records a run at the passive party: progress, its adversary's findings, checkpoints, summary."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_status import OPEN, RunStatus
from splitveil.common.record.metrics_log import RunRecorder
from splitveil.common.record.progress import each_in_words
from splitveil.common.record.run_folder import clear_mark, storage_errors
from splitveil.common.record.run_record import RunCounts, Summary
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.text.files import replacing_file
from splitveil.passive_party.feature_exposure import (
    MOST_DIMENSIONS,
    Sample,
    SentInEpochs,
    random_directions,
)
from splitveil.passive_party.settings import PassiveSettings

if TYPE_CHECKING:
    from torch import Tensor

    from splitveil.common.privacy.run_level import FeaturesOf
    from splitveil.common.record.leak_recorder import LeakRecorder

logger = logging.getLogger(__name__)


class PassiveRecorder(RunRecorder):
    """Observes a run, and attacks the gradients that were received.

    Operators see in ``status`` only which batch it was, and nothing of what the adversary measures,
    which may say something about labels.
    """

    def __init__(
        self,
        settings: PassiveSettings,
        folder: Path,
        ids: Sequence[str],
        evaluation_labels: PartyData | None,
        status: RunStatus | None = None,
    ) -> None:
        if settings.adversary is not None:
            from splitveil.common.privacy.custom_attacks import try_custom_attacks  # noqa: PLC0415

            try_custom_attacks(settings.adversary, settings.contract.cut_shape)
        super().__init__(folder)
        self._settings = settings
        self._ids = ids
        self._status = status or RunStatus(settings.party, settings.contract)
        self._evaluation_labels = evaluation_labels
        self._labels: Tensor | None = None
        self._epochs = 0
        self._leaks: LeakRecorder | None = None  # only with labels
        self._received: list[dict[str, npt.NDArray[Any]]] = []  # by batch, if stored
        self.sample: Sample | None = None  # rows that the report measures activations on
        self._places = np.empty(0, dtype=np.int64)  # in the sample, of each position; -1 outside
        self._sent = np.empty((0, 0), dtype=np.float32)  # of the sample's rows, over all epochs
        self._epochs_sent: set[int] = set()

    def on_opened(self, run_id: str) -> None:
        """Unmark a run that had ended for good: the active party has opened it again."""
        self._status.name_run(run_id)
        self._status.enter_stage("aligning")
        self._status.set_ready(OPEN)
        clear_mark(self._folder)

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        """Draw no bar: small sets are aligned before it could be seen."""
        self._status.note_alignment(done_ids, total_ids)

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        self._begin_run(rows)
        self._start_attacks(rows, seed)
        self._draw_sample(rows)
        self._show_progress(rows, self._settings.contract)
        self._status.note_aligned(rows)
        self._status.enter_stage("training")

    def on_step(
        self, batch: Batch, sent: "Tensor", received: "Tensor", layers: "dict[str, Tensor]"
    ) -> None:
        self._steps += 1
        self._attack(batch, sent, received, layers)
        self._keep_of_sample(batch, sent)
        if self._settings.adversary is not None and self._settings.adversary.store_received:
            self._received.append(self._rows_of(batch, sent, received))
        if self._progress is not None:
            self._progress.advance(**(self._leaks.shown() if self._leaks is not None else {}))
        self._status.note_step(batch)

    def on_epoch(self, epoch: int) -> None:
        self._epochs = epoch + 1
        if self._received:
            path = self._folder / f"received-{epoch + 1:04}.npz"
            with storage_errors(path, "cannot be written"), replacing_file(path) as file:
                arrays: dict[str, Any] = {
                    name: np.concatenate([batch[name] for batch in self._received])
                    for name in self._received[0]
                }
                np.savez(file, **arrays)
            self._received.clear()
        if self._leaks is not None:
            self._leaks.end_epoch(epoch)
        latest = {} if self._leaks is None else self._leaks.shown()
        strongest = max(latest, key=lambda name: latest[name], default=None)
        figures = {} if strongest is None else {strongest: latest[strongest]}
        shown = [f"{figure} (features included)" for figure in each_in_words(figures)]
        self._log_epoch(epoch, self._settings.contract, shown)

    def on_resumed(self, epoch: int | None) -> None:
        self._status.note_resumed(epoch)
        self._status.enter_stage("training")
        logger.info("resuming %s", "at the end" if epoch is None else f"in epoch {epoch + 1}")

    def summary(self, features: "FeaturesOf | None" = None) -> Summary:
        """Return the figures; with features, also model completion's figures on these."""
        speed = self._progress.per_s if self._progress else None
        of_steps = self._epochs, self._steps, speed
        is_one_shot = self._settings.contract.is_one_shot
        return Summary(
            counts=RunCounts(self.aligned_rows, *(() if is_one_shot else of_steps)),
            leak=None if self._leaks is None else self._leaks.summary(features=features),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state between steps, once the attacks on all batches are done."""
        leaks = None if self._leaks is None else self._leaks.state_dict()
        self._status.note_checkpoint()
        return {
            "steps": self._steps,
            "epochs": self._epochs,
            "leaks": leaks,
            "sent": self._sent.copy(),
            "epochs_sent": sorted(self._epochs_sent),
            "metrics": self._metrics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; measuring may be switched on and off, but attacks may not change."""
        self._received.clear()
        self._steps, self._epochs = state["steps"], state["epochs"]
        if self._progress is not None:
            self._progress.resume_at(self._steps)
        if self._leaks is not None:
            self._leaks.wait_until_idle()
            if state["leaks"] is not None:
                self._leaks.load_state_dict(state["leaks"])
        self._metrics.load_state_dict(state["metrics"])
        self._sent = state["sent"]
        self._epochs_sent = {*state["epochs_sent"]}

    def sent_in_epochs(self) -> SentInEpochs | None:
        """Return what was sent of the sample's rows in all epochs; None if there was none."""
        if not self._epochs_sent:
            return None
        count = len(self._epochs_sent)
        return SentInEpochs(count, count * self._settings.contract.cut_dim, self._sent)

    def _draw_sample(self, rows: AlignedRows) -> None:
        contract = self._settings.contract
        among = np.arange(len(rows)) if contract.is_one_shot else rows.splits["train"]
        self.sample = Sample.draw(among)
        self._epochs_sent.clear()
        if self.sample is not None and not contract.is_one_shot:
            self._places = np.full(len(rows), -1)
            self._places[self.sample.positions] = np.arange(len(self.sample.positions))
            values = min(contract.epochs * contract.cut_dim, MOST_DIMENSIONS)
            self._sent = np.zeros((len(self.sample.positions), values), dtype=np.float32)

    def _keep_of_sample(self, batch: Batch, sent: "Tensor") -> None:
        """Put this epoch's activations beside earlier epochs' ones, or add their projection."""
        if self.sample is None:
            return
        places = self._places[batch.positions]
        values = sent.detach()[np.flatnonzero(places >= 0)].flatten(1).float().cpu().numpy()
        places, width = places[places >= 0], values.shape[1]
        self._epochs_sent.add(batch.epoch)
        if self._settings.contract.epochs * width <= MOST_DIMENSIONS:
            self._sent[places, batch.epoch * width : (batch.epoch + 1) * width] = values
        else:
            self._sent[places] += values @ random_directions(width, batch.epoch + 1)

    def _rows_of(
        self, batch: Batch, sent: "Tensor", received: "Tensor"
    ) -> dict[str, npt.NDArray[Any]]:
        number = (batch.epoch << 32) + batch.step
        rows = {
            "gradients": received.detach().cpu().numpy(),
            "activations": sent.detach().cpu().numpy(),
            "examples": batch.positions,
            "batches": np.full(len(batch.positions), number),
        }
        if self._labels is not None:
            rows["labels"] = self._labels.numpy()[batch.positions]
        return rows

    def _start_attacks(self, rows: AlignedRows, seed: bytes) -> None:
        if self._evaluation_labels is None:
            return
        ids = [self._ids[row] for row in rows.file_rows]
        self._labels = self._evaluation_labels.labels_of(ids)
        chosen = self._settings.adversary
        if chosen is None or self._settings.contract.is_one_shot:  # no gradient comes
            return
        from splitveil.common.privacy.observation import LabelClasses  # noqa: PLC0415
        from splitveil.common.record.leak_recorder import AuditedRun, LeakRecorder  # noqa: PLC0415

        classes = LabelClasses(self._evaluation_labels.settings.class_names)
        self._leaks = self._of_run.enter_context(
            LeakRecorder(chosen, self._metrics, AuditedRun(seed, len(rows), classes))
        )

    def _attack(
        self, batch: Batch, sent: "Tensor", received: "Tensor", layers: "dict[str, Tensor]"
    ) -> None:
        if self._settings.adversary is None or self._leaks is None or self._labels is None:
            return
        chosen = self._settings.adversary.layers
        gradients = {name: received if name == "cut" else layers[name] for name in chosen}
        labels = self._labels[batch.positions.copy()]
        # This side has no clean gradient, so its reference is a positive's received gradient.
        self._leaks.submit(batch, gradients, labels, activations=sent)

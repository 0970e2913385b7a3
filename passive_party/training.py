"""Training on the passive party's side: steps, evaluations and checkpoints."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.course import AlignedRows, Batch, batch_in_words
from splitveil.common.run.messages import Activation, Answer, Course, bytes_of
from splitveil.common.run.progress import Phase, Phases, Progress, State, refusing_other_versions
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.opening import Peer

if TYPE_CHECKING:
    from torch import Tensor


class RunObserver(Protocol):
    def on_opened(self, run_id: str) -> None:
        """The active party has opened the run of this id, or resumes it."""

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        """The alignment has processed a part of both parties' ids."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Both parties hold the same rows."""

    def on_step(
        self, batch: Batch, sent: "Tensor", received: "Tensor", layers: "dict[str, Tensor]"
    ) -> None:
        """A gradient was received for an activation, and the bottom model learned from it."""

    def on_epoch(self, epoch: int) -> None:
        """An epoch is over, its evaluation included."""

    def on_resumed(self, epoch: int | None) -> None:
        """The run resumes from a checkpoint, in an epoch, or None if nothing is left to do."""

    def state_dict(self) -> State:
        """Return the observer's state, for a checkpoint."""

    def load_state_dict(self, state: State) -> None:
        """Restore a state, and forget everything seen since."""


class Training:
    """One run after its alignment: follows the course, and can be saved and resumed."""

    def __init__(
        self,
        run_id: str,
        rows: AlignedRows,
        trainer: ComponentsTrainer,
        progress: Progress,
        observer: RunObserver,
        phases: Phases,
    ) -> None:
        self.trainer: Any = trainer  # of a network, where gradients come
        self.progress = progress
        self._run_id = run_id
        self._rows = rows
        self._observer = observer
        self._phases = phases
        self._unanswered: deque[tuple[Batch, Any]] = deque()
        self._held_out_sent = 0  # without a reply
        self._transfers_sent = 0  # the same
        self._gathered: tuple[Batch, Any] | None = None
        self._unobserved: tuple[Batch, Any, Any, dict[str, Any]] | None = None

    # ---- checkpoints ----

    def save(self, *, soon: bool = False) -> None:
        with self._phases(Phase.CHECKPOINT):
            self.progress.save(self._state, soon=soon)

    def save_if_between_steps(self) -> None:
        """Save a checkpoint unless nothing has been done yet, or a step is under way."""
        if self.trainer.is_between_steps and self.progress.batch_number:
            self.save()

    def restore(self, batch_number: int) -> None:
        self._unanswered.clear()
        self._held_out_sent = self._transfers_sent = 0
        state = self.progress.store.load(batch_number)
        with refusing_other_versions():
            self.progress.go_to(batch_number)
            if state["is_over"]:
                self.progress.finish()
            self.trainer.load_state_dict(state["trainer"])
            self._observer.load_state_dict(state["observer"])
        self._observer.on_resumed(self.progress.epoch)

    def _state(self) -> State:
        return {
            "trainer": self.trainer.state_dict(),
            "observer": self._observer.state_dict(),
            "is_over": self.progress.is_over,
        }

    # ---- the course ----

    def follow_course(self, peer: Peer, stop_if_interrupted: Callable[[], None]) -> None:
        """Handle every remaining batch; the function may raise Interrupted before each."""
        try:
            while (batch := self.progress.due) is not None:
                stop_if_interrupted()
                if batch.split == "train":
                    self._train(peer)
                elif batch.split == "labels":
                    self._take_labels(peer, batch)
                elif batch.is_answered:
                    self._take_sums(peer, batch)
                else:
                    self._evaluate(peer, batch)
                    if batch.closes_epoch:
                        with self._phases(Phase.RECORD):
                            self._observer.on_epoch(batch.epoch)
                if self.progress.checkpoint_due:
                    self._report_step()
                    self.save(soon=not self.progress.is_over)
        finally:
            self._report_step()

    def _train(self, peer: Peer) -> None:
        while (batch := self.progress.to_send(len(self._unanswered))) is not None:
            self._send(peer, batch)
        # The peer computes now, so no party waits for this.
        self._report_step()
        if (ahead := self.progress.ahead(len(self._unanswered))) is not None:
            self._gathered = ahead, self._gather(ahead)
        with self._phases(Phase.WAIT):
            answer = peer.receive_gradient()
        batch, sent = self._unanswered.popleft()
        self._check(answer, batch)
        with self._phases(Phase.BACKWARD):
            layers = self.trainer.backward(answer.values)
        self.progress.advance()
        self._unobserved = batch, sent, answer.values, layers

    def _send(self, peer: Peer, batch: Batch) -> None:
        from splitveil.common.models.device import to_host  # noqa: PLC0415 - it needs torch

        given = self._given(batch)
        with self._phases(Phase.FORWARD):
            activation = self.trainer.forward(
                given, stashes_weights=self.progress.contract.pipeline_depth > 1
            )
        self._unanswered.append((batch, activation))
        peer.send_activation(Activation(batch.identity(self._run_id), to_host(activation)))

    def _take_labels(self, peer: Peer, batch: Batch) -> None:
        no_values: Any = np.empty((len(batch.positions), 0), np.float32)
        question = Activation(batch.identity(self._run_id), no_values)
        peer.send_activation(question)
        with self._phases(Phase.WAIT):
            answer = peer.receive_gradient()
        self._check(answer, batch)
        expected = self.progress.label_values
        if answer.values.shape[1:] != (expected,):  # more of them would be scores of more columns
            raise InvalidMessage(f"a noisy label has other than {expected} values")
        with self._phases(Phase.BACKWARD):
            self.trainer.take_labels(batch.positions, answer.values, is_last=batch.closes_split)
        self.progress.advance()

    def _take_sums(self, peer: Peer, batch: Batch) -> None:
        while (ahead := self.progress.to_transfer(self._transfers_sent)) is not None:
            with self._phases(Phase.FORWARD):
                question = bytearray(self.trainer.transfer_question(ahead))
            message: Any = np.frombuffer(question, np.uint8)
            peer.send_activation(Activation(ahead.identity(self._run_id), message))
            self._transfers_sent += 1
        with self._phases(Phase.WAIT):
            answer = peer.receive_gradient()
        self._transfers_sent -= 1
        self._check(answer, batch)
        with self._phases(Phase.BACKWARD):
            self.trainer.take_transferred(batch, bytes_of(answer.values))
        self.progress.advance()

    def _evaluate(self, peer: Peer, batch: Batch) -> None:
        self._report_step()
        while (ahead := self.progress.to_evaluate(self._held_out_sent)) is not None:
            features = self._given(ahead)
            with self._phases(Phase.EVALUATION):
                embedded = self.trainer.embed(features)
            peer.send_held_out(Activation(ahead.identity(self._run_id), embedded))
            self._held_out_sent += 1
        with self._phases(Phase.WAIT):
            stops = peer.receive_course() is Course.STOP
        self._held_out_sent -= 1
        if stops and not batch.closes_epoch:
            raise InvalidMessage("the peer ends the run in the middle of an epoch")
        self.progress.advance()
        if stops:
            self.progress.finish()

    def _given(self, batch: Batch) -> Any:
        gathered, self._gathered = self._gathered, None
        if gathered is not None and gathered[0] is batch:
            return gathered[1]
        return self._gather(batch)

    def _gather(self, batch: Batch) -> Any:
        """Return what the trainer takes of a batch."""
        gather = self.trainer.training_rows if batch.split == "train" else self.trainer.rows
        return gather(batch.positions)

    def _report_step(self) -> None:
        if self._unobserved is not None:
            step, self._unobserved = self._unobserved, None
            with self._phases(Phase.RECORD):
                self._observer.on_step(*step)

    def _check(self, answer: Answer, batch: Batch) -> None:
        is_due = answer.batch == batch.identity(self._run_id)
        has_rows = batch.split in ("transfer", "sums") or len(answer.values) == len(batch.positions)
        if not (is_due and has_rows):
            raise InvalidMessage(
                "the received gradient is not for " + batch_in_words(batch.epoch, batch.step)
            )

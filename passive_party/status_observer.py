"""Tells the operators' metrics about the events of a run, and passes them on.

Of a step it uses only which batch it was. What the adversary measures does not come here: with
evaluation labels its figures say something about labels.
"""

from torch import Tensor

from splitveil.common.errors import PeerUnreachable, SplitveilError
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.phases import Phase
from splitveil.common.run.progress import State
from splitveil.common.status.run_status import RunStatus
from splitveil.passive_party.training import RunObserver

OPEN = "the run is open with the active party"


class StatusObserver:
    """Passes events on to another observer, and notes them in a status."""

    def __init__(self, observer: RunObserver, status: RunStatus) -> None:
        self._observer = observer
        self._status = status

    def on_opened(self, run_id: str) -> None:
        """Note the run's id."""
        self._status.name_run(run_id)
        self._status.enter_stage("aligning")
        self._status.set_ready(OPEN)
        self._observer.on_opened(run_id)

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        """Note how far the alignment is."""
        self._status.note_alignment(done_ids, total_ids)
        self._observer.on_alignment_progress(done_ids, total_ids)

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Note the length of the run."""
        with self._status.phases(Phase.RECORD):
            self._observer.on_aligned(rows, seed)
        self._status.note_aligned(rows)
        self._status.enter_stage("training")

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        with self._status.phases(Phase.RECORD):
            self._observer.on_step(batch, sent, received, layers)
        self._status.note_step(batch)

    def on_epoch(self, epoch: int) -> None:
        """Pass on that an epoch is over."""
        with self._status.phases(Phase.RECORD):
            self._observer.on_epoch(epoch)

    def on_resumed(self, epoch: int | None) -> None:
        """Note where the run resumes."""
        self._status.note_resumed(epoch)
        self._status.enter_stage("training")
        self._observer.on_resumed(epoch)

    def state_dict(self) -> State:
        """Return the other observer's state, and note that a checkpoint is taken."""
        state = self._observer.state_dict()
        self._status.note_checkpoint()
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the other observer's state."""
        self._observer.load_state_dict(state)


class WatchedCalls:
    """Notes in a status whether the active party answers."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        status.peers.expect(ACTIVE)

    def answered(self) -> None:
        """Note that the active party is there."""
        self._status.peers.heard(ACTIVE)
        if self._status.run_id and not self._status.readiness.ready:
            self._status.set_ready(OPEN)

    def unanswered(self, error: SplitveilError) -> None:
        """Count the failure; a peer that cannot be reached is away."""
        self._status.note_failed_call(error)
        if isinstance(error, PeerUnreachable):
            self._status.peers.lost(ACTIVE)
            self._status.set_ready("the active party does not answer", ready=False)

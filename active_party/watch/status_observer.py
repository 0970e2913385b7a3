"""Tells the operators' metrics about the events of a run, and passes them on."""

from splitveil.active_party.ledger.bounds import LeakBounds
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.active_party.watch.active_status import ActiveStatus
from splitveil.active_party.watch.stored_figures import bounds_of_state
from splitveil.common.errors import SplitveilError
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.run.phases import Phase
from splitveil.common.run.progress import State


class StatusObserver:
    """Passes events on to another observer, and notes them in a status.

    Of a step it uses only which batch it was; figures about leak and model come with the lines that
    the other observer writes.

    Args:
        observer: of the run.
        status: what operators see of it.
    """

    def __init__(self, observer: SessionObserver, status: ActiveStatus) -> None:
        self._observer = observer
        self._status = status
        self._bounds: LeakBounds | None = None
        self._ahead: LeakBounds | None = None

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Note the length of the run."""
        with self._status.phases(Phase.RECORD):
            self._observer.on_aligned(rows, seed)
        self._status.note_aligned(rows)

    def on_resumed(self, epoch: int | None) -> None:
        """Note where the run resumes."""
        self._status.note_resumed(epoch)
        self._observer.on_resumed(epoch)

    def on_step(self, batch: Batch, result: StepResult) -> None:
        """Note that a step is done."""
        with self._status.phases(Phase.RECORD):
            self._observer.on_step(batch, result)
        self._status.note_step(batch)

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        """Note the bounds on earlier runs, which the budget counts as well."""
        self._note(bounds)
        self._observer.on_earlier_answers(examples, bounds)

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        """Note the bounds after an epoch."""
        self._note(bounds)
        with self._status.phases(Phase.RECORD):
            self._observer.on_ledger(epoch, bounds)

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        """Note the bounds on all answers of a run that resumes before some of them."""
        self._ahead = bounds
        self._note(self._bounds or bounds)
        self._observer.on_answers_ahead(bounds)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Pass on the figures of a split."""
        with self._status.phases(Phase.RECORD):
            self._observer.on_evaluation(evaluation)

    def on_epoch(self, epoch: int) -> None:
        """Pass on that an epoch is over."""
        with self._status.phases(Phase.RECORD):
            self._observer.on_epoch(epoch)

    def on_audit(self, question: AuditQuestion, leak_auc: float, party: str) -> None:
        """Pass on an audit; its names come from the peer, and are no labels of a metric."""
        self._observer.on_audit(question, leak_auc, party)

    def on_audits_answered(self, count: int) -> None:
        """Note the number of audits."""
        self._status.note_audits(count)
        self._observer.on_audits_answered(count)

    def objection(self) -> SplitveilError | None:
        """Return the other observer's objection."""
        return self._observer.objection()

    def state_dict(self) -> State:
        """Return the other observer's state, and note that a checkpoint is taken."""
        state = self._observer.state_dict()
        self._status.note_checkpoint()
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the other observer's state, and the bounds that it holds."""
        self._observer.load_state_dict(state)
        if state.get("bounds") is not None:
            self._note(bounds_of_state(state["bounds"]))

    def _note(self, bounds: LeakBounds) -> None:
        self._bounds = bounds
        self._status.note_bounds(bounds.or_more(self._ahead))

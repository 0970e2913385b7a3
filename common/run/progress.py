"""The progress of one party through a run, and the state that must survive its process. No disk.

``Progress`` knows which batch is due and when a checkpoint is due; ``RunIdentity`` holds the
constants of the whole run. Both are stored by a ``CheckpointStore``: ``RunStore`` has them on disk,
``NoStore`` forgets them (``common/record/run_store.py``).

``Phases`` accounts for a party's time: every moment of its process belongs to exactly one phase.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from splitveil.common.errors import DataError, StorageError
from splitveil.common.run import course
from splitveil.common.run.contract import Contract
from splitveil.common.run.sample_order import Positions, joint_seed
from splitveil.common.text.wording import VERSION

State = dict[str, Any]  # nested dicts, lists and tuples of tensors and plain values


class CheckpointStore(Protocol):
    """Keeps what a party needs in order to resume a run after its process has ended."""

    @property
    def keeps(self) -> bool:
        """Whether saved states can be read back."""

    def run(self) -> State | None:
        """Return the constants of the whole run; None if there is no run to resume."""

    def save_run(self, state: State) -> None:
        """Start a run: keep its constants, and delete everything of earlier runs."""

    def checkpoints(self) -> list[int]:
        """Return the batch numbers whose state can be loaded, ascending."""

    def load(self, batch_number: int) -> State:
        """Return the state after a number of batches, and forget the states after it."""

    def save(self, batch_number: int, state: State) -> None:
        """Keep the state after a number of batches."""

    def save_soon(self, batch_number: int, state: State) -> None:
        """Save like ``save``, but in another thread if the store has one."""


class RunIdentity(NamedTuple):
    """The identity of a run, and the values that it was started with."""

    run_id: str
    active_nonce: bytes  # the active party's share of the joint seed
    passive_nonces: tuple[bytes, ...]  # the passive parties' shares, in the contract's order
    file_rows: Positions  # this party's rows of the common ids, (aligned,), in any order
    data_digest: str  # distinguishes this party's data from others

    @property
    def seed(self) -> bytes:
        return joint_seed(self.active_nonce, *self.passive_nonces)

    def check_rows(self, num_rows: int) -> None:
        """Check that this party's file still has all rows of the run, or raise DataError."""
        if len(self.file_rows) and int(self.file_rows.max()) >= num_rows:
            raise other_data()

    def check_data(self, data_digest: str) -> None:
        """Check that this party's data have not changed since the run was started."""
        if data_digest != self.data_digest:
            raise other_data()


class Progress:
    def __init__(
        self, contract: Contract, rows: course.AlignedRows, store: CheckpointStore
    ) -> None:
        self.batch_number = 0  # number of batches that have been handled
        self.due: course.Batch | None = None  # the batch that is due; None after the last one
        self.checkpoint_due = False  # whether a checkpoint must be saved before the next batch
        self.store = store
        self.contract = contract
        self.rows = rows
        self._evaluations_ahead = course.evaluations_ahead(contract)
        self._course: Iterator[course.Batch] = iter(())
        self._ahead: deque[course.Batch] = deque()
        self.go_to(0)

    @property
    def label_values(self) -> int:
        """The values of a noisy label: one for each of several classes, otherwise one."""
        return 1 if self.contract.scores == 1 else self.contract.scores + 1

    @property
    def is_over(self) -> bool:
        return self.due is None

    @property
    def epoch(self) -> int | None:
        """The epoch of the batch that is due; None after the last batch."""
        return None if self.due is None else self.due.epoch

    def ahead(self, count: int) -> course.Batch | None:
        """Return the batch that is due after so many others; None beyond the last one."""
        while len(self._ahead) < count:
            batch = next(self._course, None)
            if batch is None:
                return None
            self._ahead.append(batch)
        return self._ahead[count - 1] if count else self.due

    def to_send(self, unanswered: int) -> course.Batch | None:
        """Return the training batch to send now; None if a gradient has to come first."""
        batch = self.ahead(unanswered)
        if batch is None or batch.split != "train" or unanswered == self.contract.pipeline_depth:
            return None
        before = self.ahead(unanswered - 1) if unanswered else None
        waits = before is not None and course.needs_all_gradients(self.contract, self.rows, before)
        return None if waits else batch

    def to_evaluate(self, unanswered: int) -> course.Batch | None:
        """Return the batch without gradient that is sent now; None before a reply has come."""
        batch = self.ahead(unanswered)
        if batch is None or batch.is_answered or unanswered >= self._evaluations_ahead:
            return None
        before = self.ahead(unanswered - 1) if unanswered else None
        return None if before is not None and before.closes_epoch else batch

    def to_transfer(self, unanswered: int) -> course.Batch | None:
        """Return the batch of a transfer, or of sums, to send now; None before a reply has come."""
        batch = self.ahead(unanswered)
        if batch is None or not unanswered:
            return batch
        is_ahead = batch.split == "transfer" and batch.step > 1  # the first needs the reply before
        return batch if is_ahead and unanswered < course.TRANSFERS_AHEAD else None

    def go_to(self, batch_number: int) -> None:
        self.batch_number = batch_number
        self._course = course.run_course(self.contract, self.rows, batch_number)
        self._ahead.clear()
        self.due = next(self._course, None)
        self.checkpoint_due = False

    def advance(self) -> None:
        handled, self.due = self.due, self.ahead(1)
        if self._ahead:
            self._ahead.popleft()
        self.batch_number += 1
        if handled is not None:
            self.checkpoint_due = course.is_checkpoint(self.contract, self.rows, handled)

    def finish(self) -> None:
        self.due = None

    def save(self, state: Callable[[], State], *, soon: bool = False) -> None:
        """Save a checkpoint, if the store keeps any, or raise StorageError; then it stays due."""
        if self.store.keeps:
            # A party's own part of noisy sums is stored before they are asked for, or sent.
            soon = soon and (self.due is None or self.due.split != "sums")
            save = self.store.save_soon if soon else self.store.save
            save(self.batch_number, state())
        self.checkpoint_due = False


@contextmanager
def refusing_other_versions() -> Iterator[None]:
    """Raise StorageError for a state whose parts cannot be loaded; each part checks itself."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else f"{error}"
        raise StorageError(
            f"the run was saved by another version of splitveil than this one, {VERSION} ({what}); "
            f"resume with that version, or start over with --fresh"
        ) from error


def other_data() -> DataError:
    """Return the error of a party whose data have changed since the run was started."""
    return DataError(
        "this party's data, or its files of pretrained weights, are not those that the run was "
        "started with; restore them, or start over with --fresh"
    )


class Phase(StrEnum):
    """A party's activity; its seconds are counted by these words."""

    ALIGNMENT = "alignment"
    """Finding the common ids, including the waits for the other party within it."""
    FORWARD = "forward"
    """The bottom model's activations; at the active party the top model and its gradient."""
    BACKWARD = "backward"
    """The optimizer's step, and at the passive party the backward pass before it."""
    DEFENSE = "defense"
    """Turning a gradient into the one that is sent."""
    ANSWER = "answer"
    """The rest of an answer: aggregation, ledger, and the log of answers."""
    EVALUATION = "evaluation"
    """Activations and predictions of held-out rows."""
    RECORD = "record"
    """Metrics, progress, and handing batches to the attacks."""
    CHECKPOINT = "checkpoint"
    """Copying the state for a checkpoint; another thread writes it to disk."""
    WAIT = "wait"
    """Waiting for the other party and the network, with encoding and sending."""
    OTHER = "other"
    """Everything else, such as reading data before the run and writing results after it."""


class Phases:
    """A clock that charges each moment to the phase that was entered last and has not been left.

    The seconds of all phases add up to the time since the clock was made. Threads may enter phases
    at the same time; the newest one then counts. Entering and leaving take a few microseconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entered: dict[object, Phase] = {}  # in the order of entry
        self._current = Phase.OTHER
        self._since = clock()
        self._seconds = dict.fromkeys(Phase, 0.0)

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count a party's time under a phase while the context is open."""
        stay = object()
        with self._lock:
            self._charge()
            self._entered[stay] = self._current = phase
        try:
            yield
        finally:
            with self._lock:
                self._charge()
                del self._entered[stay]
                self._current = next(reversed(self._entered.values()), Phase.OTHER)

    def seconds(self) -> Mapping[Phase, float]:
        """Return the seconds of each phase so far, the present one included."""
        with self._lock:
            self._charge()
            return dict(self._seconds)

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._current] += now - self._since
        self._since = now

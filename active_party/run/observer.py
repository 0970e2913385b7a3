"""The events of a run, as the active party's session reports them."""

from typing import Any, Protocol

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import State


class SessionObserver(Protocol):
    """Receives the events of a run, under the session's lock and while no party waits for it."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """All parties hold the same rows; called again if the run starts over."""

    def on_resumed(self, epoch: int | None) -> None:
        """Note a resume from a checkpoint, in an epoch, or at the run's end if that is None."""

    def on_step(self, batch: Batch, step: Step) -> None:
        """Note that a training step was answered, and that the top model has learned from it."""

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        """Earlier runs have answered about some of the training examples, within these bounds."""

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        """Note that an epoch's training rows have been handled, or that the run ends within it.

        Answers from before the run resumed, to questions still to come, are not in these bounds.
        """

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        """Note a resume from before some of the answers; the bounds are for all answers."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Note the evaluation of a held-out split."""

    def on_epoch(self, epoch: int) -> None:
        """Note that an epoch is over, including its evaluation."""

    def state_dict(self) -> State:
        """Return the observer's state, for a checkpoint."""

    def load_state_dict(self, state: State) -> None:
        """Restore a state, and forget everything seen since."""


class Unobserved:
    """Receives the events of a run and does nothing about them."""

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    on_aligned = on_resumed = on_step = on_epoch = on_evaluation = _ignore
    on_earlier_answers = on_ledger = on_answers_ahead = _ignore
    load_state_dict = _ignore

    def state_dict(self) -> State:
        return {}

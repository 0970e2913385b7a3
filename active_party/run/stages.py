"""The state machine of a run: its stages, and the table of transitions between them. No effects.

    waiting    -> handshaken  rejoining  ended
    rejoining  -> waiting  training  finished  ended
    handshaken -> waiting  training  ended
    training   -> waiting  training  finished  ended
    finished   -> training  finished

A run waits, shakes hands, aligns, trains and finishes. A process that finds a stored run rejoins it
instead. From every stage before the last answer the run can end early, by an error of this party
or because a passive party leaves. As long as nothing has been answered, a passive party may start
over, which leads back to waiting. A passive party that resumes leads back to training, even after
the last answer: it may have lost it.
"""

from collections.abc import Mapping
from enum import Enum

from splitveil.common.errors import OutOfStep


class Stage(Enum):
    """The stage of a run; the value completes the sentence "a message while …"."""

    WAITING = "waiting for the peer"
    REJOINING = "waiting for the peer to come back"
    HANDSHAKEN = "aligning"
    TRAINING = "training"
    FINISHED = "finished"
    ENDED = "ended early"


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.HANDSHAKEN, Stage.REJOINING, Stage.ENDED}),
    Stage.REJOINING: frozenset({Stage.WAITING, Stage.TRAINING, Stage.FINISHED, Stage.ENDED}),
    Stage.HANDSHAKEN: frozenset({Stage.WAITING, Stage.TRAINING, Stage.ENDED}),
    Stage.TRAINING: frozenset({Stage.WAITING, Stage.TRAINING, Stage.FINISHED, Stage.ENDED}),
    Stage.FINISHED: frozenset({Stage.TRAINING, Stage.FINISHED}),
    Stage.ENDED: frozenset(),
}
"""The stages that may follow each stage; the drawing above is this table."""


class RunStages:
    """The stage of one run, which changes only along the table."""

    def __init__(self) -> None:
        self._current = Stage.WAITING

    @property
    def current(self) -> Stage:
        return self._current

    @property
    def are_over(self) -> bool:
        """Whether nothing more will be answered for the first time."""
        return self._current in (Stage.FINISHED, Stage.ENDED)

    def require(self, *stages: Stage, message: str) -> None:
        if self._current not in stages:
            raise self.refusal_of(message)

    def refusal_of(self, message: str) -> OutOfStep:
        """Return the error for a message that came at the wrong stage."""
        return OutOfStep(f"{message} while {self._current.value}")

    def move_to(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self._current]:
            raise RuntimeError(f"no run goes from {self._current.name} to {stage.name}")
        self._current = stage

"""The state machine of a run: its stages, the transitions between them, and the waiting for them.

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

import math
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeVar

from splitveil.active_party.run.parties import PassivePeer, PassivePeers
from splitveil.common.errors import OutOfStep

_POLL_S = 0.2
"""Interval at which a waiting call checks whether its caller is still connected."""

ResultT = TypeVar("ResultT")

Listening = Callable[[], bool]
"""Returns whether the caller of a call is still connected."""


class Stage(Enum):
    """The stage of a run; the value completes the sentence "a message while …"."""

    WAITING = "waiting for the peer"
    REJOINING = "waiting for the peer to come back"
    HANDSHAKEN = "aligning"
    TRAINING = "training"
    FINISHED = "finished"
    ENDED = "ended early"

    @property
    def is_over(self) -> bool:
        """True if nothing more will be answered for the first time."""
        return self in (Stage.FINISHED, Stage.ENDED)


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
    """The stage of one run, which changes only along the table, and the lock of the run.

    It is held as a context; calls wait in it for the stage to change, and for each other.
    """

    def __init__(self, parties: PassivePeers) -> None:
        self.current = Stage.WAITING
        self._parties = parties
        lock = threading.RLock()
        self._progressed = threading.Condition(lock)
        """For calls, which wait for each other."""
        self._moved = threading.Condition(lock)
        """For what waits for the end of a stage, and need not wake at every answer."""
        self._moved_at = time.monotonic()

    def __enter__(self) -> None:
        self._moved.acquire()

    def __exit__(self, *_: object) -> None:
        self._moved.release()

    def require(self, *stages: Stage, message: str) -> None:
        if self.current not in stages:
            raise self.refusal_of(message)

    def refusal_of(self, message: str) -> OutOfStep:
        """Return the error for a message that came at the wrong stage."""
        return OutOfStep(f"{message} while {self.current.value}")

    def move_to(self, stage: Stage) -> None:
        """Change the stage, and wake every waiting call."""
        with self:
            if stage not in TRANSITIONS[self.current]:
                raise RuntimeError(f"no run goes from {self.current.name} to {stage.name}")
            self.current = stage
            self.note_progress()
            self._moved.notify_all()

    def wake(self) -> None:
        """Wake every waiting call, to check its condition again; the caller holds the lock."""
        self._progressed.notify_all()
        self._moved.notify_all()

    def note_progress(self) -> None:
        """Note that the run has moved on: the waiting time of its parties is counted from now."""
        self._moved_at = time.monotonic()
        self._progressed.notify_all()

    def awaited(self) -> Mapping[str, float]:
        """Return the parties whose message the run waits for, and for how many seconds."""
        with self:
            waited_s = time.monotonic() - self._moved_at
            return {party.name: waited_s for party in self._parties if self._awaits(party)}

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition that only another stage or a goodbye can bring about."""
        with self:
            return self._moved.wait_for(until, timeout_s)

    def wait_for_caller(
        self,
        find: Callable[[], ResultT],
        is_listening: Listening,
        patience_s: float = math.inf,
    ) -> ResultT | None:
        """Wait until something is found; None if the caller is gone or out of patience."""
        deadline = time.monotonic() + patience_s
        while (found := find()) is None:
            if time.monotonic() > deadline or not is_listening():
                return None
            self._progressed.wait(_POLL_S)
        return found

    def _awaits(self, party: PassivePeer) -> bool:
        if self.current.is_over:
            return not party.has_left
        if not self._parties.have_opened:
            return not party.has_opened
        if self.current is Stage.HANDSHAKEN:
            return party.pair is None
        return party.question is None

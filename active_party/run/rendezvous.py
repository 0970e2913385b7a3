"""The meeting point of all calls of a run: its one lock, and all waiting for other parties."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from splitveil.active_party.run.parties import PassiveParties, PassiveParty
from splitveil.active_party.run.stages import RunStages, Stage

HANDSHAKE_WAIT_S = 10.0
"""Time that a handshake waits for those of the other parties before the caller has to ask again."""

FAREWELL_WAIT_S = 3.0
"""Time that a leave request waits for those of the other parties before it has to be sent again."""

_POLL_S = 0.2
"""Interval at which a waiting call checks whether its caller is still connected."""

ResultT = TypeVar("ResultT")

Listening = Callable[[], bool]
"""Returns whether the caller of a call is still connected."""


def always() -> bool:
    """Stand in for ``Listening``: assume that the caller is still connected."""
    return True


class Rendezvous:
    """The lock of a session, held as a context, in which calls wait for each other."""

    def __init__(self, parties: PassiveParties, stages: RunStages) -> None:
        self._parties = parties
        self._stages = stages
        self._changed = threading.Condition(threading.RLock())
        self._moved_at = time.monotonic()

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._changed.release()

    def wake(self) -> None:
        """Wake every waiting call, to check its condition again; the caller holds the lock."""
        self._changed.notify_all()

    def note_progress(self) -> None:
        """Note that the run has moved on: the waiting time of its parties is counted from now."""
        self._moved_at = time.monotonic()
        self.wake()

    def awaited(self) -> Mapping[str, float]:
        """Return the parties whose message the run waits for, and for how many seconds."""
        with self:
            waited_s = time.monotonic() - self._moved_at
            return {party.name: waited_s for party in self._parties if self._awaits(party)}

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        with self:
            return self._changed.wait_for(until, timeout_s)

    def wait_for_caller(
        self,
        find: Callable[[], ResultT],
        is_listening: Listening,
        patience_s: float = math.inf,
    ) -> ResultT | None:
        """Wait on behalf of a caller until something is found, and return it.

        None if the caller is gone or out of patience.
        """
        deadline = time.monotonic() + patience_s
        while (found := find()) is None:
            if time.monotonic() > deadline or not is_listening():
                return None
            self._changed.wait(_POLL_S)
        return found

    def _awaits(self, party: PassiveParty) -> bool:
        if self._stages.are_over:
            return not party.has_left
        if not self._parties.have_opened:
            return not party.has_opened
        if self._stages.current is Stage.HANDSHAKEN:
            return not party.is_aligned
        return not party.has_asked

"""Accounts for a party's time: every moment of its process belongs to exactly one phase."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum


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

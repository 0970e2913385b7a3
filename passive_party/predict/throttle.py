"""Limits how many ids per second a party answers."""

import threading
import time
from collections.abc import Callable

BURST_S = 1.0  # seconds of answers that may be saved up by asking nothing
_LOOK_EVERY_S = 0.1


class Throttle:
    """Lets requests wait until their ids are due. Several threads may use it.

    Args:
        ids_per_s: the most ids per second on average; None for no limit.
    """

    def __init__(
        self,
        ids_per_s: float | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ids_per_s = ids_per_s
        self._now = now
        self._sleep = sleep
        self._free_at = now() - BURST_S
        self._lock = threading.Lock()

    def most_ids(self, most: int, seconds: float) -> int:
        """Return how many ids a request may name so that it is due within some seconds."""
        if self._ids_per_s is None:
            return most
        return max(1, min(most, int(self._ids_per_s * seconds)))

    def wait(self, num_ids: int, is_active: Callable[[], bool]) -> bool:
        """Wait until so many ids are due. Returns whether somebody does."""
        if self._ids_per_s is None:
            return True
        with self._lock:
            due = max(self._free_at, self._now() - BURST_S) + num_ids / self._ids_per_s
            self._free_at = due
        while (left := due - self._now()) > 0:
            if not is_active():
                return False
            self._sleep(min(left, _LOOK_EVERY_S))
        return True

"""Limits how many ids per second each program may ask for."""

import threading
import time
from collections.abc import Callable

from splitveil.active_party.http.errors import TooFast

_ROUNDING_S = 1e-6
BURST_S = 1.0
"""Seconds of requests that may be saved up by asking nothing."""


class RateLimit:
    """Refuses requests that come too fast. Several threads may use it."""

    def __init__(
        self, ids_per_second: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._ids_per_second = ids_per_second
        self._now = now
        self._free_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def charge(self, program: str, num_ids: int) -> None:
        """Count the ids of a request.

        A request with more ids than one second's is accepted after a second without any, and the
        program then has to wait accordingly longer.

        Raises:
            TooFast: says how long to wait; nothing is counted.
        """
        if self._ids_per_second is None:
            return
        now, cost_s = self._now(), num_ids / self._ids_per_second
        with self._lock:
            free_at = max(self._free_at.get(program, 0.0), now - BURST_S)
            wait_s = free_at + min(cost_s, BURST_S) - now
            if wait_s > 0:
                raise TooFast(
                    f"more than {self._ids_per_second:g} ids per second (serving.ids_per_second)",
                    wait_s,
                )
            self._free_at[program] = free_at + cost_s

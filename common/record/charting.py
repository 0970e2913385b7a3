"""Decides which lines about single batches TensorBoard gets: it shows no more than a thousand."""

import time

CHARTED_EVERY_S = 0.5
"""Least time between two batches in TensorBoard's charts: a point there costs a thread as much CPU
as some attacks."""


class ChartClock:
    """Is due again some time after it was last; every line is in ``metrics.jsonl`` all the same."""

    def __init__(self) -> None:
        self._last_s = -CHARTED_EVERY_S

    def is_due(self) -> bool:
        """Return whether the next line is to be charted, which then counts as charted."""
        now_s = time.monotonic()
        is_due = now_s - self._last_s >= CHARTED_EVERY_S
        if is_due:
            self._last_s = now_s
        return is_due

"""Waiting in tests: for events, with a time limit that is generous for any machine."""

import time
from collections.abc import Callable

HANGS_AFTER_S = 600.0
"""Seconds after which a test reports that it hangs, far more than anything takes."""


def wait_until(condition: Callable[[], bool], every_s: float = 0.01) -> None:
    """Wait until another thread or process has caused a condition."""
    until = time.monotonic() + HANGS_AFTER_S
    while not condition():
        assert time.monotonic() < until, "hangs"
        time.sleep(every_s)

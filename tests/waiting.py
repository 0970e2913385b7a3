"""How tests wait: for events, and for no event longer than any machine takes."""

import time
from collections.abc import Callable

HANGS_AFTER_S = 600.0
"""How long anything may take before a test says that it hangs: a limit that nothing comes near."""


def wait_until(condition: Callable[[], bool], every_s: float = 0.01) -> None:
    """Wait for what another thread or process does."""
    until = time.monotonic() + HANGS_AFTER_S
    while not condition():
        assert time.monotonic() < until, "hangs"
        time.sleep(every_s)

"""A clock that advances a minute per second after SIGUSR1.

So a test can give a party as much patience as the slowest machine needs to come to an event, and
then let the patience run out in seconds. Only Python's monotonic clock is fast, by which the
parties measure silence; gRPC has a clock of its own.
"""

import signal
import time

SECONDS_PER_SECOND = 60


def listen() -> None:
    """Let this process take the signal."""
    real = time.monotonic
    turned_at: list[float] = []

    def monotonic() -> float:
        now = real()
        return now + (SECONDS_PER_SECOND - 1) * (now - turned_at[0]) if turned_at else now

    signal.signal(signal.SIGUSR1, lambda _number, _frame: turned_at.append(real()))
    time.monotonic = monotonic

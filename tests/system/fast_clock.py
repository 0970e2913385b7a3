"""Runs a program whose clock goes a minute a second from SIGUSR1 on: ``fast_clock.py MODULE ...``.

So a test can give a party as much patience as the slowest machine needs to come to an event, and
then let the patience run out in seconds. Only Python's monotonic clock is fast, by which the
parties measure silence; gRPC has a clock of its own.
"""

import runpy
import signal
import sys
import time

SECONDS_PER_SECOND = 60


def main() -> None:
    """Run the module named first on the command line with the rest of it."""
    real = time.monotonic
    turned_at: list[float] = []

    def monotonic() -> float:
        now = real()
        return now + (SECONDS_PER_SECOND - 1) * (now - turned_at[0]) if turned_at else now

    signal.signal(signal.SIGUSR1, lambda _number, _frame: turned_at.append(real()))
    time.monotonic = monotonic
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Handles SIGINT and SIGTERM, which ask a process to stop after its current step."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from splitveil.common.errors import Interrupted
from splitveil.common.text.log_lines import raw_line

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AT_ONCE = "stopped at once; nothing more is saved"
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


@contextmanager
def stop_signals_to(stop: Callable[[int], None]) -> Iterator[None]:
    """Call ``stop`` with the number of each SIGINT or SIGTERM; only in the main thread."""
    before = {
        number: signal.signal(number, lambda given, _: stop(given)) for number in _STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interruption:
    """Remembers SIGINT or SIGTERM, so that the current step can be finished first.

    A second signal ends the process at once; files are written atomically and stay intact.
    """

    def __init__(self) -> None:
        self.before_stopping: Callable[[], None] = lambda: None
        """Called before a signal is reported; may end the process."""
        self.signal_number: int | None = None

    def install(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, self._remember)

    def __call__(self) -> int | None:
        """Return the number of the signal; None before one."""
        if self.signal_number is not None:
            self.before_stopping()
        return self.signal_number

    def check(self) -> None:
        number = self()
        if number is not None:
            raise Interrupted(number)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None:
            os.write(2, _SHOW_CURSOR * os.isatty(2) + raw_line(_AT_ONCE))
            # An exception would still wait for the peer, for other threads, and for the disk.
            os._exit(128 + number)
        self.signal_number = number
        # Logging is unsafe here: the signal may have arrived in the middle of a log line.
        os.write(2, raw_line("stopping after this step; send the signal again to stop at once"))

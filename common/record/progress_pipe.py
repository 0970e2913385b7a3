"""Tells a launcher on this machine how far a party is, so that it can show one bar for all parties.

The launcher passes the write end of a pipe, whose number stands in the environment. Without one,
nothing is told. Figures go to the launcher's own terminal only.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "SPLITVEIL_PROGRESS_FD"
"""Number of the descriptor to which lines are written."""

_EVERY_S = 0.1


class ProgressPipe:
    """Writes one JSON object in a line, at most ten times in a second."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._told = 0.0

    def tell(
        self,
        party: str,
        done: int,
        total: int,
        numbers: Mapping[str, float | None],
        *,
        is_last: bool = False,
    ) -> None:
        """Tell the count of steps, and numbers such as ``loss``.

        Args:
            numbers: figures to show, the most important one first.
        """
        now = time.monotonic()
        if now - self._told < _EVERY_S and not is_last:
            return
        self._told = now
        shown = {name: number for name, number in numbers.items() if number is not None}
        line = {"party": party, "done": done, "total": total, "numbers": shown}
        with suppress(OSError):  # the launcher is gone: the run goes on without a bar
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def progress_pipe() -> ProgressPipe | None:
    """Return the pipe to the launcher; None if there is none."""
    number = os.environ.get(VARIABLE, "")
    return ProgressPipe(int(number)) if number.isascii() and number.isdigit() else None

"""What a party prints. What cannot be printed is lost, and disturbs nothing: no run is about it.

Standard streams fail where they lead to a file on a full disk, to a terminal or pipe that is
closed, or have no codes for the frame of a table.
"""

import sys
from contextlib import suppress
from typing import Any

from rich.console import Console

UNPRINTED = (OSError, ValueError, AttributeError)
"""A stream that fails, one that is closed or has no code for a character, none at all."""


class Printed:
    """A stream whose failures nobody hears of.

    Args:
        stream: where to write to; None where the process has no such stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(*UNPRINTED):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(*UNPRINTED):
            self._stream.flush()

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        with suppress(*UNPRINTED):
            return bool(self._stream.isatty())
        return False


def printing_console(*, stderr: bool = False) -> Console:
    """Return a console on a standard stream that prints what it can."""
    return Console(file=Printed(sys.stderr if stderr else sys.stdout))  # type: ignore[arg-type]

"""Prints to the standard streams and ignores their failures, which must not disturb a run.

A standard stream fails if it leads to a file on a full disk or to a closed terminal or pipe, or if
its encoding lacks a character, such as a table's frame.
"""

import sys
from contextlib import suppress
from typing import Any

from rich.console import Console

UNPRINTED = (OSError, ValueError, AttributeError)
"""Raised, respectively, by a stream that fails, by one that is closed or cannot encode a character,
and by a missing stream."""


class Printed:
    """A stream whose failures are ignored; None if the process has no such stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(*UNPRINTED):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(*UNPRINTED):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(*UNPRINTED):
            return bool(self._stream.isatty())
        return False


def has_colours() -> bool:
    """Return whether the standard error stream is a terminal that shows colours, as wanted."""
    console = printing_console(stderr=True)
    return console.color_system is not None and not console.no_color


def printing_console(*, stderr: bool = False, plain: bool = False) -> Console:
    """Return a console that ignores failures of its standard stream; a plain one is no terminal."""
    printed: Any = Printed(sys.stderr if stderr else sys.stdout)
    return Console(file=printed, force_terminal=False if plain else None)

"""Configures logging: short lines or JSON objects on the standard error stream.

It prints to the standard streams and ignores their failures, which must not disturb a run. A
standard stream fails if it leads to a file on a full disk or to a closed terminal or pipe, or if
its encoding lacks a character, such as a table's frame.
"""

import json
import logging
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from rich.console import Console

from splitveil.common.text.visible_text import visible, visible_lines

LogFormat = Literal["text", "json"]

_OWN_PACKAGE = "splitveil"
_COLOURS = {logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}  # yellow, red


def configure_logging(party: str, verbosity: int = 0, form: LogFormat = "text") -> None:
    """Log warnings only (verbosity below 0), the run's progress (0) or everything (above 0)."""
    handler = _StderrHandler(party, form)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    otherwise = threading.excepthook

    def on_failed_thread(failed: threading.ExceptHookArgs) -> None:
        # A full disk in TensorBoard's thread is ignored: the next write reports it.
        is_charting = type(failed.thread).__module__.startswith("tensorboard.")
        if not (is_charting and isinstance(failed.exc_value, OSError)):
            otherwise(failed)

    threading.excepthook = on_failed_thread
    level = logging.INFO if verbosity == 0 else logging.DEBUG if verbosity > 0 else logging.WARNING
    logging.getLogger(_OWN_PACKAGE).setLevel(level)


def add_to_log_lines(**fields: str) -> None:
    for handler in _own_handlers():
        handler.fields |= fields


def log_fields(**fields: object) -> dict[str, Any]:
    """Return the ``extra`` of a message with fields of its JSON object, as numbers or words."""
    return {"fields": fields}


def writes_json() -> bool:
    return any(handler.form == "json" for handler in _own_handlers())


def shows_bars() -> bool:
    """Return whether a terminal may show bars between the lines of the log."""
    is_quiet = logging.getLogger(_OWN_PACKAGE).level == logging.WARNING
    return not (writes_json() or is_quiet)


def raw_line(text: str) -> bytes:
    """Return a line as it belongs between log lines, for code that must not log."""
    for handler in _own_handlers():
        if handler.form == "json":
            record = logging.LogRecord(_OWN_PACKAGE, logging.WARNING, "", 0, text, None, None)
            return handler.format(record).encode() + b"\n"
    return text.encode() + b"\n"


def _own_handlers() -> "Iterator[_StderrHandler]":
    return (one for one in logging.getLogger().handlers if isinstance(one, _StderrHandler))


class _StderrHandler(logging.Handler):
    """Writes to the current standard error stream, which a progress bar may have replaced."""

    def __init__(self, party: str, form: LogFormat) -> None:
        super().__init__()
        self.party = party
        self.fields: dict[str, str] = {}
        self.form: LogFormat = form
        if form == "json":
            self.setFormatter(_JsonFormatter(self))
        else:
            party = self.party.replace("%", "%%")
            text = f"%(asctime)s {party} %(levelname)s %(message)s"
            self.setFormatter(_VisibleFormatter(text, datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line, colour = self.format(record), _COLOURS.get(record.levelno)
            if colour and self.form == "text" and has_colours():
                line = f"\x1b[{colour}m{line}\x1b[0m"
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except UNPRINTED:
            return  # a run continues without its log
        except Exception:
            self.handleError(record)


class _VisibleFormatter(logging.Formatter):
    """Keeps text from a file or the peer from controlling the terminal or forging log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return visible_lines(super().formatException(ei))


class _JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object in ASCII, so that nothing in it can pass for a line."""

    def __init__(self, handler: _StderrHandler) -> None:
        super().__init__()
        self._handler = handler

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "party": self._handler.party,
            **self._handler.fields,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            own["exception"] = self.formatException(record.exc_info)
        fields: Mapping[str, object] = getattr(record, "fields", {})
        # A field of a message never replaces one that every line has.
        further = {
            name: str(one) if isinstance(one, float) and not math.isfinite(one) else one
            for name, one in fields.items()
            if name not in own
        }
        return json.dumps(own | further, default=str)


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

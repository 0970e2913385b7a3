"""Configures logging: short lines with the party's name on the standard error stream."""

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from splitveil.common.text.output import UNPRINTED
from splitveil.common.text.visible_text import visible, visible_lines

_OWN_PACKAGE = "splitveil"


def configure_logging(party: str, verbosity: int = 0) -> None:
    """Log short lines with the party's name to the standard error stream.

    Args:
        party: the party's name, for instance ``active``.
        verbosity: below 0 for warnings only, 0 for the progress of the run, above 0 for everything.
    """
    handler = _StderrHandler()
    form = f"%(asctime)s {party.replace('%', '%%')} %(levelname)s %(message)s"
    handler.setFormatter(_VisibleFormatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    threading.excepthook = partial(_on_failed_thread, threading.excepthook)
    level = logging.INFO if verbosity == 0 else logging.DEBUG if verbosity > 0 else logging.WARNING
    logging.getLogger(_OWN_PACKAGE).setLevel(level)


class _StderrHandler(logging.Handler):
    """Writes to the current standard error stream, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
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


def _on_failed_thread(
    otherwise: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Ignore a full disk in TensorBoard's thread: the next write reports it."""
    is_charting = type(failed.thread).__module__.startswith("tensorboard.")
    if not (is_charting and isinstance(failed.exc_value, OSError)):
        otherwise(failed)

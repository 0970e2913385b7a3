"""How a command ends: the messages of its errors, and its exit code."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn

from splitveil.common.errors import Interrupted, PeerError, SplitveilError, StorageError
from splitveil.common.text.imports import fault_of_own_code
from splitveil.common.text.log_lines import log_fields

logger = logging.getLogger(__name__)


def exit_code_of(action: Callable[[], None]) -> int:
    """Run an action, log its errors, and return the exit code for its outcome."""
    try:
        action()
    except Exception as error:
        known = error if isinstance(error, SplitveilError) else fault_of_own_code(error)
        if known is None:
            raise
        for told in _with_earlier(known):
            for line in str(told).splitlines() or [type(told).__name__]:
                fields = log_fields(error=type(told).__name__, exit_code=known.exit_code)
                logger.error("%s", line, extra=fields)
        return known.exit_code
    except KeyboardInterrupt:
        logger.error("stopped at once; nothing was saved")
        return 130
    return 0


def end_program(exit_code: int, *, is_program: bool) -> NoReturn:
    if is_program:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _with_earlier(error: SplitveilError) -> Iterator[SplitveilError]:
    """Yield an error, preceded by the reason for the run's end if a full disk would hide it."""
    earlier: BaseException | None = error
    while isinstance(error, StorageError) and earlier is not None:
        earlier = earlier.__context__
        if isinstance(earlier, PeerError | Interrupted):
            yield earlier
            break
    yield error

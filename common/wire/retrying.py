"""Repeated attempts to get an answer from a peer that may be away or starting again."""

import logging
import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from splitveil.common.errors import (
    Interrupted,
    PeerError,
    PeerUnreachable,
    PeerUntrusted,
    ProtocolError,
    SplitveilError,
)
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.text.log_lines import log_fields

logger = logging.getLogger(__name__)

MAX_DAMAGED = 3
"""Times in a row that a question is asked again because it, or its answer, arrived damaged."""

ResultT = TypeVar("ResultT")
Interruption = Callable[[], int | None]


class CallWatch(Protocol):
    """Is told how each attempt to ask the peer ended."""

    def answered(self) -> None: ...

    def unanswered(self, error: SplitveilError) -> None: ...


class Retrying:
    """Repeats a question, with growing waits in between."""

    def __init__(
        self,
        settings: ReconnectSettings,
        interruption: Interruption,
        where: str,
        renew: Callable[[], bool],
        watch: CallWatch | None = None,
    ) -> None:
        self._settings = settings
        self._interruption = interruption
        self._where = where
        self._renew = renew
        self._watch = watch
        self._was_answered = False

    def until_answered(self, ask: Callable[[], ResultT]) -> ResultT:
        """Ask until an answer comes, ``reconnect.max_s`` have passed, or a signal says stop.

        A question that arrived damaged, or whose answer did, is asked a few more times: the same
        bytes get the same answer.

        Raises PeerUnreachable, PeerUntrusted, ProtocolError or Interrupted.
        """
        wait_s = self._settings.first_wait_s
        lost_at: float | None = None
        damaged = 0
        while True:
            try:
                answer = self._watched(ask)
            except (PeerUntrusted, ProtocolError) as error:
                # The trusted certificates may have been replaced since the channel was made.
                if isinstance(error, PeerUntrusted) and self._renew():
                    continue
                damaged += 1
                hopeless = isinstance(error, PeerUntrusted) and not self._was_answered
                if hopeless or damaged > MAX_DAMAGED:
                    raise
                logger.warning("%s; asking again", error)
                left_s = wait_s
            except PeerUnreachable as error:
                if lost_at is None:
                    lost_at = time.monotonic()
                    logger.warning(
                        "%s at %s; trying for up to %g s",
                        error,
                        self._where,
                        self._settings.max_s,
                        extra=log_fields(reason=type(error).__name__),
                    )
                left_s = self._left_s(lost_at, error)
            else:
                self._was_answered = True
                return answer
            self._renew()
            self.sleep(min(wait_s * random.uniform(0.5, 1.0), left_s))
            wait_s = min(2 * wait_s, self._settings.longest_wait_s)

    def _watched(self, ask: Callable[[], ResultT]) -> ResultT:
        try:
            answer = ask()
        except PeerError as error:
            if self._watch is not None:
                self._watch.unanswered(error)
            raise
        if self._watch is not None:
            self._watch.answered()
        return answer

    def sleep(self, wait_s: float) -> None:
        """Wait, in steps short enough to notice a signal, or raise Interrupted."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            signal_number = self._interruption()
            if signal_number is not None:
                raise Interrupted(signal_number)
            time.sleep(min(left, 0.1))

    def _left_s(self, lost_at: float, error: PeerUnreachable) -> float:
        left_s = lost_at + self._settings.max_s - time.monotonic()
        if left_s <= 0:
            raise PeerUnreachable(
                f"{self._where} has not answered for {self._settings.max_s:g} s (reconnect.max_s)"
            ) from error
        return left_s

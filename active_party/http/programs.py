"""The programs that ask for predictions: tokens, number of ids, and the errors that end a request.

    RequestError
    |- Unusable          422   the request cannot be understood
    |- TooManyIds        413   it has more ids than one request may have
    |- NotJson           415   its body is compressed, or no JSON
    |- NotAdmitted       401   the program does not say who it is
    |- TooFast           429   the program asks for more than it may
    `- NotAvailable      503   a passive party is away, or this party is busy

Their messages are for the program's operator: they name no id and no value.
"""

import hashlib
import hmac
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from splitveil.common.errors import SettingsError
from splitveil.common.text.files import read_secret


class RequestError(Exception):
    status = 500


class Unusable(RequestError):
    """The request cannot be understood."""

    status = 422


class TooManyIds(RequestError):
    status = 413


class NotJson(RequestError):
    """The body is not in the one form that is read."""

    status = 415


class NotAdmitted(RequestError):
    """The program does not say who it is, or is not known."""

    status = 401


class TooFast(RequestError):
    """The program asks for more ids per second than it may."""

    status = 429

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # until the same request is accepted


class NotAvailable(RequestError):
    """No answer is available now; another attempt may succeed."""

    status = 503


BURST_S = 1.0  # seconds of requests that may be saved up by asking nothing


class RateLimit:
    """Refuses requests that come too fast. Several threads may use it."""

    def __init__(
        self, ids_per_second: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._ids_per_second = ids_per_second
        self._now = now
        self._free_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def charge(self, program: str, num_ids: int) -> None:
        """Count the ids of a request, or raise TooFast, which says how long to wait.

        A request with more ids than one second's is accepted after a second without any, and the
        program then has to wait accordingly longer.
        """
        if self._ids_per_second is None:
            return
        now, cost_s = self._now(), num_ids / self._ids_per_second
        with self._lock:
            free_at = max(self._free_at.get(program, 0.0), now - BURST_S)
            wait_s = free_at + min(cost_s, BURST_S) - now
            if wait_s > 0:
                raise TooFast(
                    f"more than {self._ids_per_second:g} ids per second (serving.ids_per_second)",
                    wait_s,
                )
            self._free_at[program] = free_at + cost_s


MIN_TOKEN_CHARACTERS = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SETTING = "serving.token_file"


class Tokens:
    """The tokens of a file; only their digests are stored."""

    def __init__(self, tokens: dict[str, str]) -> None:
        self._digests = {name: _digest(token) for name, token in tokens.items()}

    @classmethod
    def read(cls, path: Path) -> "Tokens":
        """Read a file with one line ``NAME TOKEN`` for each program."""
        text = read_secret(path, _SETTING)
        if not text.isascii():
            raise SettingsError(f"{_SETTING}: {path}: expected ASCII text")
        tokens: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            is_known = len(words) == 2 and words[0] not in tokens
            if not is_known or not _NAME.fullmatch(words[0]):
                raise SettingsError(
                    f"{_SETTING}: {path}: line {number}: expected NAME TOKEN, each name once"
                )
            if len(words[1]) < MIN_TOKEN_CHARACTERS:
                raise SettingsError(
                    f"{_SETTING}: {path}: line {number}: expected a token of at least "
                    f"{MIN_TOKEN_CHARACTERS} characters"
                )
            tokens[words[0]] = words[1]
        if not tokens:
            raise SettingsError(f"{_SETTING}: {path}: there are no tokens")
        return cls(tokens)

    def program_of(self, authorization: str | None) -> str:
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() == "bearer":
            digest = _digest(token.strip())
            # All are compared, so that the time reveals nothing.
            found = [n for n, own in self._digests.items() if hmac.compare_digest(own, digest)]
            if found:
                return found[0]
        raise NotAdmitted("expected a header Authorization: Bearer TOKEN with a known token")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()

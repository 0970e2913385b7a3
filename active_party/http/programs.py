"""Tells the programs that ask for predictions apart, by token or by certificate."""

import hashlib
import hmac
import re
import stat
from pathlib import Path

from splitveil.active_party.http.errors import NotAdmitted
from splitveil.common.errors import SettingsError
from splitveil.common.text.files import read_bytes

MIN_TOKEN_CHARACTERS = 32
_MAX_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SETTING = "serving.token_file"


class Tokens:
    """The tokens of a file, of which only digests are kept."""

    def __init__(self, tokens: dict[str, str]) -> None:
        self._digests = {name: _digest(token) for name, token in tokens.items()}

    @classmethod
    def read(cls, path: Path) -> "Tokens":
        """Read a file with one line ``NAME TOKEN`` for each program."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise SettingsError(
                    f"{_SETTING}: {path} has mode {mode:04o}, so that others may read it: "
                    f"chmod 600 {path}"
                )
            lines = read_bytes(path, _MAX_FILE_BYTES).decode("ascii").splitlines()
        except OSError as error:
            raise SettingsError(f"{_SETTING}: {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{_SETTING}: {path}: expected ASCII text") from error
        tokens: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
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
            # All are compared, so that the time tells nothing.
            found = [n for n, own in self._digests.items() if hmac.compare_digest(own, digest)]
            if found:
                return found[0]
        raise NotAdmitted("expected a header Authorization: Bearer TOKEN with a known token")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()

"""Reads the files that hold a secret, such as a password, which settings name and never contain."""

import stat
from pathlib import Path

from splitveil.common.errors import SettingsError
from splitveil.common.text.files import read_bytes

MAX_BYTES = 2**16


def read_secret(path: Path, setting: str) -> str:
    """Return the text of a file that only its owner may read; errors never quote it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise SettingsError(
                f"{setting}: {path} has mode {mode:04o}, so that others may read it: "
                f"chmod 600 {path}"
            )
        return read_bytes(path, MAX_BYTES).decode("utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{setting}: {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {path}: the text is not UTF-8") from None

"""Reads users' files, which must be regular files of limited size, locks, syncs and closes files.

A device such as ``/dev/zero`` never ends, and a pipe may never start. A link to a regular file is
accepted like the file itself.
"""

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Self

from splitveil.common.errors import SettingsError
from splitveil.common.text.system import BINARY, NO_LINK, lock
from splitveil.common.text.wording import suggest

OWNER_ONLY = 0o600  # mode of a file that only its owner may read and write

_MAX_SECRET_BYTES = 2**16
_PIECE_BYTES = 2**20
_LISTED_NAMES = 1000


def check_regular(path: Path) -> None:
    """Check, without opening it, that a path leads to a regular file; OSError otherwise."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``; OSError otherwise."""
    check_regular(path)
    data = bytearray()
    with path.open("rb") as file:
        # In pieces: a single read allocates its full size, however short the file is.
        while piece := file.read(_PIECE_BYTES):
            data += piece
            if len(data) > max_bytes:
                raise OSError(errno.EFBIG, f"expected at most {max_bytes:,} bytes", str(path))
    return bytes(data)


def read_or_refuse(path: Path, max_bytes: int, consequence: str = "") -> bytes:
    """Return the content of a file as ``read_bytes`` does; SettingsError if it cannot be read."""
    try:
        return read_bytes(path, max_bytes)
    except OSError as error:
        raise SettingsError(f"{path}: {why_unreadable(path, error)}{consequence}") from error


def check_secret(path: Path, setting: str) -> None:
    """Check that only its owner may read a file; SettingsError otherwise, OSError without one."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SettingsError(
            f"{setting}: {path} has mode {mode:04o}, so that others may read it: chmod 600 {path}"
        )


def read_secret(path: Path, setting: str) -> str:
    """Return the text of a file that only its owner may read; errors never quote it."""
    try:
        check_secret(path, setting)
        return read_bytes(path, _MAX_SECRET_BYTES).decode("utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{setting}: {path}: {why_unreadable(path, error)}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {path}: the text is not UTF-8") from None


def why_unreadable(path: Path, error: OSError) -> str:
    """Say why a path cannot be read; if it is missing, where, and which name there is like it."""
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {error.strerror or type(error).__name__}"
    folder, name, kind = path.absolute().parent, path.name, "such file"
    while not folder.is_dir() and folder != folder.parent:
        folder, name, kind = folder.parent, folder.name, f"folder {folder.name!r}"
    names = list[str]()
    with suppress(OSError):
        names = [one.name for one in islice(folder.iterdir(), _LISTED_NAMES)]
    return f"there is no {kind} in {folder}{suggest(name, names)}"


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    # Windows writes out only what is open to be written, and other systems open no folder for that.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_one_process(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def replacing_file(path: Path, mode: int = OWNER_ONLY) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another once it is whole and on disk. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Anyone who can write to the folder could have put a link there, to a file that would change.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY
    temporary.unlink(missing_ok=True)  # left by a killed process that had this number
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


class Closing(ABC):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...

"""Opens files of exchanges for their owner only, and names them in errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitveil.common.errors import StorageError


def private(path: str, flags: int) -> int:
    """Open a file for its owner only; an opener for ``open``."""
    # Nobody else can write to the folder; a link there would be a fault.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Convert errors of the operating system to StorageError, which names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error

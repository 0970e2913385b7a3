"""Opens files of exchanges for their owner only, names them in errors, and deletes them."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitveil.common.errors import StorageError

logger = logging.getLogger(__name__)


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


def discard(folder: Path, secrets: str) -> None:
    """Delete a folder, if there is one; what cannot be deleted is reported.

    Args:
        folder: the folder.
        secrets: name of the file in it that is deleted first.
    """
    try:
        (folder / secrets).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", folder, error.strerror)

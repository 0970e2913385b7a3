"""How a file of the user's is opened for reading: a regular one, and no larger than it may be.

A device such as ``/dev/zero`` never ends, and a pipe may never begin. A link to a regular file is
as good as the file.
"""

import errno
import stat
from pathlib import Path

_PIECE_BYTES = 2**20


def check_regular(path: Path) -> None:
    """Check that a path leads to a regular file, without opening it.

    Raises:
        OSError: it leads to a folder, a device, a pipe or a socket, or nowhere.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "this is no regular file", str(path))


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return what is in a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than that.
    """
    check_regular(path)
    data = bytearray()
    with path.open("rb") as file:
        # Piece by piece: what may be read at once is asked of the memory, however short the file.
        while piece := file.read(_PIECE_BYTES):
            data += piece
            if len(data) > max_bytes:
                raise OSError(errno.EFBIG, f"expected at most {max_bytes:,} bytes", str(path))
    return bytes(data)

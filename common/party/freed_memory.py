"""Keeps freed memory for the next step instead of returning it to the system after every step.

A step allocates and frees tensors of a megabyte. By default glibc returns such memory and asks for
it again, and the system fills every page with zeros again: as shipped, two hundred times in a step
of 1,024 rows.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

KEPT_BYTES = 64 * 2**20
"""Freed memory at the end of each heap that a process keeps."""

LARGEST_BYTES = 32 * 2**20
"""A block above it is returned at once, as before; glibc does not accept more everywhere."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep the memory that it frees, and return whether that was possible.

    Nothing happens without glibc, or where the environment says how glibc allocates.
    """
    if sys.platform != "linux" or any(name in environment for name in _CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))

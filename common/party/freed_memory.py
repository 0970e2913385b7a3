"""Keeps freed memory for the next step, or returns it to the system at once.

A step allocates and frees tensors of a megabyte. By default glibc returns such memory and asks for
it again, and the system fills every page with zeros again: as shipped, two hundred times in a step
of 1,024 rows. An alignment without a training takes large blocks rarely, and what it has read, sent
and compared should not be held beside what comes next.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping

import pyarrow as pa

KEPT_BYTES = 64 * 2**20
"""Freed memory at the end of each heap that a process keeps."""

LARGEST_BYTES = 32 * 2**20
"""A block above it is returned at once, as before; glibc does not accept more everywhere."""


RETURNED_BYTES = 128 * 2**10
"""Size of blocks, and of freed memory at the end of a heap, that are returned at once on demand."""

_NUM_HEAPS = 2

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep the memory that it frees, and return whether that was possible.

    Nothing happens without glibc, or where the environment says how glibc allocates.
    """
    mallopt = _mallopt(environment)
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
    )


def return_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process return the memory that it frees, and return whether that was possible.

    That of tables, too, where pyarrow has an allocator that can do it. Nothing happens to other
    memory without glibc, or where the environment says how glibc allocates.
    """
    if "jemalloc" in pa.supported_memory_backends():
        pa.jemalloc_set_decay_ms(0)
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    mallopt = _mallopt(environment)
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, RETURNED_BYTES)
        and mallopt(_TRIM_THRESHOLD, RETURNED_BYTES)
        and mallopt(_ARENA_MAX, _NUM_HEAPS)
    )


def _mallopt(environment: Mapping[str, str]) -> Callable[[int, int], int] | None:
    if sys.platform != "linux" or any(name in environment for name in _CHOICES):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none

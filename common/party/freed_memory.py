"""Keeps freed memory for the next step, or returns it to the system at once.

A step allocates and frees tensors of a megabyte. By default glibc returns such memory and asks for
it again, and the system fills every page with zeros again: as shipped, two hundred times in a step
of 1,024 rows. Reading and alignment take large blocks rarely, and what they have read, sent and
compared should not be held beside what comes next: a training first returns what they have left in
the middle of heaps, and keeps what is freed from then on.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa

KEPT_BYTES = 64 * 2**20
"""Freed memory at the end of each heap that a process keeps."""

LARGEST_BYTES = 32 * 2**20
"""A block above it is returned at once, as before; glibc does not accept more everywhere."""


RETURNED_BYTES = 128 * 2**10
"""Size of blocks, and of freed memory at the end of a heap, that are returned at once on demand."""

_NUM_HEAPS = 2
"""Heaps that all threads share; by default there are eight for each core, and each of them keeps
what its threads have freed. A thread that finds one in use takes the other."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_ARENAS = "MALLOC_ARENA_MAX"
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def share_heaps(environment: Mapping[str, str] = os.environ) -> bool:
    """Let all threads of this process share few heaps, and return whether that was possible.

    Call it before there are threads. Nothing happens without glibc, or where the environment says
    how glibc allocates.
    """
    if _ARENAS in environment:
        return False
    mallopt = _mallopt(environment)
    return mallopt is not None and bool(mallopt(_ARENA_MAX, _NUM_HEAPS))


BuiltT = TypeVar("BuiltT")
RowsT = TypeVar("RowsT")


def kept_once_built(build: Callable[[RowsT], BuiltT]) -> Callable[[RowsT], BuiltT]:
    """Return a function that builds what trains, and then lets the process keep freed memory."""

    def built(rows: RowsT) -> BuiltT:
        made = build(rows)
        return_unused_memory()
        keep_freed_memory()
        return made

    return built


def return_unused_memory(environment: Mapping[str, str] = os.environ) -> None:
    """Return to the system what is free now, in all heaps.

    Nothing happens to memory other than that of tables without glibc, or where the environment says
    how glibc allocates.
    """
    pa.default_memory_pool().release_unused()
    trim = _function_of_glibc("malloc_trim", environment)
    if trim is not None:
        trim(0)


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
    return _function_of_glibc("mallopt", environment)


def _function_of_glibc(name: str, environment: Mapping[str, str]) -> Callable[..., int] | None:
    if sys.platform != "linux" or any(choice in environment for choice in _CHOICES):
        return None
    return getattr(ctypes.CDLL(None), name, None)  # another C library has none

"""What operating systems have or lack: locks of files, limits, and the number of cores.

Simulations, plans, audits and reports take what is there, on any system. A party relies on all of
it: two processes must never share a run or a noise key, and only Linux is tested for that.
"""

import errno
import os
from contextlib import suppress
from importlib import import_module
from typing import Any

from splitveil.common.errors import SettingsError


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


_fcntl, _resource, _msvcrt = _module("fcntl"), _module("resource"), _module("msvcrt")
NO_LINK, BINARY = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_BINARY", 0)
"""Flags of ``os.open``: refuse links, which Windows cannot, and change no byte, which it does."""


def require_linux() -> None:
    """Refuse to be a party on a system that lacks what keeps its processes apart."""
    if None in (_fcntl, _resource) or not hasattr(os, "sched_getaffinity"):
        raise SettingsError(
            "a party needs Linux; on this system, Python's simulate, plan, audit and reports work"
        )


def lock(descriptor: int, *, waits: bool = True) -> None:
    """Lock an open file against other processes; BlockingIOError if one has it and none waits."""
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | (0 if waits else _fcntl.LOCK_NB))
    elif _msvcrt is not None:
        while True:
            try:
                _msvcrt.locking(descriptor, _msvcrt.LK_LOCK if waits else _msvcrt.LK_NBLCK, 1)
            except OSError as error:  # LK_LOCK gives up after ten seconds
                if not waits or error.errno != errno.EDEADLK:
                    raise BlockingIOError(*error.args) from error
            else:
                return


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def most_open_files(*, raised: bool = False) -> int:
    """Return how many files this process may have open, perhaps raised to what it may ask for."""
    if _resource is None:
        return 512  # of the C library of Windows
    now, most = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    if raised:
        with suppress(ValueError):  # some systems say "unlimited", and refuse that
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (most, most))
            return int(most)
    return int(now)

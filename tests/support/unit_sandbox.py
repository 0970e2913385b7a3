"""The system calls that a shipped systemd unit leaves to its process, as systemd filters them."""

import ctypes
import ctypes.util
import errno
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

_LIBRARY = ctypes.util.find_library("seccomp")
CAN_FILTER = bool(_LIBRARY and shutil.which("systemd-analyze"))

_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_EQUAL = 4
_FAMILIES = 46


class _Argument(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
    )


def enter(unit: Mapping[str, Sequence[str]]) -> None:
    """Put this process and those that it starts under the filters of a unit, by its directives."""
    allowed: set[str] = set()
    for line in unit["SystemCallFilter"]:
        named = _calls(line.removeprefix("~").split())
        allowed = allowed - named if line.startswith("~") else allowed | named
    denied = getattr(errno, unit["SystemCallErrorNumber"][0])
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p

    families = ctypes.c_void_p(library.seccomp_init(_ALLOW))
    number = library.seccomp_syscall_resolve_name(b"socket")
    named = {getattr(socket, name) for name in " ".join(unit["RestrictAddressFamilies"]).split()}
    for family in set(range(_FAMILIES)) - named:
        asked = ctypes.byref(_Argument(0, _EQUAL, family, 0))
        library.seccomp_rule_add_array(families, _ERROR | errno.EAFNOSUPPORT, number, 1, asked)
    assert library.seccomp_load(families) == 0

    calls = ctypes.c_void_p(library.seccomp_init(_ERROR | errno.ENOSYS))
    for name in _calls(["@known"]):
        number = library.seccomp_syscall_resolve_name(name.encode())
        action = _ALLOW if name in allowed else _ERROR | denied
        library.seccomp_rule_add_array(calls, action, number, 0, None)
    assert library.seccomp_load(calls) == 0


def _calls(names: Iterable[str]) -> set[str]:
    return {call for name in names for call in (_group(name) if name[0] == "@" else {name})}


@cache
def _group(name: str) -> frozenset[str]:
    command = ["systemd-analyze", "syscall-filter", "--no-pager", name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = [line.split()[0] for line in text.splitlines()[1:] if line.strip()]
    return frozenset(_calls(word for word in words if word != "#"))

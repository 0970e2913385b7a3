"""Runs one private set intersection with SecretFlow's spu, in an environment of its own.

A script for the interpreter of that environment; it imports nothing of splitveil. With ``--check``
it prints the version of spu. Otherwise it reads one line of JSON from its standard input::

    {"rank": 0, "ports": [50000, 50001], "ids": "ids.csv", "common": "common.csv"}

``ids`` has one column ``id`` of distinct values, ``common`` receives those that the other party has
as well, in any order, and ``ports`` are those of 127.0.0.1 at which rank 0 and rank 1 are found. It
ends when its standard input does, so that it never outlives the party that started it.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import threading
import types
from typing import Any

PARENT_IS_GONE = 3
TIMEOUT_MS = 600_000
PR_SET_PDEATHSIG = 1


def load() -> tuple[Any, Any]:
    """Import spu's two libraries, without the rest of the package, which needs jax."""
    found = importlib.util.find_spec("spu")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the package spu is not installed")
    package = types.ModuleType("spu")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["spu"] = package
    from spu import libpsi, libspu

    return libpsi, libspu


def end_with_the_parent() -> None:
    """Wait until standard input ends, and end the process at once.

    On Linux the system does it first, also while spu lets no other thread run.
    """
    while sys.stdin.read(1):
        pass
    os._exit(PARENT_IS_GONE)


def intersect(task: dict[str, Any]) -> None:
    """Run the protocol, and write the common ids."""
    libpsi, libspu = load()
    parties = libspu.link.Desc()
    parties.recv_timeout_ms = TIMEOUT_MS
    for rank, port in enumerate(task["ports"]):
        parties.add_party(f"rank{rank}", f"127.0.0.1:{port}")
    link = libspu.link.create_brpc(parties, task["rank"])
    # Its mode of low communication has less than 40 bits of statistical security, and loses rows.
    protocol = libpsi.PsiProtocolConfig(
        protocol=libpsi.PsiProtocol.PROTOCOL_RR22,
        broadcast_result=True,
        rr22_params=libpsi.Rr22Rarams(low_comm_mode=False),
    )
    ids = libpsi.InputParams(
        path=os.path.abspath(task["ids"]), selected_keys=["id"], keys_unique=True
    )
    # Whoever started this sorts them, in less time than spu takes for it.
    common = libpsi.OutputParams(path=os.path.abspath(task["common"]), disable_alignment=True)
    libpsi.psi_execute(libpsi.PsiExecuteConfig(protocol, ids, common), link)
    link.stop_link()


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        load()
        print(importlib.metadata.version("spu"))
    else:
        os.umask(0o077)
        one = json.loads(sys.stdin.readline())
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=end_with_the_parent, daemon=True).start()
        intersect(one)

"""The circumstances of a run: when and where it ended, and with which versions."""

import platform
import socket
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NamedTuple


class Provenance(NamedTuple):
    """The circumstances under which a party's process ended a run."""

    ended: str
    """Date and time, UTC, ISO 8601 to the second."""
    host: str | None
    """Name of the machine; None if the settings keep it out."""
    system: str
    """Operating system and processor architecture."""
    python: str
    torch: str


def provenance_of_process(*, shows_host: bool) -> Provenance:
    """Return the circumstances of this process, now.

    Args:
        shows_host: whether to name the machine.
    """
    return Provenance(
        datetime.now(UTC).isoformat(timespec="seconds"),
        socket.gethostname() if shows_host else None,
        f"{platform.system()} {platform.release()}, {platform.machine()}",
        ".".join(map(str, sys.version_info[:3])),
        version("torch"),
    )

"""Finds ports of loopback for servers that another process, or a later moment, will start."""

import secrets
import socket
from collections import deque
from contextlib import suppress

_PORTS = range(20_000, 30_000)
"""Below those that systems give to outgoing connections, one of which could take a free port before
its server does."""

_given: deque[int] = deque(maxlen=1000)


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nobody listens, and which this process was not given yet.

    Raises:
        OSError: none was found.
    """
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if port in _given:  # whoever asked for it may not listen yet
            continue
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.append(port)
            return port
    raise OSError("found no free port on loopback")

"""Programs between two parties: one that passes connections on, and an HTTP proxy."""

import itertools
import socket
import threading
from contextlib import suppress
from typing import Self

from tests.support.runs import in_background


class Between:
    """Listens at a port of localhost, and can break whatever was connected through it."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        in_background(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take no more connections, and break those that there are."""
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for end in self._open:
            with suppress(OSError):  # closed by the other end already
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            for number in itertools.count():
                near, _ = self._listener.accept()
                self._open.append(near)
                threading.Thread(target=self._serve, args=(near, number), daemon=True).start()

    def _serve(self, near: socket.socket, number: int) -> None:
        raise NotImplementedError


class Relay(Between):
    """Passes connections on to ports of localhost: the first to one, all later ones to another.

    Args:
        first: the first connection's port.
        then: the port of all others, by default the same.
    """

    def __init__(self, first: int, then: int | None = None) -> None:
        self.connections = 0
        self._first = first
        self._then = first if then is None else then
        super().__init__()

    def _serve(self, near: socket.socket, number: int) -> None:
        address = ("127.0.0.1", self._then if number else self._first)
        with near, suppress(OSError), socket.create_connection(address) as far:
            self.connections += 1
            self._open.append(far)
            _connect(near, far)


class ConnectProxy(Between):
    """Makes connections for ``CONNECT`` requests, and records their senders.

    Args:
        reply: what it says instead of making the connection, where that is given.
    """

    def __init__(self, reply: bytes | None = None) -> None:
        self.heads: list[bytes] = []
        """What each connection began with: the request's head, or what came instead."""
        self._reply = reply
        super().__init__()

    def _serve(self, near: socket.socket, _number: int) -> None:
        head = b""
        with near, suppress(OSError):
            while not head.endswith(b"\r\n\r\n") and (data := near.recv(1)):
                head += data
            self.heads.append(head)
            if self._reply is not None or not head.startswith(b"CONNECT "):
                near.sendall(self._reply or b"")
                return
            host, _, port = head.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as far:
                self._open.append(far)
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _connect(near, far)


def _connect(near: socket.socket, far: socket.socket) -> None:
    """Pass on what comes from either end, until both are done."""
    back = threading.Thread(target=_copy, args=(far, near), daemon=True)
    back.start()
    _copy(near, far)
    back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

"""Carries the worker's TCP connections through the exchange of ids.

Two workers would dial each other. Here each dials a loopback port of its own party instead, whose
bytes go to the other party in frames; there they arrive on a connection to that party's worker. A
connection has a number among those that the same party's worker has dialled.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from typing import NamedTuple

from splitveil.common.errors import OutOfStep, SplitveilError, TooLarge
from splitveil.common.wire.limits import MOST_LINKS, TUNNEL_BYTES
from splitveil.protos.split_learning_pb2 import AlignTunnel

_FRAMES = 8
_DIAL_AGAIN_S = 0.05
_DIAL_WITHIN_S = 60.0
_HOST = "127.0.0.1"
_TAKES_WITHIN = struct.pack("ll", 120, 0)
"""Seconds and microseconds in which a worker has to take bytes, as the system wants them."""


class _Link(NamedTuple):
    is_own: bool
    """Whether this party's worker has dialled."""
    number: int


class Tunnel:
    """All connections of one exchange.

    Args:
        worker_port: the loopback port at which this party's worker will listen.
        most_bytes: more than this is not accepted from the peer.
    """

    def __init__(self, worker_port: int, most_bytes: int) -> None:
        self._worker_port = worker_port
        self._left = most_bytes
        self._sockets: dict[_Link, socket.socket] = {}
        self._readers: list[threading.Thread] = []
        self._frames: queue.Queue[AlignTunnel | None] = queue.Queue(_FRAMES)
        self._is_closed = threading.Event()
        self._has_ended = threading.Event()
        """Set when the worker has ended: it will not listen any more."""
        self._listener = socket.create_server((_HOST, 0))
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="rr22-accept", daemon=True).start()

    @property
    def port(self) -> int:
        """The loopback port at which this party's worker finds its peer."""
        port: int = self._listener.getsockname()[1]
        return port

    def next(self, within_s: float) -> AlignTunnel | None:
        """Return the next frame for the peer, an empty one if there is none within some seconds.

        None once the worker has ended and everything it has sent was returned.
        """
        try:
            return self._frames.get(timeout=within_s)
        except queue.Empty:
            return AlignTunnel()

    def receive(self, frame: AlignTunnel) -> None:
        """Hand a peer's frame to the worker.

        Raises:
            OutOfStep, TooLarge: the peer breaks a rule.
            SplitveilError: the worker does not take the bytes.
        """
        if not frame.data and not frame.ends:
            return  # a sign of life
        self._left -= len(frame.data)
        if self._left < 0:
            raise TooLarge("the other party tunnels more than its set of ids can need")
        link = _Link(not frame.of_dialler, frame.link)
        with self._lock:
            connection = self._sockets.get(link)
            known = sum(one.is_own == link.is_own for one in self._sockets)
        if connection is None:
            if link.is_own or link.number != known:
                raise OutOfStep("tunnelled bytes for a connection that there is not")
            if known >= MOST_LINKS:
                raise TooLarge(f"expected at most {MOST_LINKS} tunnelled connections")
            connection = self._dial()
            if connection is None:
                return
            self._add(link, connection)
        try:
            connection.sendall(frame.data)
            if frame.ends:
                connection.shutdown(socket.SHUT_WR)
        except BlockingIOError as error:
            raise SplitveilError("the rr22 worker takes no more bytes") from error
        except OSError:
            pass  # it may be done while the peer's still says goodbye

    def end_with(self, ended: threading.Thread) -> None:
        """Let ``next`` return None after a thread has ended and all bytes are read."""
        ended.join()
        self._has_ended.set()
        self._listener.close()
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.join()
        self._put(None)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed.set()
        self._listener.close()
        with self._lock:
            connections = list(self._sockets.values())
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        for number in range(MOST_LINKS):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._add(_Link(True, number), connection)

    def _dial(self) -> socket.socket | None:
        """Connect to the worker, which may not listen yet; None if it is not there any more."""
        until = time.monotonic() + _DIAL_WITHIN_S
        gone = (self._is_closed, self._has_ended)
        while not any(event.is_set() for event in gone) and time.monotonic() < until:
            try:
                return socket.create_connection((_HOST, self._worker_port))
            except OSError:
                time.sleep(_DIAL_AGAIN_S)
        return None

    def _add(self, link: _Link, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TAKES_WITHIN)
        reader = threading.Thread(
            target=self._read, args=(link, connection), name="rr22-read", daemon=True
        )
        with self._lock:
            self._sockets[link] = connection
            self._readers.append(reader)
        reader.start()

    def _read(self, link: _Link, connection: socket.socket) -> None:
        data = b"."
        while data:
            try:
                data = connection.recv(TUNNEL_BYTES)
            except OSError:  # reset by a worker that has ended
                data = b""
            self._put(
                AlignTunnel(link=link.number, of_dialler=link.is_own, data=data, ends=not data)
            )

    def _put(self, frame: AlignTunnel | None) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                self._frames.put(frame, timeout=1.0)
                return

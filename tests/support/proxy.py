"""A proxy that damages the bytes between two parties.

It counts what passes in a direction over all its connections, so that one fault-free run
tells where a fault can strike.
"""

import contextlib
import socket
import struct
import threading
import time
from typing import Literal, NamedTuple, Self

Direction = Literal["up", "down"]
"""``up`` is from the passive party to the active one."""

ByteHarm = Literal["end", "reset", "swallow", "delay", "duplicate", "truncate"]

CUT_AFTER_S = 1.0
"""How long a connection lasts of which bytes are missing: keepalive would take a minute."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Fault(NamedTuple):
    """One thing that goes wrong."""

    harm: str
    direction: Direction
    at: int
    """After so many bytes in that direction."""

    extent: float
    """Seconds of a pause, or the share of 1,000 bytes."""


class Plan:
    """The faults of one run, each of which strikes once. Any thread may ask."""

    def __init__(self, faults: list[Fault]) -> None:
        self.struck: list[Fault] = []
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.waiting = sorted(faults, key=lambda fault: fault.at)
        self._lock = threading.Lock()

    def pass_on(self, direction: Direction, amount: int) -> tuple[int, Fault | None]:
        """Count what is about to pass; return how much of it does before a fault strikes."""
        with self._lock:
            start = self.passed[direction]
            for fault in self.waiting:
                if fault.direction == direction and fault.at < start + amount:
                    before = max(fault.at - start, 0)
                    self.waiting.remove(fault)
                    self.struck.append(fault)
                    self.passed[direction] += before
                    return before, fault
            self.passed[direction] += amount
            return amount, None


class TcpProxy:
    """Passes connections on to a port of localhost, byte for byte but for the faults."""

    def __init__(self, target: str, plan: Plan) -> None:
        self._target = target
        self._plan = plan
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[_Connection] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # A thread that accepts would keep a socket that is only closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        while True:
            try:
                below, _ = self._listener.accept()
            except OSError:
                return
            try:
                above = socket.create_connection((host, int(port)), timeout=60)
            except OSError:
                below.close()
                continue
            above.settimeout(None)
            connection = _Connection(below, above, self._plan)
            self._connections.append(connection)
            connection.start()


class _Connection:
    """One connection through the proxy: two sockets, one thread for each direction."""

    def __init__(self, below: socket.socket, above: socket.socket, plan: Plan) -> None:
        self._ends = below, above
        self._plan = plan
        self._swallows = False

    def start(self) -> None:
        below, above = self._ends
        for source, sink, direction in ((below, above, "up"), (above, below, "down")):
            threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True).start()

    def cut(self, *, reset: bool = False) -> None:
        """End it on both sides, by a FIN or an RST."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # it has ended already
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    end.shutdown(socket.SHUT_RD)  # wakes whoever reads
                    end.close()
                else:
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and give the sockets back."""
        self.cut()
        for end in self._ends:
            end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):  # one of the two ends is gone, and with it the other
            while data := source.recv(65_536):
                self._pass(data, sink, direction)
        self.cut()

    def _pass(self, data: bytes, sink: socket.socket, direction: Direction) -> None:
        while data and not self._swallows:
            before, fault = self._plan.pass_on(direction, len(data))
            sink.sendall(data[:before])
            data = data[before:]
            if fault is not None:
                data = self._harm(fault, data, sink)

    def _harm(self, fault: Fault, data: bytes, sink: socket.socket) -> bytes:
        """Do what a fault says, and return which bytes still have to pass."""
        some = 1 + int(999 * min(fault.extent, 1.0))
        match fault.harm:
            case "end" | "reset":
                self.cut(reset=fault.harm == "reset")
                return b""
            case "swallow":
                self._swallows = True
                threading.Timer(fault.extent, self.cut).start()
                return b""
            case "delay":
                time.sleep(fault.extent)
                return data
            case "duplicate":
                sink.sendall(data[:some])
                return data
            case _:
                threading.Timer(CUT_AFTER_S, self.cut).start()
                return data[some:]

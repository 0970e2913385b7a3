"""Programs between two parties: they pass bytes on, damage them, or fall silent; HTTP proxies.

One that holds both parties' keys records every message of a run over mutual TLS.
"""

import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import grpc

from splitveil.deploy.authority import PartyFolder
from tests.support.certificates import NAMES
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
        with suppress(OSError):  # closed
            # A thread that accepts would keep a socket that is only closed.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
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

    def _join(self, near: socket.socket, far: socket.socket) -> None:
        """Pass on what comes from either end, until both are done."""
        back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
        back.start()
        self._copy(near, far)
        back.join()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._pass(data, sink)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, data: bytes, sink: socket.socket) -> None:
        sink.sendall(data)


class Relay(Between):
    """Passes connections on to ports of localhost: the first to one, all later ones to another."""

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
            self._join(near, far)


class ConnectProxy(Between):
    """Connects for ``CONNECT`` requests, or says ``reply`` instead; records their heads."""

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
                self._join(near, far)


class SilentLine(Relay):
    """Passes connections on to a port of localhost, except while it is silent.

    What is sent meanwhile waits in the kernel's buffers, like the packets that a dead line makes a
    host send again, and new connections are taken and never answered.
    """

    def __init__(self, port: int) -> None:
        self._passes = threading.Event()
        self._passes.set()
        super().__init__(port)

    def __exit__(self, *_: object) -> None:
        self.resume()
        super().__exit__()

    def silence(self) -> None:
        self._passes.clear()

    def resume(self) -> None:
        """Let everything pass again, and what has waited first."""
        self._passes.set()

    def _serve(self, near: socket.socket, number: int) -> None:
        self._passes.wait()
        super()._serve(near, number)

    def _pass(self, data: bytes, sink: socket.socket) -> None:
        self._passes.wait()
        sink.sendall(data)


# ---- faults ----

Direction = Literal["up", "down"]
"""``up`` is from the passive party to the active one."""

ByteHarm = Literal["end", "reset", "swallow", "delay", "duplicate", "truncate"]

CUT_AFTER_S = 1.0
"""How long a connection lasts of which bytes are missing: keepalive would take a minute."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Fault(NamedTuple):
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


class FaultyLine(Relay):
    """Passes connections on to an address of localhost, byte for byte but for the faults.

    The plan counts what passes in a direction over all connections, so that one run without faults
    says where a fault can strike.
    """

    def __init__(self, target: str, plan: Plan) -> None:
        self._plan = plan
        super().__init__(int(target.rpartition(":")[2]))
        self.address = f"127.0.0.1:{self.port}"

    def _join(self, near: socket.socket, far: socket.socket) -> None:
        connection = _FaultyConnection(near, far, self._plan)
        back = threading.Thread(target=connection.pump, args=(far, near, "down"), daemon=True)
        back.start()
        connection.pump(near, far, "up")
        back.join()


class _FaultyConnection:
    """One connection through the line: two sockets, one thread for each direction."""

    def __init__(self, near: socket.socket, far: socket.socket, plan: Plan) -> None:
        self._ends = near, far
        self._plan = plan
        self._swallows = False

    def cut(self, *, reset: bool = False) -> None:
        """End it on both sides, by a FIN or an RST."""
        for end in self._ends:
            with suppress(OSError):  # it has ended already
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    end.shutdown(socket.SHUT_RD)  # wakes whoever reads
                    end.close()
                else:
                    end.shutdown(socket.SHUT_RDWR)

    def pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with suppress(OSError):  # one of the two ends is gone, and with it the other
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


# ---- messages ----


class Call(NamedTuple):
    """One call of the passive party's, and what crossed the line in it."""

    method: str
    up: list[bytes]
    down: list[bytes]
    status: list[str]


class MessageLine(grpc.GenericRpcHandler):
    """Passes calls on to an address of localhost, and keeps all messages, and how each call ends.

    To either party it shows the other one's certificate, from a folder of both.
    """

    def __init__(self, target: str, certificates: Path) -> None:
        self.calls: list[Call] = []
        active, passive = (PartyFolder(certificates / name) for name in NAMES)
        authority, certificate, key = (
            path.read_bytes()
            for path in (passive.authority, passive.certificate, passive.private_key)
        )
        self._channel = grpc.secure_channel(
            target,
            grpc.ssl_channel_credentials(authority, key, certificate),
            [("grpc.ssl_target_name_override", NAMES["active"])],
        )
        pair = active.private_key.read_bytes(), active.certificate.read_bytes()
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=[self])
        shown = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', shown)}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._server.stop(0).wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        def pass_on(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = Call(method.rpartition("/")[2], [], [], [])
            self.calls.append(call)
            either_way: Any = self._channel.stream_stream(method)
            answers = either_way(_noted(requests, call.up))
            try:
                yield from _noted(answers, call.down)
            except grpc.RpcError:
                context.set_code(answers.code())
            call.status.append(f"{answers.code()} {answers.details()}")
            context.set_details(answers.details())

        return grpc.stream_stream_rpc_method_handler(pass_on)


def _noted(messages: Iterator[bytes], notes: list[bytes]) -> Iterator[bytes]:
    for message in messages:
        notes.append(message)
        yield message

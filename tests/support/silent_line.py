"""A line between two programs that can go silent: nothing passes, and nobody hangs up."""

import contextlib
import socket
import threading
from typing import Self


class SilentLine:
    """Passes connections on to a port of loopback, except while it is silent.

    What is sent meanwhile waits in the kernel's buffers, like the packets that a dead line makes a
    host send again, and new connections are taken and never answered.

    Args:
        port: where connections go.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._passes = threading.Event()
        self._passes.set()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._passes.set()
        for one in (self._listener, *self._ends):
            with contextlib.suppress(OSError):  # it may have ended already
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def silence(self) -> None:
        """Let nothing pass from now on."""
        self._passes.clear()

    def resume(self) -> None:
        """Let everything pass again, and what has waited first."""
        self._passes.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                near, _ = self._listener.accept()
                self._passes.wait()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    pump = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                    pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one end is closed
            while data := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

"""Serves an HTTP application with uvicorn, in a thread of its own.

Connections are accepted here: uvicorn would keep the certificates of the start, leave a client that
says nothing its place for ever, and answer 503 to all others once there are many of those.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import uvicorn

from splitveil.active_party.http.http_connection import Connection
from splitveil.active_party.http.server_tls import ServerTls
from splitveil.common.errors import SettingsError
from splitveil.common.text.addresses import on_loopback, split_address

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
KEEP_ALIVE_S = 30
START_S = 30.0
LOG_LINES = 20
"""The most lines a minute about what clients do."""
_LOGGERS = ("uvicorn.error", "asyncio", __name__)
_NO_DESCRIPTORS_S = 0.1


class HttpServer:
    """Serves an application until it is closed."""

    def __init__(
        self, app: Any, address: str, tls: ServerTls | None = None, grace_s: int = 5
    ) -> None:
        self._socket = _bound(address, tls)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        self._server = _Server(config, self._socket, tls)
        self._filter = SparseLog()
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._filter)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()
        began = time.monotonic()
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() - began > START_S:
                raise SettingsError(f"serving.http: cannot serve at {address}")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_connections(self) -> int:
        return len(self._server.open)

    def close(self) -> None:
        """Stop serving; requests under way are answered."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._filter)

    def _serve(self) -> None:
        with contextlib.suppress(SystemExit):
            self._server.run(sockets=[])


class _Server(uvicorn.Server):
    """Accepts as many connections as there is room for, with the certificates of the moment."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, tls: ServerTls | None
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._tls = tls
        self._context = None if tls is None else tls.context
        self._most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.open: dict[Connection, None] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._tls is not None and self._context is not self._tls.context:
            self._context = self._tls.context
            # Who was let in by an authority that is no longer trusted has to come in again.
            for connection in list(self.open):
                connection.end()
        return await super().on_tick(counter)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # accepting one that waits already lets nobody else have a turn
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_NO_DESCRIPTORS_S)
                continue
            if len(self.open) >= self._most:
                logger.warning("%d connections: the longest unused one is closed", self._most)
                unused = next((one for one in self.open if one.is_waiting), None)
                if unused is None:
                    client.close()
                    continue
                unused.cut()
            # asyncio does this for sockets of its own alone. Without it, an answer's body waits for
            # the client to acknowledge its head, which takes 40 ms.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self.config, self.server_state, self.open)
            connection.opening = loop.create_task(self._establish(client, connection))

    async def _establish(self, client: socket.socket, connection: Connection) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, client, ssl=self._context
            )
        except OSError:
            pass  # no TLS, or a certificate that is not admitted
        finally:
            if connection.transport is None:
                connection.forget()


class SparseLog(logging.Filter):
    """Lets a few records a minute pass, and says how many it has left out."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._minute = -1.0
        self._number = self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        minute = self._now() // 60
        if minute != self._minute:
            self._minute, self._number = minute, 0
        self._number += 1
        if self._number > LOG_LINES:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg = f"{record.getMessage()} ({self._left_out} lines left out before)"
            record.args, self._left_out = (), 0
        return True


def _bound(address: str, tls: ServerTls | None) -> socket.socket:
    host, port = split_address(address)
    if tls is None:
        literal = on_loopback(address, "serving.http")
        host = literal.rpartition(":")[0].strip("[]")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=128)
        bound.setblocking(False)
        return bound
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"serving.http: cannot serve at {address}: {error}") from error

"""Serves an HTTP application with uvicorn, in a thread of its own.

Connections are accepted here: uvicorn would keep the certificates of the start, leave a client that
says nothing its place for ever, and answer 503 to all others once there are many of those.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from splitveil.active_party.settings import ServingTls
from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import printable
from splitveil.common.text.addresses import on_loopback, split_address
from splitveil.common.text.files import Closing, read_or_refuse, read_secret
from splitveil.common.text.system import most_open_files

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0  # that a client may take for its next request, or to take an answer


_MAX_HEAD_BYTES = 2**16


class _OneLength(h11.Connection):
    """Refuses a request that a proxy in front of this server may end elsewhere (RFC 9112, 6.1)."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            is_old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (is_old or b"content-length" in names):
                raise h11.RemoteProtocolError("expected one length of the body")
        return event


class Connection(H11Protocol):
    """A client's connection, which ends if nothing comes of it, with its certificate's name."""

    opening: "asyncio.Task[None]"

    def __init__(
        self, config: uvicorn.Config, state: Any, by_use: "dict[Connection, None]"
    ) -> None:
        super().__init__(config, state, {})
        self.conn = _OneLength(h11.SERVER, _MAX_HEAD_BYTES)
        self._by_use = by_use
        self._deadline: asyncio.TimerHandle | None = None
        self._note_use()

    @property
    def is_waiting(self) -> bool:
        """True if the client has to act: finish its request, or read its answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        shown = transport.get_extra_info("peercert")
        if shown:
            subject = dict(pair for part in shown["subject"] for pair in part)
            named = printable(subject.get("commonName", "unnamed"))
            self.app_state = {**self.app_state, "program": named}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.forget()

    def on_response_complete(self) -> None:
        """Give the client time for its next request."""
        super().on_response_complete()
        if self in self._by_use:
            self._note_use()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP, even in the middle of an answer, where uvicorn fails."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.cut()

    def end(self) -> None:
        """Close the connection, after the answer if a request is under way."""
        if self.transport is None:
            self.cut()
        elif not self.transport.is_closing():
            self.shutdown()

    def cut(self) -> None:
        self.forget()
        if self.transport is None:
            self.opening.cancel()
        else:
            self.transport.abort()

    def forget(self) -> None:
        self._by_use.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def _note_use(self) -> None:
        self.forget()
        self._by_use[self] = None
        self._deadline = self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        if self.is_waiting:
            self.cut()
        else:
            self._note_use()


_MAX_FILE_BYTES = 2**20


class ServerTls:
    """TLS 1.3 with files that may be replaced while they are in use."""

    def __init__(self, settings: ServingTls, base_dir: Path) -> None:
        self._settings = settings
        self._base_dir = base_dir
        self._files = self._read()
        self.context = self._context_of(self._files[-1])
        """With the files as they were at the last ``refresh``: another one if they have
        changed, since a context that trusts an authority cannot be made to forget it, nor sessions
        that it may resume."""

    def refresh(self) -> None:
        """Use the files as they are now; those that cannot be used change nothing."""
        try:
            now = self._read()
            if now != self._files:
                self.context = self._context_of(now[-1])
                self._files = now
                logger.info("new certificate in use for the programs that ask")
        except SettingsError as error:
            logger.warning("%s; the previous certificate stays in use", error)

    def _read(self) -> tuple[str, bytes, bytes | None]:
        own, folder = self._settings, self._base_dir
        private_key = read_secret(folder / own.private_key, "serving.tls.private_key")
        certificate = read_or_refuse(folder / own.certificate, _MAX_FILE_BYTES)
        if own.clients is None:
            return private_key, certificate, None
        return private_key, certificate, read_or_refuse(folder / own.clients, _MAX_FILE_BYTES)

    def _context_of(self, clients: bytes | None) -> ssl.SSLContext:
        own = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(
                self._base_dir / own.certificate, self._base_dir / own.private_key, lambda: ""
            )
            if clients is not None:
                context.load_verify_locations(cadata=clients.decode("ascii"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError, ValueError) as error:
            raise SettingsError(
                f"serving.tls: {self._base_dir / own.certificate}: the files cannot be used "
                f"({type(error).__name__}): expected PEM, and a key that belongs to the "
                f"certificate, without a password"
            ) from error
        return context


MOST_CONNECTIONS = 512
KEEP_ALIVE_S = 30
START_S = 30.0
LOG_LINES = 20  # the most lines a minute about what clients do
_LOGGERS = ("uvicorn.error", "asyncio", __name__)
_NO_DESCRIPTORS_S = 0.1


class HttpServer(Closing):
    def __init__(self, app: Any, address: str, tls: ServerTls | None = None) -> None:
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
            timeout_graceful_shutdown=5,
        )
        self._server = _AcceptingServer(config, self._socket, tls)
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


class _AcceptingServer(uvicorn.Server):
    """Accepts as many connections as fit, with the certificates of the moment."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, tls: ServerTls | None
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._tls = tls
        self._context = None if tls is None else tls.context
        self._most = min(MOST_CONNECTIONS, most_open_files() // 2)
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
            # A client admitted by an authority that is no longer trusted has to connect again.
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
            # asyncio does this only for sockets of its own. Without it, an answer's body waits for
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

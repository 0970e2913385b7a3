"""Serves an HTTP application with uvicorn, in a thread of its own."""

import contextlib
import socket
import threading
import time
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from splitveil.active_party.online.server_tls import ServerTls
from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import printable
from splitveil.common.text.addresses import on_loopback, split_address

MOST_CONNECTIONS = 512
KEEP_ALIVE_S = 30
START_S = 30.0


class HttpServer:
    """Serves an application until it is closed.

    Args:
        app: an ASGI application.
        address: host and port.
        tls: certificate and key; without them it serves plain text, on loopback only.
        grace_s: how long requests under way may take when it is closed.
    """

    def __init__(
        self, app: Any, address: str, tls: ServerTls | None = None, grace_s: int = 5
    ) -> None:
        """Start to serve.

        Raises:
            SettingsError: the address is taken, does not belong to this machine, or needs TLS.
        """
        self._socket = _bound(address, tls)
        self.port = int(self._socket.getsockname()[1])
        """The port on which it serves."""
        config = uvicorn.Config(
            app,
            http=_NamingProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
            ssl_context_factory=None if tls is None else lambda *_: tls.context,
        )
        self._server = uvicorn.Server(config)
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

    def close(self) -> None:
        """Stop serving; requests under way are answered."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(SystemExit):
            self._server.run(sockets=[self._socket])


class _NamingProtocol(H11Protocol):
    """Tells the application the common name of the certificate that a client has shown."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does this for sockets of its own alone. Without it, an answer's body waits for the
        # client to acknowledge its head, which takes 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = transport.get_extra_info("peercert")
        if shown:
            names = [value for part in shown["subject"] for key, value in part]
            keys = [key for part in shown["subject"] for key, value in part]
            named = dict(zip(keys, names, strict=True)).get("commonName", "unnamed")
            self.app_state = {**self.app_state, "program": printable(named)}


def _bound(address: str, tls: ServerTls | None) -> socket.socket:
    host, port = split_address(address)
    if tls is None:
        literal = on_loopback(address, "serving.http")
        host = literal.rpartition(":")[0].strip("[]")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"serving.http: cannot serve at {address}: {error}") from error

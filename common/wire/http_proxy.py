"""Connects a passive party to the active party through an HTTP proxy, if its settings allow one.

By itself, gRPC obeys the environment's proxy variables on every channel: even plain text to this
very machine would go out to the proxy. ``without_proxy`` switches all of that off; ``through``
names the one proxy that this party has chosen.
"""

import base64
import ipaddress
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from splitveil.common.errors import PeerUnreachable, SettingsError
from splitveil.common.text.files import read_secret

ChannelOptions = list[tuple[str, int | str]]

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that name a proxy, as gRPC reads them: the first that is set counts, and an empty one
names none."""

EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""Variables that list the hosts to reach without the proxy: the first that is set counts."""

_REPLY_BYTES = 8192

# The environment has a second way to impose a proxy, which the main switch does not turn off.
_NO_ADDRESSES: ChannelOptions = [("grpc.address_http_proxy_enabled_addresses", "")]


@dataclass(frozen=True)
class HttpProxy:
    host: str
    port: int

    credentials: str = field(default="", repr=False)
    """``user:password``, percent-encoded as given, or empty; never part of a message."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Have the proxy open a connection, and return it, or raise PeerUnreachable."""
        try:
            connection = socket.create_connection((self.host, self.port), timeout_s)
            try:
                lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
                if self.credentials:
                    known = base64.b64encode(unquote(self.credentials).encode()).decode()
                    lines.append(f"Proxy-Authorization: Basic {known}")
                connection.sendall("\r\n".join([*lines, "", ""]).encode())
                _read_consent(connection, time.monotonic() + timeout_s)
            except BaseException:
                connection.close()
                raise
        except UnicodeError:  # not chained: it may quote the password
            raise PeerUnreachable(
                "no connection to the proxy (its name, or the request to it, cannot be encoded)"
            ) from None
        except OSError as error:
            reason = error.strerror or "it does not answer in time"
            raise PeerUnreachable(f"no connection to the proxy ({reason})") from error
        return connection

    def through(self) -> ChannelOptions:
        url = f"http://{self.credentials}@{self}" if self.credentials else f"http://{self}"
        return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", url), *_NO_ADDRESSES]


def without_proxy() -> ChannelOptions:
    """Return the options of a channel that uses no proxy, regardless of the environment."""
    return [("grpc.enable_http_proxy", 0), *_NO_ADDRESSES]


def named_proxy(url: str, credentials: Path | None = None) -> HttpProxy:
    known = ""
    if credentials is not None:
        user, separator, password = read_secret(credentials, "proxy_credentials").partition(":")
        if not user or not separator:
            raise SettingsError(
                f"proxy_credentials: {credentials}: expected one line USER:PASSWORD"
            )
        known = f"{quote(user, safe='')}:{quote(password, safe='')}"
    try:
        return replace(_proxy_of(url), credentials=known)
    except ValueError as error:
        raise SettingsError(f"proxy: expected http://HOST:PORT, got {url}") from error


def proxy_of_environment(address: str) -> HttpProxy | None:
    """Return the proxy that the environment names for an address, or None. Raises SettingsError."""
    variable = next((name for name in VARIABLES if name in os.environ), None)
    if variable is None or not os.environ[variable] or _is_excepted(address.rpartition(":")[0]):
        return None
    try:
        return _proxy_of(os.environ[variable])
    except ValueError:
        # The value is not repeated: it may hold a password.
        raise SettingsError(
            f"proxy: expected http://HOST:PORT in the environment's {variable}"
        ) from None


def _read_consent(connection: socket.socket, deadline: float) -> None:
    """Read the proxy's reply, and not a byte beyond it."""
    reply = b""
    while not reply.endswith(b"\r\n\r\n") and len(reply) < _REPLY_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        received = connection.recv(1)
        if not received:
            break
        reply += received
    status = re.match(rb"HTTP/1\.[01] ([0-9]{3})", reply)
    if status is None or not reply.endswith(b"\r\n\r\n"):
        raise PeerUnreachable("no connection to the peer (the proxy does not speak HTTP)")
    if not status[1].startswith(b"2"):
        code = status[1].decode()
        raise PeerUnreachable(f"no connection to the peer (the proxy answers with status {code})")


def _proxy_of(text: str) -> HttpProxy:
    url = urlsplit(text)
    if url.scheme != "http" or not url.hostname or not url.port:
        raise ValueError
    return HttpProxy(url.hostname, url.port, url.netloc.rpartition("@")[0])


def _is_excepted(host: str) -> bool:
    """Decide by the end of the name or by a network, as gRPC does for itself."""
    name = host.strip("[]").lower()
    listed = next((os.environ[name] for name in EXCEPTIONS if name in os.environ), "")
    for end in (entry.strip().lower() for entry in listed.split(",") if entry.strip()):
        if name.endswith(end):
            return True
        with suppress(ValueError):
            if ipaddress.ip_address(name) in ipaddress.ip_network(end, strict=False):
                return True
    return False

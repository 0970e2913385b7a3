"""Parses and checks network addresses of the form HOST:PORT in settings."""

import ipaddress
import re
import socket
from typing import NamedTuple
from urllib.parse import unquote

from splitveil.common.errors import SettingsError

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")
_SECRET = re.compile(r"(?i)(password|passwd|secret|token|sig|_key)[\"']?\s*[=:]")
_IN_BRACKETS = re.compile(r"\[([0-9A-Fa-f:.]{2,45})\]")


class HostAndPort(NamedTuple):
    host: str  # a host name, or an IP address without brackets
    port: int


def may_hold_secret(text: str) -> bool:
    """Return whether a text has the form of an address with a password, or of a secret's setting.

    Nobody knows where a password ends that is not encoded as it should be: texts of this form are
    never shown, not even in part.
    """
    decoded = unquote(text)
    before_host = decoded.rpartition("@")[0]
    return ":" in before_host.replace("://", "") or bool(_SECRET.search(decoded))


def split_address(address: str, *, least_port: int = 1) -> HostAndPort:
    """Split ``HOST:PORT``, or raise ValueError; a port of 0 may be chosen by the system."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not least_port <= int(port) <= 65535:
        raise ValueError("expected HOST:PORT with a port from 1 to 65535")
    if number := _IN_BRACKETS.fullmatch(host):
        return HostAndPort(str(ipaddress.IPv6Address(number[1])), int(port))
    if not _NAME.fullmatch(host):
        raise ValueError(
            "expected HOST:PORT with a host name, an IPv4 address or an IPv6 address in brackets"
        )
    return HostAndPort(host, int(port))


def usable(address: str) -> str:
    """Return an address unchanged after checking it, for the validator of a setting."""
    split_address(address)
    return address


MTLS_ADVICE = (
    "security.mode is insecure: the connection would be unprotected; use security.mode mtls"
)


def is_numeric_loopback(host: str) -> bool:
    """Return whether a host is an IP address of this machine that no other machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def on_loopback(address: str, setting: str, advice: str = MTLS_ADVICE) -> str:
    """Resolve an address to a numeric one, IPv4 if possible; SettingsError off this machine.

    Connect to the result, not to the name: only this address was checked. ``advice`` ends the
    message.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError) as error:
        raise SettingsError(f"{setting}: {host!r} cannot be resolved: {error}") from error
    numbers = [str(socket_address[0]) for *_, socket_address in found]
    for number in numbers:
        if not ipaddress.ip_address(re.sub("%.*", "", number)).is_loopback:
            raise SettingsError(f"{setting}: {address} is not on loopback and {advice}")
    chosen = min(numbers, key=lambda number: ":" in number)
    return f"[{chosen}]:{port}" if ":" in chosen else f"{chosen}:{port}"

"""Addresses as settings give them: a host, a colon, a port."""

import ipaddress
import re
import socket
from typing import NamedTuple

from splitveil.common.errors import SettingsError

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")
_IN_BRACKETS = re.compile(r"\[([0-9A-Fa-f:.]{2,45})\]")


class HostAndPort(NamedTuple):
    """An address in its parts."""

    host: str
    """A name, or a number without brackets."""

    port: int


def split_address(address: str) -> HostAndPort:
    """Take an address apart.

    Raises:
        ValueError: it is none that another party could be told.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not 1 <= int(port) <= 65535:
        raise ValueError(f"expected HOST:PORT with a port from 1 to 65535, got {address!r}")
    if number := _IN_BRACKETS.fullmatch(host):
        return HostAndPort(str(ipaddress.IPv6Address(number[1])), int(port))
    if not _NAME.fullmatch(host):
        raise ValueError(
            f"expected HOST:PORT with a name, a number or an IPv6 number in brackets, "
            f"got {address!r}"
        )
    return HostAndPort(host, int(port))


def usable(address: str) -> str:
    """Return an address as it is, for a setting.

    Raises:
        ValueError: it is none.
    """
    split_address(address)
    return address


def on_loopback(address: str, setting: str) -> str:
    """Return the numbers of an address, once it is certain that they do not leave this machine.

    Whoever uses these numbers, and looks up no name again, stays where this function has looked.
    Where a name has several, the IPv4 one is returned, on both sides of a connection alike.

    Args:
        address: host and port.
        setting: its name in the settings.

    Raises:
        SettingsError: the host cannot be resolved, or not to loopback addresses only.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError) as error:
        raise SettingsError(f"{setting}: {host!r} cannot be resolved: {error}") from error
    numbers = [str(socket_address[0]) for *_, socket_address in found]
    for number in numbers:
        if not ipaddress.ip_address(re.sub("%.*", "", number)).is_loopback:
            raise SettingsError(
                f"{setting}: {address} is not on loopback, and security.mode is insecure: nothing "
                f"would protect what travels there; use security.mode mtls"
            )
    chosen = min(numbers, key=lambda number: ":" in number)
    return f"[{chosen}]:{port}" if ":" in chosen else f"{chosen}:{port}"

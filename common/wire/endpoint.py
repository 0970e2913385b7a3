"""Opens either end of the connection: names, options, and TLS unless it was declined."""

import logging
import socket

import grpc

from splitveil.common.errors import PeerError, PeerUnreachable, PeerUntrusted, SettingsError
from splitveil.common.party.credentials import CredentialFiles, Credentials, describe
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.text.addresses import on_loopback, split_address
from splitveil.common.wire.http_proxy import ChannelOptions, HttpProxy, without_proxy
from splitveil.common.wire.server_certificate import LOOK_TIMEOUT_S, judged_certificate
from splitveil.common.wire.tls import channel_credentials

logger = logging.getLogger(__name__)

SERVICE = "splitveil.v1.SplitLearning"  # served by the active party while a model is trained
INFERENCE_SERVICE = "splitveil.v1.SplitInference"
"""Served by a passive party once a model is trained."""

HANDSHAKE_TIMEOUT_S = 20.0


def method_path(method: str, service: str = SERVICE) -> str:
    return f"/{service}/{method}"


def open_channel(
    address: str,
    contract: Contract,
    credentials: Credentials | None,
    proxy: HttpProxy | None = None,
    party: str = ACTIVE,
) -> grpc.Channel:
    """Return a channel to one party of the contract, and to no other server.

    With credentials, the certificate of the server that answers now is checked first: the channel
    only ever connects to the holder of that certificate. Without credentials, it connects with the
    first call.

    Args:
        contract: gives the limits, and the name that the party's certificate must carry.
        credentials: this party's; None for plain text, which never leaves the machine.

    Raises SettingsError, PeerUntrusted or PeerUnreachable.
    """
    options = channel_options(contract) + (without_proxy() if proxy is None else proxy.through())
    if credentials is None:
        refuse_plain_text_through(proxy)
        literal = on_loopback(address, "connect")
        family = "ipv6" if literal.startswith("[") else "ipv4"
        return grpc.insecure_channel(f"{family}:{literal}", options)  # an IP: no lookup
    identity = contract.identities[party]
    pinned = _pinned(address, proxy, credentials.authority, identity)
    # TLS then compares the certificate with this name instead of the host in the address.
    options.append(("grpc.ssl_target_name_override", identity))
    return grpc.secure_channel(address, channel_credentials(credentials, pinned), options)


def shown_certificate(
    address: str, contract: Contract, credentials: Credentials, proxy: HttpProxy | None = None
) -> bytes:
    """Return the certificate that the active party shows now, PEM, once it has been verified.

    Raises PeerUntrusted or PeerUnreachable.
    """
    return _pinned(address, proxy, credentials.authority, contract.identities[ACTIVE])


def _pinned(address: str, proxy: HttpProxy | None, authority: bytes, identity: str) -> bytes:
    """Return the certificate to pin, trying each IP address of the name in turn, as gRPC does."""
    errors: list[PeerError] = []
    for endpoint in [address] if proxy is not None else _resolved(address):
        try:
            with _connection_to(endpoint, proxy) as connection:
                return judged_certificate(connection, authority, identity)
        except PeerError as error:
            errors.append(error)
    untrusted = (error for error in errors if isinstance(error, PeerUntrusted))
    raise next(untrusted, errors[-1])


def _resolved(address: str) -> list[str]:
    """Resolve the name in an address, and return its IP addresses with the port, each once."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unreachable(error) from error
    return list(dict.fromkeys(":".join(map(str, resolved[:2])) for *_, resolved in found))


def _connection_to(endpoint: str, proxy: HttpProxy | None) -> socket.socket:
    if proxy is not None:
        return proxy.connect(endpoint, LOOK_TIMEOUT_S)
    host, _, port = endpoint.rpartition(":")
    try:
        return socket.create_connection((host, int(port)), LOOK_TIMEOUT_S)
    except OSError as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> PeerUnreachable:
    reason = getattr(error, "strerror", None) or "it does not answer in time"
    return PeerUnreachable(f"no connection to the peer ({reason})")


def check_security(files: CredentialFiles | None, address: str, setting: str) -> str:
    """Describe in words the protection of the connection.

    Args:
        files: this party's credentials; None for plain text.
    """
    if files is not None:
        return f"mtls as {describe(files.current())}"
    on_loopback(address, setting)
    return "insecure: the connection is not encrypted"


def log_security(files: CredentialFiles | None, address: str, setting: str) -> None:
    """Log the protection of the connection, or raise SettingsError; see ``check_security``."""
    level = logging.WARNING if files is None else logging.INFO
    logger.log(level, "security: %s", check_security(files, address, setting))


def refuse_plain_text_through(proxy: HttpProxy | None) -> None:
    """Refuse to send plain text through a proxy, which would read it, or raise SettingsError."""
    if proxy is not None:
        raise SettingsError(
            f"proxy: security.mode is insecure, and {proxy} would read every message; use "
            f"security.mode mtls, or no proxy"
        )


def channel_options(contract: Contract) -> ChannelOptions:
    """Return the options of a channel or server: explicit limits, keepalive, no surprises.

    HTTP/2 windows, frame sizes and the bandwidth probe stay at gRPC's defaults, which performed
    best in measurements.
    """
    return [
        ("grpc.max_send_message_length", contract.max_message_bytes),
        ("grpc.max_receive_message_length", contract.max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A server that takes a ping every 30 s for an attack would drop the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.enable_retries", 0),
        # By default, gRPC tries to reach a party that was away for minutes only every two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # Two servers on one port would each get some of the calls: the second must fail instead.
        ("grpc.so_reuseport", 0),
    ]

"""Opens either end of the connection: names, options, and TLS unless it was declined.

gRPC's client accepts a wildcard as a name, and the subject's common name where there is no subject
alternative name; and it does not report which certificate it was shown. So the passive party looks
first. It begins a TLS handshake of its own, which verifies the certificate up to the authority, and
compares its DNS names as the active party compares its callers': one of them has to be the
contract's identity, letter for letter except for the case of ASCII letters. That certificate is
then the only one that gRPC is given to trust. A server that answers on gRPC's connection has to
show this very certificate and hold its key, so the verification covers that server.

The first handshake ends before this party would show anything about itself, and only the
certificate is kept from it. As in gRPC, a certificate without an extended key usage may serve
either end, one with an extended key usage must allow a server's, and an authority need not be
self-signed.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from splitveil import common
from splitveil.common.errors import PeerError, PeerUnreachable, PeerUntrusted, SettingsError
from splitveil.common.party.credentials import (
    CredentialFiles,
    Credentials,
    describe,
    dns_names,
    printable,
)
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.text.addresses import on_loopback, split_address
from splitveil.common.text.system import most_open_files
from splitveil.common.wire.http_proxy import ChannelOptions, HttpProxy, without_proxy
from splitveil.common.wire.limits import (
    CONCURRENT_RPCS,
    PARTY_KEY,
    SERVER_THREADS,
    SERVICE,
    STREAMS_PER_CONNECTION,
)
from splitveil.common.wire.recorded_calls import Notes, NotingServer
from splitveil.common.wire.status import (
    UNTRUSTED,
    ErrorInterceptor,
    ErrorListener,
    Handler,
    HandlerInterceptor,
)
from splitveil.protos import split_learning_pb2 as pb

LOOK_TIMEOUT_S = 10.0

_CHUNK_BYTES = 65536
_RECORDS_OF_TLS = frozenset(range(20, 24))
"""First byte of every TLS record: change of cipher, alert, handshake, data."""

# OpenSSL's numbers for the faults of a certificate; its words change from version to version.
_UNKNOWN_SIGNER = frozenset({2, 18, 19, 20, 21})
_MEANINGS = {
    7: "a signature in the peer's chain of certificates does not verify: it is damaged, or its "
    "signer only shares the name of an authority in security.authority",
    9: "the peer's certificate is not valid yet, or this machine's clock is wrong",
    10: "the peer's certificate has expired, or this machine's clock is wrong",
    26: "the peer's certificate is not for servers (extended key usage)",
} | dict.fromkeys(
    _UNKNOWN_SIGNER, "the peer's certificate is not signed by any authority in security.authority"
)


def judged_certificate(connection: socket.socket, authority: bytes, identity: str) -> bytes:
    """Return the server's certificate, PEM, once it has been verified, or raise PeerError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it accepts wildcards; names are compared above
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    for certificate in x509.load_pem_x509_certificates(authority):
        context.load_verify_locations(cadata=certificate.public_bytes(Encoding.DER))
    shown = _shown_certificate(connection, context, identity)
    try:
        names = dns_names(x509.load_der_x509_certificate(shown))
    except ValueError as error:
        raise PeerUntrusted("the names in the peer's certificate cannot be read") from error
    if identity not in names:
        found = ", ".join(printable(name) for name in names) or "none"
        raise PeerUntrusted(
            f"the peer's certificate does not carry the called party's name: "
            f"expected {identity!r} (contract.identities) among the DNS names of its subject "
            f"alternative name, found {found}"
        )
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _shown_certificate(connection: socket.socket, context: ssl.SSLContext, identity: str) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    # As bytes: text would have to be a valid host name, while an identity is never looked up.
    tls = context.wrap_bio(incoming, outgoing, server_hostname=identity.encode())
    deadline = time.monotonic() + LOOK_TIMEOUT_S
    is_first = True
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            received = _exchange(connection, outgoing.read(), deadline)
        except ssl.SSLError as error:
            raise _meaning_of(error) from error
        if is_first and received[0] not in _RECORDS_OF_TLS:
            raise PeerUntrusted("the peer answers without TLS")
        is_first = False
        incoming.write(received)
    shown = tls.getpeercert(binary_form=True)
    if shown is None:
        raise PeerUntrusted("the peer shows no certificate")
    return shown


def _exchange(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    left_s = deadline - time.monotonic()
    if left_s <= 0:  # bytes kept coming, but never enough
        raise PeerUnreachable("no connection to the peer (it does not answer in time)")
    try:
        connection.settimeout(left_s)
        connection.sendall(data)
        received = connection.recv(_CHUNK_BYTES)
    except OSError as error:
        reason = error.strerror or "it does not answer in time"
        raise PeerUnreachable(f"no connection to the peer ({reason})") from error
    if not received:
        raise PeerUnreachable("no connection to the peer (it hangs up)")
    return received


def _meaning_of(error: ssl.SSLError) -> PeerError:
    if isinstance(error, ssl.SSLCertVerificationError):
        otherwise = f"the peer's certificate cannot be trusted ({error.verify_message})"
        return PeerUntrusted(_MEANINGS.get(error.verify_code, otherwise))
    reason = error.reason or "unknown reason"
    if "BAD_SIGNATURE" in reason:
        return PeerUntrusted("the peer does not hold the key of the certificate that it shows")
    if "PROTOCOL" in reason or "HANDSHAKE_FAILURE" in reason:
        return PeerUntrusted("the peer does not speak TLS 1.3")
    return PeerUnreachable(f"no connection to the peer (TLS fails: {reason})")


logger = logging.getLogger(__name__)

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
    only ever connects to the holder of that certificate. Without credentials it is plain text,
    which never leaves the machine, and connects with the first call.

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
    """Return the active party's certificate, PEM, once it has been verified, or raise PeerError."""
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
    """Describe the protection of the connection, which is plain text without files."""
    if files is not None:
        return f"mtls as {describe(files.current())}"
    on_loopback(address, setting)
    return "insecure: the connection is not encrypted"


def log_security(files: CredentialFiles | None, address: str, setting: str) -> None:
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


_Shown = Mapping[str, Sequence[bytes]]

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_MAX_REMEMBERED = 1000


def channel_credentials(credentials: Credentials, pinned: bytes) -> grpc.ChannelCredentials:
    """Return the credentials that a client shows, and the only certificate that it trusts."""
    _require_tls_1_3()
    return grpc.ssl_channel_credentials(pinned, credentials.private_key, credentials.certificate)


def server_credentials(files: CredentialFiles) -> grpc.ServerCredentials:
    _require_tls_1_3()
    served = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        now = files.current()
        if now is served:
            return None
        served = now
        return _configuration(now)

    # None means unchanged, which grpcio's stubs do not allow for.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), fetch, require_client_authentication=True
    )


def _require_tls_1_3() -> None:
    if common.GRPC_CAME_FIRST:
        raise SettingsError(
            "gRPC was imported before splitveil, and may agree to TLS 1.2: import splitveil first, "
            f"or start the process with {common.SUITES}={common.NEVER_AGREED} in its environment"
        )


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.private_key, credentials.certificate)], credentials.authority
    )


class PartyInterceptor(HandlerInterceptor):
    """Admits only certain parties of the contract, of all whom the authority has certified.

    It has to be a server's first interceptor: a refused caller gets a fixed sentence, reaches no
    handler, and leaves one line in the log for each connection.

    Args:
        admitted: the parties' names in the contract; by default every passive party.
    """

    def __init__(self, contract: Contract, admitted: Sequence[str] | None = None) -> None:
        names = contract.passive_parties if admitted is None else admitted
        self._kind = "any passive" if admitted is None else f"the {' or '.join(admitted)}"
        self._parties = {contract.identities[name]: name for name in names}
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def wrap(self, handler: Handler, _details: grpc.HandlerCallDetails, /) -> Handler:
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        return handler._replace(**{kind: self._guarded(getattr(handler, kind))})

    def _guarded(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            # grpcio's stubs declare bytes where lists of bytes arrive.
            shown = cast("_Shown", context.auth_context())
            party = self._party_of(shown)
            claimed = {value for key, value in context.invocation_metadata() if key == PARTY_KEY}
            message = "call"
            if isinstance(request, pb.HandshakeRequest):
                claimed.add(request.party)
                message = "handshake"
            if party is None or claimed - {party}:
                self._log_refusal(shown, context.peer(), party, message)
                context.abort(UNTRUSTED.code, UNTRUSTED.details)
            return behaviour(request, context)

        return guarded

    def _party_of(self, shown: _Shown) -> str | None:
        # Not from "peer_dns", in which gRPC cuts a name at its first NUL.
        pem = b"".join(shown.get("x509_pem_cert", [])[:1])
        try:
            names = dns_names(x509.load_pem_x509_certificate(pem))
        except ValueError:
            return None
        parties = {self._parties[name] for name in names if name in self._parties}
        return parties.pop() if len(parties) == 1 else None

    def _log_refusal(self, shown: _Shown, peer: str, party: str | None, message: str) -> None:
        with self._lock:
            if peer in self._logged:
                return
            if len(self._logged) >= _MAX_REMEMBERED:
                self._logged.clear()
            self._logged.add(peer)
        subject = b", ".join(shown.get("x509_subject", [])).decode(errors="replace")
        reason = (
            f"it does not carry the name of {self._kind} party of the contract"
            if party is None
            else f"it is {party}'s, and the {message} names another party"
        )
        logger.warning("refused %s with certificate %s: %s", peer, printable(subject), reason)


_MOST_CONNECTIONS = 1024
"""Connections that a server holds at each address; parties have one or two each."""


def build_server(
    contract: Contract,
    service: str,
    address: str,
    credentials: CredentialFiles | None,
    on_error: ErrorListener,
    *,
    notes: Notes | None = None,
    threads: int = SERVER_THREADS,
    callers: int = 1,
    admitted: Sequence[str] | None = None,
) -> "tuple[grpc.Server, HealthService]":
    """Build a server that listens at an address, and the health service beside its own.

    Its methods are added by the caller, who starts it.

    Without credentials it serves plain text, on loopback only. ``callers`` parties call at the same
    time; by default every passive party is ``admitted``.
    """
    # The outermost comes first. Errors become statuses outside of the transcript, because the
    # transcript itself may fail, on a full disk.
    interceptors: list[grpc.ServerInterceptor] = []
    if credentials is not None:
        interceptors.append(PartyInterceptor(contract, admitted))
    interceptors.append(ErrorInterceptor(on_error))
    if notes is not None:
        interceptors.append(NotingServer(notes))
    most_connections = min(most_open_files() // 4, _MOST_CONNECTIONS)
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
        interceptors=interceptors,
        options=[
            *channel_options(contract),
            # Anybody can connect, and stay silent. At both addresses of a name, that leaves half of
            # the descriptors to the party's files.
            ("grpc.max_allowed_incoming_connections", most_connections),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
            # A few compressed kilobytes could expand without limit.
            ("grpc.compression_enabled_algorithms_bitset", 1),
        ],
        maximum_concurrent_rpcs=CONCURRENT_RPCS * callers,
    )
    servicer = HealthService()
    servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add_port(server, address, credentials)
    return server, servicer


def add_port(server: grpc.Server, address: str, files: CredentialFiles | None) -> None:
    try:
        if files is None:
            bound = server.add_insecure_port(on_loopback(address, "listen"))
        else:
            bound = server.add_secure_port(address, server_credentials(files))
    except RuntimeError as error:
        raise SettingsError(f"listen: cannot serve at {address}: {error}") from error
    asked = int(address.rpartition(":")[2])
    if not bound or asked not in (0, bound):
        raise SettingsError(f"listen: cannot serve at {address}: gRPC took port {bound} instead")


class HealthService(health.HealthServicer):  # type: ignore[misc]
    """Answers whether this party serves; there is no stream of later changes."""

    def Watch(self, request: Any, context: grpc.ServicerContext) -> None:  # noqa: ARG002, N802 (gRPC's)
        """Refuse: long-lived streams would occupy every slot that calls have."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check")

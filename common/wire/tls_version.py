"""Restricts gRPC to TLS 1.3, even where gRPC was imported before splitveil."""

import socket
from functools import cache

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined, unused-ignore]

from splitveil import common
from splitveil.common.errors import SettingsError

_TIMEOUT_S = 20.0
_RECORD_HEADER = 5
_SUITES_OF_TLS_1_3 = range(0x1301, 0x1306)
_SUITE_NEVER_AGREED = 0xCCAC
_RENEGOTIATION = 0x00FF  # a signal in the list of suites, not a suite


@cache
def require_tls_1_3() -> None:
    """Make gRPC leave out TLS 1.2 where necessary, and check that it does.

    gRPC builds its list of suites when it first uses TLS, and never changes it afterwards. A
    process that used gRPC's TLS before it imported splitveil is therefore refused.

    Raises:
        SettingsError: gRPC would agree to TLS 1.2, or its choice cannot be determined.
    """
    if not common.GRPC_CAME_FIRST:
        return
    # Not needed with a later grpcio that reads the variable in time, or resets in another way.
    getattr(cygrpc, "reset_grpc_config_vars", lambda: None)()
    try:
        offered = _offered_suites()
    except OSError as error:
        raise SettingsError(
            "gRPC was imported before splitveil, and a loopback connection does not show whether "
            f"it would agree to TLS 1.2 ({error}): {_WAY_OUT}"
        ) from error
    if not all(_is_harmless(suite) for suite in offered):
        raise SettingsError(
            "this process used gRPC's TLS before it imported splitveil, and would agree to "
            f"TLS 1.2: {_WAY_OUT}"
        )


_WAY_OUT = (
    "import active_party, passive_party or common first, or start the process with "
    f"{common.SUITES}={common.NEVER_AGREED} in its environment"
)


def _is_harmless(suite: int) -> bool:
    reserved = suite & 0x0F0F == 0x0A0A and suite >> 8 == suite & 0xFF  # GREASE, of RFC 8701
    known = suite in _SUITES_OF_TLS_1_3 or suite in {_SUITE_NEVER_AGREED, _RENEGOTIATION}
    return reserved or known


def _offered_suites() -> list[int]:
    """Return the suites that a gRPC client offers; its servers accept from the same list.

    Raises:
        OSError: there is no connection on loopback, or its first message is not a ClientHello.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(), options) as channel:
            # A call connects; gRPC's thread that watches a channel may fail as that is closed.
            channel.unary_unary("/", bytes, bytes).future(b"")
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                connection.settimeout(_TIMEOUT_S)
                header = stream.read(_RECORD_HEADER)
                message = stream.read(int.from_bytes(header[3:]))
    return _suites_of(message)


def _suites_of(client_hello: bytes) -> list[int]:
    """Return the cipher suites of a ClientHello, laid out as in RFC 8446, section 4.1.2."""
    at = 4 + 2 + 32  # type and length, version, random
    at += 1 + int.from_bytes(client_hello[at : at + 1])  # session id
    length = int.from_bytes(client_hello[at : at + 2])
    suites = client_hello[at + 2 : at + 2 + length]
    if client_hello[:1] != b"\x01" or not suites or len(suites) != length:
        raise OSError("expected a ClientHello")
    return [int.from_bytes(suites[start : start + 2]) for start in range(0, length, 2)]

"""Builds gRPC servers: who may call, what becomes of errors, limits, TLS and health."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.run.contract import Contract
from splitveil.common.text.addresses import on_loopback
from splitveil.common.text.system import most_open_files
from splitveil.common.wire.endpoint import PartyInterceptor, channel_options, server_credentials
from splitveil.common.wire.limits import CONCURRENT_RPCS, SERVER_THREADS, STREAMS_PER_CONNECTION
from splitveil.common.wire.recorded_calls import Notes, NotingServer
from splitveil.common.wire.status import ErrorInterceptor, ErrorListener

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

"""Simulated parties that meet over gRPC on loopback."""

import secrets
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.common.party.credentials import credential_files
from splitveil.common.run.contract import ACTIVE
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.simulation.parties import ActiveParty, Simulation

_PORTS = range(20_000, 30_000)
"""Below those that systems give to outgoing connections, one of which could take a free port before
its server does."""

_given: deque[int] = deque(maxlen=1000)


def free_address() -> str:
    """Return an address of loopback at which nobody listens, and which was not returned yet."""
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if port in _given:  # whoever asked for it may not listen yet
            continue
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.append(port)
            return f"127.0.0.1:{port}"
    raise OSError("found no free port on loopback")


@contextmanager
def serving(active: ActiveParty, address: str) -> Iterator[ActiveService]:
    """Serve an active party at an address, with the protection that its settings ask for."""
    settings = active.settings
    service = ActiveService(active.session, active.engine, settings.reconnect.deadline_s)
    credentials = credential_files(settings, ACTIVE)
    server = start_server(service, settings.contract, address, credentials)
    try:
        yield service
    finally:
        server.stop(0).wait()


def meet_over_grpc(simulation: Simulation, address: str | None = None) -> None:
    """Let all parties meet over gRPC, by default at a free port; raises what ended the run."""
    address = address or free_address()
    with ExitStack() as resources:
        resources.enter_context(serving(simulation.active, address))

        def connect(simulation: Simulation, name: str) -> GrpcPeer:
            settings = simulation.passive[name].settings
            connection = PeerConnection(
                address, settings.contract, credential_files(settings, name)
            )
            peer = GrpcPeer(connection, settings.reconnect, party=name)
            return resources.enter_context(peer)

        simulation.meet(connect)

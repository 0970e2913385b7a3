"""Simulated parties that meet over gRPC on loopback."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from splitveil.active_party.serving.server import start_server
from splitveil.active_party.serving.service import ActiveService
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.loopback_ports import free_port
from splitveil.common.run.contract import ACTIVE
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.simulation.parties import ActiveParty, Simulation


def free_address() -> str:
    """Return a free address on loopback; see ``free_port``.

    Raises:
        OSError: none was found.
    """
    return f"127.0.0.1:{free_port()}"


@contextmanager
def serving(active: ActiveParty, address: str) -> Iterator[ActiveService]:
    """Serve an active party at an address, with the protection that its settings ask for.

    Args:
        active: the party.
        address: host and port.

    Raises:
        SettingsError: it cannot be served there.
    """
    settings = active.settings
    service = ActiveService(active.session, active.engine, settings.reconnect.deadline_s)
    credentials = credential_files(settings, ACTIVE)
    server = start_server(service, settings.contract, address, credentials)
    try:
        yield service
    finally:
        server.stop(0).wait()


def meet_over_grpc(simulation: Simulation, address: str | None = None) -> None:
    """Let all parties meet over gRPC.

    Args:
        simulation: the parties.
        address: host and port of the active party; by default a free port of loopback.

    Raises:
        SplitveilError: the error that ended the run.
    """
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

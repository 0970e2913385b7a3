"""An active party that is served at a port of localhost, and the peer that calls it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.grpc_peer import GrpcPeer
from tests.support.runs import Parties

LOCALHOST = "127.0.0.1"


@contextmanager
def serving(
    parties: Parties, port: int, *others: Any, host: str = LOCALHOST, **named: Any
) -> Iterator[ActiveService]:
    """Serve the active party; what else is given goes to ``start_server``."""
    service = ActiveService(parties.session, parties.engine, deadline_s=300)
    server = start_server(service, parties.session.contract, f"{host}:{port}", *others, **named)
    try:
        yield service
    finally:
        server.stop(1).wait()


def peer_of(
    parties: Parties,
    port: int,
    *others: Any,
    host: str = LOCALHOST,
    kind: type[GrpcPeer] = GrpcPeer,
    **named: Any,
) -> Any:
    """Make the passive party's peer, of a kind; what else is given goes to the connection."""
    settings = parties.passive_settings
    connection = PeerConnection(f"{host}:{port}", settings.contract, *others, **named)
    return kind(connection, settings.reconnect)


def listening(number: int) -> list[str]:
    """Return the addresses at which a process can be reached over TCP, in hexadecimal."""
    links = Path(f"/proc/{number}/fd")
    sockets = {str(link.readlink()) for link in links.iterdir()}
    lines = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/{number}/net/{family}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]

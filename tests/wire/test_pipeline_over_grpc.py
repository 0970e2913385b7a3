"""Activations sent ahead over gRPC: the bits of a run in one process, whatever breaks."""

from pathlib import Path

import pytest

from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.common.run.messages import Answer
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.grpc_peer import GrpcPeer
from tests.run.test_pipeline import pipelined
from tests.support import certificates, simulation
from tests.support.compared import assert_same_weights
from tests.support.runs import Parties, build_parties, run_in_process, serving
from tests.support.several import build_several, write_several
from tests.support.several import run_in_process as run_several

MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"
CHUNKED = "contract.wire={unchunked_bytes: 100, chunk_bytes: 524288}"


def pair(example: Path, depth: int) -> tuple[Parties, Parties]:
    """Return parties that meet over a wire, and others whose bits theirs must have."""
    both = pipelined(depth, CHUNKED)
    there, here = (build_parties(example, [*both, MARVELL], both) for _ in range(2))
    run_in_process(here)
    return there, here


@pytest.mark.parametrize(("depth", "is_secure"), [(1, True), (2, False), (4, True)])
def test_over_plain_text_and_tls_the_bits_are_those_of_one_process(
    example: Path, tmp_path: Path, port: int, depth: int, is_secure: bool
) -> None:
    there, here = pair(example, depth)
    made = certificates.make(tmp_path) if is_secure else None
    files = {
        party: None if made is None else certificates.files(made, party)
        for party in ("active", "passive")
    }
    contract = there.run.contract
    address = f"127.0.0.1:{port}"
    active = there.simulation().active
    service = ActiveService(active.session, active.engine, 60.0)
    server = start_server(service, contract, address, files["active"])
    try:
        connection = PeerConnection(address, contract, files["passive"])
        with GrpcPeer(connection, there.passive_settings.reconnect) as peer:
            there.run.run(peer)
    finally:
        server.stop(0).wait()
    assert_same_weights(there.weights(), here.weights())


class Breaking(GrpcPeer):
    """Loses its stream every few steps, with everything that is on its way."""

    count = 0

    def receive_gradient(self) -> Answer:
        self.count += 1
        if self.count % 3 == 0 and self._train.stream is not None:
            assert len(self._train.unanswered) <= 4
            self._train.stream._call.cancel()
        if self.count % 4 == 0 and self._evaluate.stream is not None:
            self._evaluate.stream._call.cancel()
        return super().receive_gradient()


@pytest.mark.parametrize("depth", [1, 4])
def test_broken_streams_change_no_bit(example: Path, port: int, depth: int) -> None:
    there, here = pair(example, depth)
    connection = PeerConnection(f"127.0.0.1:{port}", there.run.contract)
    reconnect = there.passive_settings.reconnect
    with serving(there, port), Breaking(connection, reconnect) as peer:
        there.run.run(peer)
    assert peer.count > 20
    assert_same_weights(there.weights(), here.weights())


def test_several_parties_have_the_bits_of_one_process(tmp_path: Path) -> None:
    write_several(tmp_path)
    both = [*pipelined(4), "contract.epochs=1"]
    there, here = (build_several(tmp_path, both, [MARVELL]) for _ in range(2))
    simulation.meet_over_grpc(there.simulation())
    run_several(here)
    assert_same_weights(there.weights(), here.weights())

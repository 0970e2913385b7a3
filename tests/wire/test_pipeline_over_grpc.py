"""Activations sent ahead over gRPC: the bits of a run in one process, whatever breaks."""

from pathlib import Path

from splitveil.common.run.messages import Answer
from splitveil.passive_party.grpc_peer import GrpcPeer
from tests.run.test_pipeline import pipelined
from tests.support import simulation
from tests.support.equality import assert_same_weights
from tests.support.loopback import peer_of, serving
from tests.support.runs import build_parties, run_in_process
from tests.support.several import build_several, write_several
from tests.support.several import run_in_process as run_several

MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"


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


def test_broken_streams_change_no_bit(example: Path, port: int) -> None:
    both = pipelined(4, "contract.wire={unchunked_bytes: 100, chunk_bytes: 524288}")
    there, here = (build_parties(example, [*both, MARVELL], both) for _ in range(2))
    run_in_process(here)
    with serving(there, port), peer_of(there, port, kind=Breaking) as peer:
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

"""What the passive party tells the peer when its run ends early."""

from pathlib import Path

import pytest

from common.errors import Interrupted, InvalidMessage
from common.wire.tensor_codec import BatchHeader, TensorMessage
from passive_party.peer import Offer, Opening
from protos import split_learning_pb2 as pb
from tests.peers import InProcessPeer
from tests.runs import build_parties, write_example


class ListeningPeer(InProcessPeer):
    """Remembers the goodbyes."""

    def leave(self, run_id: str, reason: "pb.LeaveReason") -> None:
        self.goodbyes = [*getattr(self, "goodbyes", []), reason]


class UnreachedPeer(ListeningPeer):
    """Is being called when a signal comes."""

    def handshake(
        self, party: str, canonical_contract: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        raise Interrupted


class ConfusedPeer(ListeningPeer):
    """Answers with the gradient of another step."""

    def receive_gradient(self) -> TensorMessage:
        reply = super().receive_gradient()
        header = BatchHeader(**(vars(reply.header) | {"step": 7}))
        return TensorMessage(header, reply.values)


def test_before_the_handshake_there_is_no_run_to_leave(tmp_path: Path) -> None:
    write_example(tmp_path)
    parties = build_parties(tmp_path)
    peer = UnreachedPeer(parties.session, parties.engine)
    with pytest.raises(Interrupted):
        parties.run.run(peer)
    assert not hasattr(peer, "goodbyes")


def test_a_peer_that_breaks_a_rule_is_not_left_waiting(tmp_path: Path) -> None:
    write_example(tmp_path)
    parties = build_parties(tmp_path)
    peer = ConfusedPeer(parties.session, parties.engine)
    with pytest.raises(InvalidMessage, match="epoch 1 step 1"):
        parties.run.run(peer)
    assert peer.goodbyes == [pb.LEAVE_REASON_FAILED]

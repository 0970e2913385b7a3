"""The goodbyes of the passive party when its run ends early."""

from pathlib import Path

import pytest
import torch

from splitveil.active_party.run.stages import Stage
from splitveil.common.errors import Interrupted, InvalidMessage, PeerError
from splitveil.common.run.messages import Answer, AuditQuestion, LeaveReason, Offer, Opening
from splitveil.passive_party.label_free_audit import GatheredScores
from tests.support.peers import InProcessPeer
from tests.support.runs import build_parties, run_in_process, write_example


class ListeningPeer(InProcessPeer):
    """Remembers the goodbyes."""

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        self.goodbyes = [*getattr(self, "goodbyes", []), reason]


class UnreachedPeer(ListeningPeer):
    """Is being called when a signal comes."""

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        raise Interrupted


class ConfusedPeer(ListeningPeer):
    """Answers with the gradient of another step."""

    def receive_gradient(self) -> Answer:
        reply = super().receive_gradient()
        return Answer(reply.batch._replace(step=7), reply.values)


class AuditsAtTheEnd:
    """Asks once, after the epoch with which the run stops early."""

    def scores_to_audit(self, epoch: int) -> list[GatheredScores]:
        return [GatheredScores("norm", "cut", torch.zeros(1))] * epoch

    def on_audit(self, epoch: int, scored: GatheredScores, leak_auc: float) -> None:
        """Take no note."""

    def on_audit_failed(self, epoch: int, error: PeerError) -> None:
        """Take no note."""


class InterruptedAudit(InProcessPeer):
    """Is asked to measure scores when a signal comes."""

    def audit(self, question: AuditQuestion) -> float:
        raise Interrupted


def test_a_run_that_is_stopped_in_its_last_audit_is_over_when_it_resumes(tmp_path: Path) -> None:
    write_example(tmp_path)
    epochs = "contract.epochs=5"
    active = [epochs, "early_stopping={patience_epochs: 1, min_gain: 0.5}"]
    parties = build_parties(tmp_path, active, [epochs], runs=tmp_path / "runs")
    parties.run.auditor = AuditsAtTheEnd()
    with pytest.raises(Interrupted):
        parties.run.run(InterruptedAudit(parties.session, parties.engine))
    assert parties.session.stage is Stage.FINISHED
    again = build_parties(tmp_path, active, [epochs], runs=tmp_path / "runs")
    assert again.session.reopen()
    run_in_process(again)
    assert again.session.wait_for_farewell(0)


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
    assert peer.goodbyes == [LeaveReason.FAILED]

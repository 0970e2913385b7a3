"""The rules of a run, on the session object itself, without a wire."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.errors import (
    ContractMismatch,
    Interrupted,
    InvalidMessage,
    OutOfStep,
    PeerLeft,
)
from splitveil.common.run.messages import Activation, Answer, LeaveReason, Offer, Opening
from splitveil.library.in_process import InProcessPeer
from splitveil.passive_party.run import PassiveRun
from tests.support.peers import at_first_step
from tests.support.runs import Parties, build_parties, run_in_process, write_example


def with_header(message: Activation, **changes: Any) -> Activation:
    return Activation(message.batch._replace(**changes), message.values)


@pytest.fixture(scope="module")
def finished(example: Path) -> Parties:
    parties = build_parties(example)
    run_in_process(parties)
    return parties


def test_a_run_trains_both_halves_and_evaluates_each_epoch(finished: Parties) -> None:
    parties = finished
    assert parties.session.stage is Stage.FINISHED
    assert [(e.epoch, e.split) for e in parties.active.evaluations] == [
        (0, "validation"),
        (0, "test"),
        (1, "validation"),
        (1, "test"),
    ]
    assert parties.active.evaluations[-1].figures.agreement > 0.7
    assert parties.passive.epochs == [0, 1]
    assert len(parties.active.losses) == len(parties.passive.received) > 4


def test_what_arrives_is_what_was_sent_with_the_gradient_of_the_first_layer_beside_it(
    finished: Parties,
) -> None:
    for sent, received in zip(finished.active.sent, finished.passive.received, strict=True):
        assert torch.equal(sent, received)
    assert finished.passive.layers[0]["first"].shape == (64, 8)


def test_the_same_seeds_give_the_same_weights_and_other_seeds_others(
    example: Path, finished: Parties
) -> None:
    again, other = build_parties(example), build_parties(example, [], ["model_seed=5"])
    for parties in (again, other):
        run_in_process(parties)
    weights = finished.weights()
    assert all(torch.equal(weights[name], value) for name, value in again.weights().items())
    assert not all(torch.equal(weights[name], value) for name, value in other.weights().items())


def test_fresh_nonces_give_other_batches(example: Path) -> None:
    orders = []
    for _ in range(2):
        parties = build_parties(example, ["insecure_nonce_seed=null"], [])
        run_in_process(parties)
        assert parties.active.rows is not None
        orders.append(parties.active.rows.order.batch(0, 0).tolist())
    assert orders[0] != orders[1]


def test_a_repeated_step_is_compared_by_its_bits_not_by_its_values(example: Path) -> None:
    parties, message = at_first_step(example)
    zeros = torch.zeros_like(message.values)
    parties.session.exchange(Activation(message.batch, zeros))
    with pytest.raises(OutOfStep, match="other bytes"):
        parties.session.exchange(Activation(message.batch, -zeros))


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "another"},
        {"epoch": 1},
        {"step": 1},
        {"split": "test"},
        {"rows_digest": b"0" * 16},
    ],
)
def test_a_message_for_another_step_is_refused_and_the_session_unharmed(
    example: Path, changes: dict[str, object]
) -> None:
    parties, message = at_first_step(example)
    with pytest.raises(OutOfStep):
        parties.session.exchange(with_header(message, **changes))
    assert parties.session.exchange(message).values.shape == message.values.shape


def test_rows_cannot_be_left_out_or_asked_for_as_another_split_or_early(example: Path) -> None:
    parties, message = at_first_step(example)
    with pytest.raises(OutOfStep, match="63 rows"):
        parties.session.exchange(Activation(message.batch, message.values[:-1]))
    with pytest.raises(OutOfStep):
        parties.session.evaluate(message)
    with pytest.raises(OutOfStep):
        parties.session.evaluate(with_header(message, split="test"))


def test_different_contracts_are_named_field_by_field_and_the_active_party_stays_up(
    example: Path,
) -> None:
    differing = [
        "contract.batch_size=32",
        "contract.split={train: 0.7, validation: 0.1, test: 0.2}",
    ]
    parties = build_parties(example, differing)
    with pytest.raises(ContractMismatch) as caught:
        run_in_process(parties)
    assert caught.value.fields == ("batch_size", "split.train", "split.validation")
    assert parties.session.lifecycle.error is None
    parties.run = build_parties(example, differing, differing).run
    run_in_process(parties)
    assert parties.session.stage is Stage.FINISHED


def test_a_nonce_that_was_not_committed_to_is_refused(example: Path) -> None:
    """Else the passive party could choose its nonce after it saw the other: the batches, too."""
    parties = build_parties(example)
    run: PassiveRun = parties.run
    session = parties.session
    session.handshake("passive", run.contract.canonical_json(), b"another commitment")
    with pytest.raises(OutOfStep, match="nonce"):
        session.aligned(torch.arange(100).numpy(), b"n" * 32)


def test_a_second_peer_cannot_join_a_run_that_has_begun(example: Path) -> None:
    parties, message = at_first_step(example)
    contract = parties.run.contract.canonical_json()
    parties.session.exchange(message)
    with pytest.raises(OutOfStep, match="begun"):
        parties.session.handshake("passive", contract, b"c" * 32)


def test_a_peer_lost_before_the_first_answer_may_start_over_with_another_run(example: Path) -> None:
    parties, message = at_first_step(example)
    session, contract = parties.session, parties.run.contract.canonical_json()
    before = session.run_id
    opening = session.handshake("passive", contract, b"c" * 32)
    assert opening.run_id != before
    assert session.stage is Stage.HANDSHAKEN
    with pytest.raises(OutOfStep):
        session.exchange(message)


def test_a_run_does_not_depend_on_the_classes_of_the_rows_that_a_peer_brings(
    tmp_path: Path,
) -> None:
    write_example(tmp_path)
    lines = (tmp_path / "active.csv").read_text().splitlines()
    positives = [line for line in lines[1:] if line.split(",")[1] == "1"][:1]
    negatives = [line for line in lines[1:] if line.split(",")[1] == "0"]
    (tmp_path / "active.csv").write_text("\n".join([lines[0], *positives, *negatives]) + "\n")
    parties = build_parties(tmp_path)
    run_in_process(parties)
    assert parties.session.stage is Stage.FINISHED
    assert {one.split for one in parties.active.evaluations if math.isnan(one.figures.agreement)}


def test_a_peer_that_leaves_early_ends_the_run_with_the_reason(example: Path) -> None:
    parties, _ = at_first_step(example)
    with pytest.raises(OutOfStep):
        parties.session.leave("another run", LeaveReason.INTERRUPTED)
    parties.session.leave(parties.session.run_id, LeaveReason.INTERRUPTED)
    assert isinstance(parties.session.lifecycle.error, PeerLeft)


def test_after_an_interruption_the_peer_learns_of_it(example: Path) -> None:
    parties, message = at_first_step(example)
    parties.session.end(Interrupted())
    with pytest.raises(Interrupted):
        parties.session.exchange(message)


# ---- the goodbyes of the passive party when its run ends early ----


class ListeningPeer(InProcessPeer):
    def leave(self, run_id: str, reason: LeaveReason) -> None:
        self.goodbyes = [*getattr(self, "goodbyes", []), reason]


class UnreachedPeer(ListeningPeer):
    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        raise Interrupted


class ConfusedPeer(ListeningPeer):
    def receive_gradient(self) -> Answer:
        reply = super().receive_gradient()
        return Answer(reply.batch._replace(step=7), reply.values)


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

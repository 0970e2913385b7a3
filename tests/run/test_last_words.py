"""A party that is lost at the edges of a run: before the first step, and around the last answer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitveil.active_party.run.stages import Stage
from splitveil.common.alignment import AlignChannel
from splitveil.common.errors import (
    InvalidMessage,
    NotOpen,
    OutOfStep,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    StorageError,
)
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.messages import Activation, Answer, BatchId, Course, LeaveReason
from splitveil.common.wire.connection import MAX_DAMAGED
from tests.support.equality import assert_same_weights
from tests.support.peers import InProcessPeer
from tests.support.runs import Parties, build_parties, run_in_process, run_over_grpc

EVERY_2 = "contract.checkpoints.every_steps=2"


def build(example: Path, runs: Path | None = None) -> Parties:
    return build_parties(example, [EVERY_2], [EVERY_2], runs=runs)


class Silent(InProcessPeer):
    """Says no goodbye: it is lost, or the active party is by then."""

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        raise PeerUnreachable


class LostAfterTheLast(Silent):
    """Ends the active process as soon as its last answer has left."""

    def evaluate(self, activation: Activation) -> Course:
        course = self._session.evaluate(activation)
        if self._session.stage is not Stage.FINISHED:
            self._session.finish_step()
        return course


# ---- around the last answer ----


def test_an_active_party_that_was_lost_after_its_last_answer_has_all_of_the_run(
    example: Path, tmp_path: Path
) -> None:
    """The passive party has what it needs by then, and may never come back."""
    parties = build(example, tmp_path)
    run_in_process(parties, LostAfterTheLast)
    again = build(example, tmp_path)
    assert again.session.reopen()
    assert again.session.stage is Stage.FINISHED
    assert not again.session.wait_for_farewell(0)
    again.run = parties.run
    assert_same_weights(again.weights(), parties.weights())
    again.session.leave(again.session.run_id, LeaveReason.FINISHED)
    assert again.session.wait_for_farewell(0)
    assert again.session.lifecycle.error is None


def test_an_active_party_that_was_lost_after_the_goodbye_does_not_wait(
    example: Path, tmp_path: Path
) -> None:
    run_in_process(build(example, tmp_path))
    again = build(example, tmp_path)
    assert again.session.reopen()
    assert again.session.wait_for_farewell(0)


def test_a_finished_run_that_was_reopened_still_wants_a_handshake(
    example: Path, tmp_path: Path
) -> None:
    """So that a passive party that is in its last steps opens it again, and ends it."""
    run_in_process(build(example, tmp_path), Silent)
    again = build(example, tmp_path)
    again.session.reopen()
    header = BatchId(again.session.run_id, 1, 0, "test", b"d" * 16)
    with pytest.raises(NotOpen):
        again.session.evaluate(Activation(header, torch.zeros(50, 4)))


# ---- before the first step ----


class ReplacedBeforeAligning(InProcessPeer):
    """Has another active process after the first handshake."""

    anew: Parties

    def open_alignment(self) -> AlignChannel:
        if self._session is not self.anew.session:
            self._session = self.anew.session
            try:
                self._session.require_aligning()
            except NotOpen as error:
                raise PeerRestarted from error  # as this error's status means on the other side
        return super().open_alignment()


def test_with_the_active_party_killed_between_handshake_and_alignment_both_start_over(
    example: Path, tmp_path: Path
) -> None:
    parties, whole = build(example, tmp_path), build(example)
    anew = build(example, tmp_path / "anew")
    ReplacedBeforeAligning.anew = anew
    run_in_process(parties, ReplacedBeforeAligning)
    run_in_process(whole)
    anew.run = parties.run
    assert_same_weights(anew.weights(), whole.weights())


def test_a_run_that_the_active_party_has_lost_is_said_so(example: Path, tmp_path: Path) -> None:
    parties = build(example, tmp_path)
    run_in_process(parties, Silent)
    RunStore(tmp_path / "active", keep=3).forget()
    again = build(example, tmp_path)
    store = RunStore(tmp_path / "passive", keep=3)
    store.load(store.checkpoints()[0])  # as if it had been lost there
    assert not again.session.reopen()
    with pytest.raises(ProtocolError, match="--fresh"):
        run_in_process(again)


# ---- messages that come damaged ----


def damaged_gradients(
    parties: Parties, times: int, error: OutOfStep | None = None
) -> Callable[[], int]:
    """Let the active party err some times, and return how often it was asked."""
    exchange, asked = parties.session.exchange, 0

    def answer(activation: Activation, *_: object) -> Answer:
        nonlocal asked
        asked += 1
        if error is not None:
            raise error
        reply = exchange(activation)
        if asked > times:
            return reply
        return Answer(reply.batch._replace(step=reply.batch.step + 1), reply.values)

    parties.session.exchange = answer  # type: ignore[method-assign, assignment]
    return lambda: asked


def test_a_damaged_answer_is_asked_for_again(example: Path, port: int) -> None:
    parties, whole = build(example), build(example)
    damaged_gradients(parties, MAX_DAMAGED)
    run_over_grpc(parties, port)
    run_in_process(whole)
    assert_same_weights(parties.weights(), whole.weights())


@pytest.mark.parametrize("refuses", [False, True])
def test_what_stays_wrong_is_asked_a_few_times_more_and_ends_the_run(
    example: Path, port: int, *, refuses: bool
) -> None:
    parties = build(example)
    asked = damaged_gradients(parties, 100, OutOfStep("not now") if refuses else None)
    with pytest.raises(ProtocolError if refuses else InvalidMessage):
        run_over_grpc(parties, port)
    assert asked() == MAX_DAMAGED + 1


def test_half_a_checkpoint_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    """There are secrets in it."""
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    half = tmp_path / "checkpoint" / ".at-0000000002.state.4711.tmp"
    half.write_bytes(b"half")
    store.save(2, {"place": 2})
    assert not half.exists()
    assert store.checkpoints() == [2]


def test_a_finished_run_that_is_forgotten_fails_in_nothing_more(tmp_path: Path) -> None:
    """A party that ended with an error would be restarted, and would train again."""
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    store.save(2, {"place": 2})
    (tmp_path / "checkpoint" / "answered.log").mkdir()
    store.forget_finished()
    assert store.run() is None
    assert store.checkpoints() == []


def test_a_finished_run_that_cannot_be_forgotten_can_be_gone_on_with(tmp_path: Path) -> None:
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    store.save(2, {"place": 2})
    run = tmp_path / "checkpoint" / "run.state"
    run.unlink()
    run.mkdir()
    with pytest.raises(StorageError, match=r"run\.state: cannot be deleted"):
        store.forget_finished()
    assert store.checkpoints() == [2]

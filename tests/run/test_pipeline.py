"""Activations sent ahead: the same bits at any speed, after any loss, and under every defense."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.errors import Interrupted, OutOfStep
from splitveil.common.run import course
from splitveil.common.run.messages import Activation, Answer, Course
from splitveil.library.in_process import InProcessPeer
from tests.support.equality import assert_same
from tests.support.peers import FaultyPeer, Lost, Silent, dying
from tests.support.runs import Parties, build_parties, pipelined, run_in_process

DEFENSES = [
    "{name: marvell, noise: persistent, insecure_noise_seed: 7}",
    "{name: noisy_label, insecure_noise_seed: 7}",
    "{name: gafm, composed_with: {name: marvell, statistics: running}, insecure_noise_seed: 7}",
]


def parties_at(
    example: Path, depth: int, active: Sequence[str] = (), runs: Path | None = None
) -> Parties:
    both = pipelined(depth)
    return build_parties(example, [*both, *active], both, runs=runs)


PeerT = TypeVar("PeerT", bound=InProcessPeer)


def run_with(parties: Parties, kind: type[PeerT]) -> PeerT:
    peers: list[PeerT] = []

    def connect(session: ActiveSession, engine: EcdhEngine) -> PeerT:
        peers.append(kind(session, engine))
        return peers[-1]

    run_in_process(parties, connect)
    return peers[-1]


def resume(parties: Parties, peer: Callable[..., InProcessPeer] = InProcessPeer) -> None:
    parties.session.reopen()
    run_in_process(parties, peer)


# ---- losses ----


class Stops(InProcessPeer):
    at = 8
    _calls = 0

    def receive_gradient(self) -> Answer:
        self._calls += 1
        if self._calls == self.at:
            raise Interrupted
        return super().receive_gradient()


MARVELL = "{name: marvell, insecure_noise_seed: 7}"


@pytest.mark.parametrize(
    ("defense", "depth", "ends"),
    [
        *((defense, 2, (9, 12, 14)) for defense in DEFENSES),
        # Around a checkpoint, the last batch of an epoch and its held-out rows.
        (MARVELL, 4, (1, 4, 5, 6, 14, 16, 20, None)),
    ],
)
def test_killed_or_stopped_parties_and_lost_answers_change_no_bit(
    example: Path, tmp_path: Path, defense: str, depth: int, ends: Sequence[int | None]
) -> None:
    active = [f"defense={defense}"]
    whole = parties_at(example, depth, active)
    run_in_process(whole)
    for at in ends:
        runs, number = tmp_path / str(at), at or 0
        ended = parties_at(example, depth, active, runs=runs)
        with pytest.raises((Lost, Interrupted)):
            run_in_process(ended, Stops if at is None else dying(number, after=number % 2 == 0))
        anew = parties_at(example, depth, active, runs=runs)
        if number % 3 or at is None:
            assert anew.session.reopen()
        else:  # the passive party by itself
            anew.session, anew.active = ended.session, ended.active
        run_in_process(anew, losing(number))
        assert_same(anew, whole)


def losing(number: int) -> Callable[..., InProcessPeer]:
    return lambda s, e: FaultyPeer(s, e, lambda count: (count + number) % 5 == 0)


class Keeps(InProcessPeer):
    def __init__(self, session: ActiveSession, engine: EcdhEngine) -> None:
        super().__init__(session, engine)
        self.asked: list[tuple[Activation, Answer]] = []
        self.refused: list[str] = []

    def receive_gradient(self) -> Answer:
        activation = self._sent[0]
        answer = super().receive_gradient()
        self.asked.append((activation, answer))
        if len(self.asked) == 9:
            self._ask_again()
        return answer

    def _ask_again(self) -> None:
        for activation, answer in self.asked[-4:]:
            again = self.session.exchange(activation)
            assert torch.equal(again.values, answer.values)
            self._refused(replace(activation, values=activation.values + 1))
        self._refused(self.asked[-5][0])

    def _refused(self, activation: Activation) -> None:
        with pytest.raises(OutOfStep) as caught:
            self.session.exchange(activation)
        self.refused.append(str(caught.value))


def test_the_last_answers_are_repeated_and_neither_older_nor_changed_questions_answered(
    example: Path,
) -> None:
    parties, whole = parties_at(example, 4), parties_at(example, 4)
    *changed, old = run_with(parties, Keeps).refused
    run_in_process(whole)
    assert changed == ["a repeated step came with other bytes"] * 4
    assert "expected epoch 1 step 10" in old
    assert_same(parties, whole)


class SendsAhead(InProcessPeer):
    def __init__(self, session: ActiveSession, engine: EcdhEngine) -> None:
        super().__init__(session, engine)
        self.refused = 0

    def receive_gradient(self) -> Answer:
        for ahead in list(self._sent)[1:]:
            with pytest.raises(OutOfStep, match="expected epoch"):
                self.session.exchange(ahead)
            self.refused += 1
        return super().receive_gradient()

    def evaluate(self, activation: Activation) -> Course:
        batch = activation.batch
        early = batch._replace(epoch=batch.epoch + 1, split="train", step=0)
        with pytest.raises(OutOfStep, match=f"expected a batch of {batch.split} now"):
            self.session.exchange(replace(activation, batch=early))
        return super().evaluate(activation)


def test_a_question_out_of_turn_is_refused_and_changes_no_bit(example: Path) -> None:
    parties, whole = parties_at(example, 4), parties_at(example, 4)
    assert run_with(parties, SendsAhead).refused > 20
    run_in_process(whole)
    assert_same(parties, whole)


# ---- held-out rows, sent ahead of their replies ----


BOTH = ["contract.evaluation_batch_size=3", "contract.checkpoint_steps=2"]


def parties_of(example: Path, *more: str, runs: Path | None = None) -> Parties:
    return build_parties(example, [*BOTH, f"defense={MARVELL}", *more], [*BOTH, *more], runs=runs)


def undisturbed(example: Path, monkeypatch: pytest.MonkeyPatch) -> Parties:
    """Return parties after a run in which each reply is awaited before the next question."""
    with monkeypatch.context() as patched:
        patched.setattr(course, "MAX_EVALUATIONS_AHEAD", 1)
        strict = parties_of(example)
        run_in_process(strict)
    return strict


class Eager(InProcessPeer):
    def __init__(self, session: ActiveSession, engine: EcdhEngine) -> None:
        super().__init__(session, engine)
        self.asked: list[Activation] = []
        self.most = 0
        self._replies: deque[Course] = deque()

    def send_held_out(self, activation: Activation) -> None:
        self.asked.append(activation)
        self._replies.append(self.evaluate(activation))
        self.most = max(self.most, len(self._replies))

    def receive_course(self) -> Course:
        return self._replies.popleft()


class DiesAhead(Silent, Eager):
    """Ends the passive process when it has sent some held-out rows, all of which are answered."""

    at = 0

    def send_held_out(self, activation: Activation) -> None:
        super().send_held_out(activation)
        if len(self.asked) == self.at:
            raise Lost


class StopsAhead(Eager):
    at = 0
    _calls = 0

    def receive_course(self) -> Course:
        self._calls += 1
        if self._calls == self.at:
            raise Interrupted
        return super().receive_course()


@pytest.mark.parametrize(
    ("at", "kind", "both_anew"),
    [
        *((at, DiesAhead, True) for at in (1, 16, 17, 40)),
        (17, DiesAhead, False),
        (17, StopsAhead, True),
    ],
)
def test_a_run_that_ends_in_the_middle_of_an_evaluation_resumes_with_the_same_bits(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    kind: type[Eager],
    both_anew: bool,
) -> None:
    strict = undisturbed(example, monkeypatch)
    ended = parties_of(example, runs=tmp_path)
    with pytest.raises((Lost, Interrupted)):
        run_in_process(ended, type("Ends", (kind,), {"at": at}))
    anew = parties_of(example, runs=tmp_path)
    if both_anew:  # as after a goodbye, which ends the active party's process as well
        assert anew.session.reopen()
    else:
        anew.session, anew.active = ended.session, ended.active
    run_in_process(anew, Eager)
    assert_same(anew, strict)


class AsksAgain(Eager):
    """Asks about held-out rows again, with the same bytes and with others, and ahead of time."""

    at = 20
    refused: Sequence[str] = ()

    def send_held_out(self, activation: Activation) -> None:
        early = replace(activation, batch=activation.batch._replace(step=activation.batch.step + 1))
        refused = [self._refusal(early)]
        super().send_held_out(activation)
        if len(self.asked) == self.at:
            kept, older = self.asked[-16:], self.asked[-17]
            assert [self.session.evaluate(asked) for asked in kept] == [Course.CONTINUE] * 16
            refused += [self._refusal(replace(asked, values=asked.values + 1)) for asked in kept]
            self.refused = [*refused, self._refusal(older)]

    def _refusal(self, activation: Activation) -> str:
        with pytest.raises(OutOfStep) as caught:
            self.session.evaluate(activation)
        return str(caught.value)

    def receive_gradient(self) -> Answer:
        answer = super().receive_gradient()
        if self.asked and self.asked[-1].batch.epoch < answer.batch.epoch:
            self._refusal(self.asked[-1])  # no reply is kept once training goes on
        return answer


def test_the_last_replies_are_repeated_and_neither_older_nor_changed_rows_scored(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict, parties = undisturbed(example, monkeypatch), parties_of(example)
    peer = run_with(parties, AsksAgain)
    assert peer.most == 16
    early, *changed, older = peer.refused
    assert "expected epoch" in early
    assert changed == ["a repeated step came with other bytes"] * 16
    assert "expected" in older
    assert_same(parties, strict)

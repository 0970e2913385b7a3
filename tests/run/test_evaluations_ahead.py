"""Held-out rows sent ahead of their replies: the same bits, after any loss, and no more kept."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment import AlignmentEngine
from splitveil.common.errors import Interrupted, OutOfStep
from splitveil.common.run import course
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import evaluations_ahead
from splitveil.common.run.messages import Activation, Answer, Course, LeaveReason
from tests.support.equality import assert_same
from tests.support.peers import InProcessPeer, Lost
from tests.support.runs import CONTRACT, Parties, build_parties, run_in_process

BOTH = ["contract.evaluation_batch_size=3", "contract.checkpoints.every_steps=2"]
MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"


def parties_of(example: Path, *more: str, runs: Path | None = None) -> Parties:
    return build_parties(example, [*BOTH, MARVELL, *more], [*BOTH, *more], runs=runs)


def undisturbed(example: Path, monkeypatch: pytest.MonkeyPatch) -> Parties:
    """Return parties after a run in which each reply is awaited before the next question."""
    with monkeypatch.context() as patched:
        patched.setattr(course, "MAX_EVALUATIONS_AHEAD", 1)
        strict = parties_of(example)
        run_in_process(strict)
    return strict


class Eager(InProcessPeer):
    """Lets the active party answer held-out rows as soon as they are sent."""

    def __init__(self, session: ActiveSession, engine: AlignmentEngine) -> None:
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


def started(kind: type[Eager], peers: list[Eager]) -> type[Eager]:
    """Return a peer that can be found afterwards."""

    class Found(kind):  # type: ignore[misc, valid-type]
        def __init__(self, session: ActiveSession, engine: AlignmentEngine) -> None:
            super().__init__(session, engine)
            peers.append(self)

    return Found


@pytest.mark.parametrize(
    ("rows", "shape", "ahead"),
    [(1, [4], 16), (4096, [64], 4), (4096, [128], 2), (1024, [128], 8), (1_048_576, [128], 2)],
)
def test_the_contract_says_how_many_may_be_under_way(
    rows: int, shape: list[int], ahead: int
) -> None:
    values = {**CONTRACT, "evaluation_batch_size": rows, "cut_shape": shape}
    assert evaluations_ahead(Contract.model_validate(values)) == ahead


class DiesAhead(Eager):
    """Ends the passive process when it has sent some held-out rows, all of which are answered."""

    at = 0

    def send_held_out(self, activation: Activation) -> None:
        super().send_held_out(activation)
        if len(self.asked) == self.at:
            raise Lost

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """Die without a goodbye."""


class StopsAhead(Eager):
    """Ends the passive party by a signal while replies are under way."""

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
    strict, peers = undisturbed(example, monkeypatch), list[Eager]()
    parties = parties_of(example)
    run_in_process(parties, started(AsksAgain, peers))
    assert isinstance(peers[0], AsksAgain)
    assert peers[0].most == 16
    early, *changed, older = peers[0].refused
    assert "expected epoch" in early
    assert changed == ["a repeated step came with other bytes"] * 16
    assert "expected" in older
    assert_same(parties, strict)

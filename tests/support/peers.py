"""Stand-ins for the other party."""

from collections.abc import Callable
from pathlib import Path

import pytest

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.errors import Interrupted, PeerLeft
from splitveil.common.run.messages import Activation, Answer, Course, LeaveReason, Offer
from splitveil.library.in_process import InProcessPeer
from tests.support.runs import Parties, build_parties, run_in_process


class FaultyPeer(InProcessPeer):
    """Loses messages: the session sees some steps twice, as after a broken connection."""

    def __init__(
        self, session: ActiveSession, engine: EcdhEngine, loses: Callable[[int], bool]
    ) -> None:
        super().__init__(session, engine)
        self._loses = loses
        self._count = 0

    def receive_gradient(self) -> Answer:
        self._count += 1
        if self._loses(self._count):
            for sent in self._sent:
                self._exchange(sent)
        return super().receive_gradient()


class StopsAtFirstStep(InProcessPeer):
    """Keeps the first training message instead of sending it."""

    def receive_gradient(self) -> Answer:
        raise Interrupted

    @property
    def kept(self) -> Activation:
        return self._sent[0]

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """Leave without a word: the session stays open for the test."""


class Lost(BaseException):
    """Stands for kill -9: the program never catches it."""


class Silent(InProcessPeer):
    """Says goodbye only after the last answer, as a process that was killed would."""

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        if reason == LeaveReason.FINISHED:
            super().leave(run_id, reason)


class GoesAway(Silent):
    """Is gone after some of its answers, which it has received."""

    goes_at: int | None = None
    answers = 0

    def receive_gradient(self) -> Answer:
        answer = super().receive_gradient()
        self.answers += 1
        if self.answers == self.goes_at:
            raise Lost
        return answer


class DiesAt(Silent):
    """Ends the passive process at one of its messages, before or after the active party sees it."""

    at = 0
    after = False
    _calls = 0

    def _maybe_die(self, *, after: bool) -> None:
        if after is self.after and self._calls == self.at:
            raise Lost

    def receive_gradient(self) -> Answer:
        self._calls += 1
        self._maybe_die(after=False)
        reply = super().receive_gradient()
        self._maybe_die(after=True)
        return reply

    def evaluate(self, activation: Activation) -> Course:
        self._calls += 1
        self._maybe_die(after=False)
        course = super().evaluate(activation)
        self._maybe_die(after=True)
        return course


def dying(at: int, *, after: bool) -> Callable[..., InProcessPeer]:
    """Return a peer whose process ends at the given message."""
    return type("Dies", (DiesAt,), {"at": at, "after": after})


def at_first_step(folder: Path, *overrides: str) -> tuple[Parties, Activation]:
    """Bring two parties to the first training step; return its message, not yet sent."""
    parties = build_parties(folder, overrides, [o for o in overrides if o.startswith("contract.")])
    peer = StopsAtFirstStep(parties.session, parties.engine)
    with pytest.raises(Interrupted):
        parties.run.run(peer)
    return parties, peer.kept


# ---- peers that take answers, go back to an earlier checkpoint, and leave ----

MARVELL = "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 1}"
CHECKPOINTS = ["contract.checkpoint_steps=2"]
ONE_EPOCH = 7
"""Messages after which every training row was answered about once: four steps of them, and more."""


def parties_in(example: Path, runs: Path, *active: str) -> Parties:
    return build_parties(example, [*CHECKPOINTS, *active], CHECKPOINTS, runs=runs)


def answered(example: Path, runs: Path, *active: str, messages: int = ONE_EPOCH) -> Parties:
    parties = parties_in(example, runs, *active)
    with pytest.raises(Lost):
        run_in_process(parties, dying(messages, after=True))
    return parties


def go_back(session: ActiveSession, place: int = 0) -> None:
    """Say what a peer says that was restarted, and has this one checkpoint."""
    party = session.parties.named(None)
    offer = Offer(session.run_id, frozenset({place}))
    contract = session.contract.canonical_json()
    opening = session.handshake(party.name, contract, party.commitment, offer)
    assert opening.resumes_at == place


def leave(session: ActiveSession) -> None:
    session.leave(session.run_id, LeaveReason.INTERRUPTED)
    assert isinstance(session.lifecycle.error, PeerLeft)

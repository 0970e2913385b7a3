"""Stand-ins for the other party."""

import threading
from collections.abc import Callable

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment import AlignChannel, AlignmentEngine, align, channel_pair
from splitveil.common.errors import SplitveilError
from splitveil.common.run.messages import (
    Activation,
    Answer,
    AuditQuestion,
    Course,
    LeaveReason,
    Offer,
    Opening,
)
from splitveil.passive_party.grpc_peer import GrpcPeer


class InProcessPeer:
    """The active party in the same process: the session itself, without a wire."""

    def __init__(self, session: ActiveSession, engine: AlignmentEngine) -> None:
        self._session = session
        self._engine = engine
        self._aligning: threading.Thread | None = None
        self._failure: SplitveilError | None = None
        self._sent: Activation | None = None

    def handshake(
        self, party: str, canonical_contract: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        return self._session.handshake(party, canonical_contract, commitment, offer)

    def open_alignment(self) -> AlignChannel:
        own, other = channel_pair()
        self._aligning = threading.Thread(target=self._align, args=(other,))
        self._aligning.start()
        return own

    def _align(self, channel: AlignChannel) -> None:
        session = self._session
        try:
            session.require_aligning()
            alignment = align(
                self._engine,
                session.ids,
                channel,
                nonce=session.nonce,
                run_id=session.run_id,
                splits=session.file_splits,
            )
            session.aligned(alignment.rows, alignment.peer_nonce)
        except SplitveilError as error:
            self._failure = error

    def close_alignment(self) -> None:
        if self._aligning is not None:
            self._aligning.join()
        if self._failure is not None:
            raise self._failure

    def send_activation(self, activation: Activation) -> None:
        self._sent = activation

    def receive_gradient(self) -> Answer:
        assert self._sent is not None
        reply = self._session.exchange(self._sent)
        self._session.finish_step()
        return reply

    def evaluate(self, activation: Activation) -> Course:
        course = self._session.evaluate(activation)
        self._session.finish_step()
        return course

    def audit(self, question: AuditQuestion) -> float:
        return self._session.audit(question)

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        self._session.leave(run_id, reason)


class FaultyPeer(InProcessPeer):
    """Loses messages: the session sees some steps twice, as after a broken connection."""

    def __init__(
        self, session: ActiveSession, engine: AlignmentEngine, loses: Callable[[int], bool]
    ) -> None:
        super().__init__(session, engine)
        self._loses = loses
        self._count = 0

    def receive_gradient(self) -> Answer:
        self._count += 1
        first = super().receive_gradient()
        return super().receive_gradient() if self._loses(self._count) else first


class Lost(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


class DiesAt(InProcessPeer):
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

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """A killed process says nothing; one that has finished does."""
        if reason == LeaveReason.FINISHED:
            super().leave(run_id, reason)


def dying(at: int, *, after: bool) -> Callable[..., InProcessPeer]:
    """Return a peer whose process ends at this one of its messages."""
    return type("Dies", (DiesAt,), {"at": at, "after": after})


class AtSteps(GrpcPeer):
    """Does something before it asks for the gradients of some steps."""

    actions: dict[int, Callable[[], None]]
    count = 0

    def receive_gradient(self) -> Answer:
        self.count += 1
        self.actions.get(self.count, lambda: None)()
        return super().receive_gradient()

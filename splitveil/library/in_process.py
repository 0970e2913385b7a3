"""All parties of a run in one process: the active party's session is asked without gRPC.

With the same seeds, a run ends with the bits of two processes. Only a model with dropout differs:
its draws come from one generator instead of one for each party.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from splitveil.active_party.grpc_server.service import agreeing
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment.channel import AlignChannel, channel_pair
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.exchange import align
from splitveil.common.errors import (
    AlignmentError,
    NotOpen,
    OthersAwaited,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
)
from splitveil.common.run import messages
from splitveil.passive_party.opening import Peer
from splitveil.passive_party.run import PassiveRun


class InProcessPeer:
    """Asks the active party's session directly, and treats its errors as the service does.

    ``party`` is the name of the passive party that asks, if there are several; the others have
    ``patience_s`` to open the run.
    """

    def __init__(
        self,
        session: ActiveSession,
        engine: EcdhEngine,
        party: str | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self._session = session
        self._engine = engine
        self._party = party
        self._patience_s = patience_s
        self._aligning: threading.Thread | None = None
        self._failure: SplitveilError | None = None
        self._sent: deque[messages.Activation] = deque()
        self._held_out: deque[messages.Activation] = deque()

    @property
    def session(self) -> ActiveSession:
        """The session that the next call asks."""
        return self._session

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: messages.Offer | None = None
    ) -> messages.Opening:
        """Open the run, or resume it; wait until the other passive parties do so, too."""
        self._sent.clear()
        self._held_out.clear()
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return self.session.handshake(party, contract_json, commitment, offer)
            except OthersAwaited:
                if time.monotonic() > until:
                    raise

    def open_alignment(self) -> AlignChannel:
        own, other = channel_pair()
        self._failure = None
        self._aligning = threading.Thread(target=self._align, args=(other,))
        self._aligning.start()
        return own

    def close_alignment(self) -> None:
        """Wait for the active party's engine; raises the error that ended its alignment."""
        if self._aligning is not None:
            self._aligning.join()
        if self._failure is not None:
            with _as_the_status_says():
                raise self._failure

    def send_activation(self, activation: messages.Activation) -> None:
        self._sent.append(activation)

    def receive_gradient(self) -> messages.Answer:
        if not self._sent:
            raise RuntimeError("no activation was sent")
        reply = self._exchange(self._sent[0])
        self._sent.popleft()
        return reply

    def _exchange(self, activation: messages.Activation) -> messages.Answer:
        session = self.session
        with _as_the_status_says():
            reply = session.exchange(activation, self._party, self._is_connected(session))
        session.finish_step()
        return reply

    def send_held_out(self, activation: messages.Activation) -> None:
        self._held_out.append(activation)

    def receive_course(self) -> messages.Course:
        course = self.evaluate(self._held_out[0])
        self._held_out.popleft()
        return course

    def evaluate(self, activation: messages.Activation) -> messages.Course:
        session = self.session
        with _as_the_status_says():
            course = session.evaluate(activation, self._party, self._is_connected(session))
        session.finish_step()
        return course

    def leave(self, run_id: str, reason: messages.LeaveReason) -> None:
        """Say goodbye, and wait until the other passive parties do."""
        while True:
            session = self.session
            connected = self._is_connected(session)
            with contextlib.suppress(OthersAwaited), _as_the_status_says():
                session.leave(run_id, reason, self._party, connected)
                return

    def _align(self, channel: AlignChannel) -> None:
        session, party = self.session, self._party
        has_several = len(session.contract.passive_parties) > 1
        try:
            session.require_aligning(party=party)
            alignment = align(
                self._engine,
                session.ids,
                channel,
                nonce=session.lifecycle.run.nonce,
                run_id=session.run_id,
                agree=agreeing(session, party) if has_several and party is not None else None,
                splits=session.file_splits,
            )
            if not has_several:
                session.aligned(alignment.rows, alignment.peer_nonce)
        except SplitveilError as error:
            self._failure = error
            is_of_peer = isinstance(error, ProtocolError | PeerUnreachable)
            if isinstance(error, AlignmentError) or not is_of_peer:
                session.end(error)

    def _is_connected(self, session: ActiveSession) -> Callable[[], bool]:
        return lambda: session is self.session


@contextlib.contextmanager
def _as_the_status_says() -> Iterator[None]:
    """Convert an error of the session to the error that its status causes at the passive party."""
    try:
        yield
    except NotOpen as error:
        raise PeerRestarted from error


def meet(
    session: ActiveSession, runs: Mapping[str, PassiveRun], connect: Callable[[str], Peer]
) -> None:
    """Let all parties meet, and return when all of them have finished; resumes what has begun.

    The first passive party runs in the calling thread, others in one thread each; of their errors
    the first is raised.
    """
    if session.stage is Stage.WAITING:
        session.reopen()
    errors: list[BaseException] = []
    (first, *others) = runs
    threads = [start(name, runs[name], connect, errors.append) for name in others]
    try:
        runs[first].run(connect(first))
    except BaseException as error:  # the others' threads end first
        errors.append(error)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def start(
    name: str,
    run: PassiveRun,
    connect: Callable[[str], Peer],
    on_error: Callable[[BaseException], None],
) -> threading.Thread:
    """Let one passive party run in a thread of its own, where ``on_error`` gets what ends it."""

    def run_to_the_end() -> None:
        try:
            run.run(connect(name))
        except BaseException as error:  # the thread's owner decides how to handle it
            on_error(error)

    thread = threading.Thread(target=run_to_the_end, daemon=True, name=name)
    thread.start()
    return thread

"""Runs all parties of a run in this process, and writes the files of separate processes.

    runs/<run name>/<party>/settings.yaml, metrics.jsonl, summary.json, checkpoint/
    runs/<run name>/<passive party>/exposure.json

The active party's session is asked without gRPC. It leaves out certificates, checkpoints on the
way, transcripts and private set intersection. None of them changes a bit of the results, except for
models with dropout, whose draws come from one generator here.
"""

import contextlib
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from splitveil.active_party.commands.run import train
from splitveil.active_party.grpc_server.server import Served
from splitveil.active_party.grpc_server.service import agreeing
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder as TopBuilder
from splitveil.common.alignment.channel import AlignChannel, channel_pair
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.exchange import align
from splitveil.common.alignment.ristretto import DIGEST_BYTES, POINT_BYTES
from splitveil.common.errors import (
    AlignmentError,
    EndedForGood,
    NotOpen,
    OthersAwaited,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
)
from splitveil.common.models.device import torch_device
from splitveil.common.party import command_line
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.run_record import write_summary
from splitveil.common.run import messages
from splitveil.common.run.contract import ACTIVE, AlignmentSettings
from splitveil.common.text.wording import VERSION
from splitveil.library.loading import PartiesSettings
from splitveil.passive_party.assembly import BottomBuilder, evaluation_labels
from splitveil.passive_party.commands.run import taking_part, try_to_measure
from splitveil.passive_party.opening import Aligner, Participant, Peer
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings


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
        self._sent.append(_of_tensor(activation))

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
        self._held_out.append(_of_tensor(activation))

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


def _of_tensor(activation: messages.Activation) -> messages.Activation:
    """Return an activation as the wire hands it over, which takes arrays, too."""
    values = torch.as_tensor(activation.values)
    # Copied: of no values, an array has other strides than a tensor.
    return replace(activation, values=torch.empty(values.shape, dtype=values.dtype).copy_(values))


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


def run_recorded(
    settings: PartiesSettings, run_folder: Path, on_epoch: Callable[[], object] | None = None
) -> None:
    """Run all parties; leaves their settings, metrics, summaries and models.

    ``run_folder`` is the one that ``runs_dir`` and the contract's ``run_name`` name, where the
    active party keeps its noise key. EndedForGood after a budget: the figures are there.
    What ``on_epoch`` raises ends the run, as if the first passive party had failed.
    """
    own, folder = settings.active, _folder_with_settings(settings.active, run_folder / ACTIVE)
    failures: list[BaseException] = []

    def after_epoch() -> None:
        try:
            if on_epoch is not None:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    on_epoch()  # dropout may draw from the same generator
        except BaseException as error:
            failures.append(error)
            raise

    with ExitStack() as resources:
        recorder = resources.enter_context(ActiveRecorder(own, folder))
        data = PartyData.of(own)
        builder = TopBuilder(own, data, torch_device(own.device))
        earlier = own.earlier_answers()
        runs = {
            name: resources.enter_context(
                _taking_part(one, run_folder, None if at else after_epoch)
            )
            for at, (name, one) in enumerate(settings.passive.items())
        }

        def serve(session: ActiveSession) -> Served:
            connect = partial(InProcessPeer, session, clear_engine(own.contract.alignment))
            try:
                meet(session, runs, connect)
            except EndedForGood as error:
                return {}, error, lambda: None  # it ends with a summary, like any other run
            except BaseException:
                if failures:  # not the error that the parties turned it into
                    raise failures[0] from None
                raise
            return {}, None, lambda: None

        _, stopped, _ = train(own, data, folder, builder, recorder, serve, earlier=earlier)
    write_summary(folder, replace(recorder.summary({}), version=VERSION))
    if stopped is not None:
        raise stopped


@contextlib.contextmanager
def _taking_part(
    settings: PassiveSettings, run_folder: Path, after_epoch: Callable[[], None] | None
) -> Iterator[PassiveRun]:
    """Yield a passive party's run; its model, exposure and summary are written in the end."""
    folder = _folder_with_settings(settings, run_folder / settings.folder_name())
    data, contract = PartyData.of(settings), settings.contract
    builder = BottomBuilder(settings, data, torch_device(settings.device))
    me = Participant(contract, settings.party, data.ids, data.table.splits)
    aligner = Aligner(me, clear_engine(contract.alignment), partial(draw_nonce, settings))
    observer = _Recorder(settings, folder, data.ids, evaluation_labels(settings))
    observer.after_epoch = after_epoch
    # The active party's bar shows every step, in a notebook, too.
    observer.console = Console(file=io.StringIO(), force_jupyter=False)
    with observer as recorder, taking_part(folder, aligner, builder, recorder) as run:
        yield run
    sample, sent = recorder.sample, recorder.sent_in_epochs()
    try_to_measure(folder, run.trainer, builder.encoder, len(data.ids), sample, sent)
    found = recorder.summary(getattr(run.trainer, "feature_values", None))
    write_summary(folder, replace(found, version=VERSION))


class _Recorder(PassiveRecorder):
    after_epoch: Callable[[], None] | None = None

    def on_epoch(self, epoch: int) -> None:
        super().on_epoch(epoch)
        if self.after_epoch is not None:
            self.after_epoch()


def _folder_with_settings(settings: ActiveSettings | PassiveSettings, folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command_line.save_resolved(settings, folder)
    return folder


class _ClearGroup:
    """Leaves digests of ids as they are: whoever sees them can look up any id."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:  # noqa: ARG002
        """Return the first bytes of each digest in the place of a point."""
        starts = range(0, len(digests), DIGEST_BYTES)
        return b"".join(digests[start : start + POINT_BYTES] for start in starts)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:  # noqa: ARG002
        return points


def clear_engine(settings: AlignmentSettings) -> EcdhEngine:
    """Build an engine that compares ids in the clear. Never use it between two processes.

    Multiplying every id by two secret scalars takes longer than training on a small table. What
    comes out, the set of common ids, does not depend on it, and neither does their order, which
    follows from the joint seed.
    """
    return EcdhEngine(
        min_aligned=settings.min_aligned, max_set_size=settings.max_set_size, group=_ClearGroup()
    )

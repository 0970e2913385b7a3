"""All parties of a run in this process, built one by one and observed, for tests and benchmarks.

    settings = read_settings(Path("deploy/examples/breast_cancer"))
    run = build(settings)
    run.meet()
    print(run.active.seen.evaluations[-1].figures.auc, run.active.session.leak_bounds())

``meet`` needs no network; ``meet_over_grpc`` sends every message through gRPC on loopback. With a
folder for checkpoints, a run can be resumed by building it again.
"""

import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from splitveil.active_party.assembly import build_session
from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run.lifecycle import SessionObserver
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.exchange import build_engine
from splitveil.common.models.device import torch_device
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.wire.connection import PeerConnection
from splitveil.deploy.overrides import party_kinds
from splitveil.library.in_process import InProcessPeer, meet, start
from splitveil.library.loading import PartiesSettings
from splitveil.passive_party.assembly import BottomBuilder
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.opening import Aligner, Participant, Peer
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings


def read_settings(
    folder: Path, active: Sequence[str] = (), passive: Sequence[str] = ()
) -> PartiesSettings:
    """Load all parties' settings with overrides ``name=value`` of either side.

    Those of the contract begin with ``contract.`` and belong in both.
    """
    written = tuple((path.name, path.read_bytes()) for path in sorted(folder.glob("*.yaml")))
    return _read(folder, tuple(active), tuple(passive), written)


@lru_cache(maxsize=8)
def _read(
    folder: Path, active: tuple[str, ...], passive: tuple[str, ...], _written: object
) -> PartiesSettings:
    own = load_party_settings(ActiveSettings, folder / "active.yaml", active)
    names, kinds = own.contract.passive_parties, party_kinds(folder)[1:]
    if any((folder / f"{name}.yaml").is_file() for name in names):  # not as in the examples
        kinds = [*names]
    others = (
        load_party_settings(PassiveSettings, folder / f"{kind}.yaml", passive) for kind in kinds
    )
    return PartiesSettings(own, {settings.party: settings for settings in others})


@dataclass
class Recording:
    """The events that the observers of both parties keep.

    The state that goes into a checkpoint is the length of every list. Restoring it shortens the
    lists to what they held then, so that a resumed run leaves one recording without repeats.
    """

    rows: AlignedRows | None = None
    epochs: list[int] = field(default_factory=list)
    resumed: list[int | None] = field(default_factory=list)
    """The epoch in which each resumption continued; None at the end of the run. Never shortened."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        self.rows = rows

    def on_resumed(self, epoch: int | None) -> None:
        self.resumed.append(epoch)

    def on_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, int]:
        return {name: len(seen) for name, seen in vars(self).items() if isinstance(seen, list)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Forget events after the state; earlier events of another process are unknown here."""
        for name, count in state.items():
            if name != "resumed":
                del getattr(self, name)[count:]


@dataclass
class ActiveRecording(Recording):
    losses: list[float] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    """The defended gradient of every training batch, (batch, *cut_shape)."""

    evaluations: list[Evaluation] = field(default_factory=list)
    ledger: list[tuple[int, LeakBounds]] = field(default_factory=list)
    """The epoch, and the bounds on all answers up to its end."""

    earlier: tuple[int, LeakBounds] | None = None
    """The number of examples about which earlier runs answered, and the bounds on these answers."""

    def on_step(self, batch: Batch, result: Step) -> None:
        self.losses.append(float(result.loss.detach()))
        self.sent.append(result.defended.gradient.clone())

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        self.earlier = (examples, bounds)

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        self.ledger.append((epoch, bounds))

    def on_answers_ahead(self, bounds: LeakBounds) -> None: ...


@dataclass
class PassiveRecording(Recording):
    received: list[Tensor] = field(default_factory=list)
    """The gradient that came back for every training batch, (batch, *cut_shape)."""

    layers: list[dict[str, Tensor]] = field(default_factory=list)
    """The gradients at the layers before the cut that are tapped, by name."""

    def on_opened(self, run_id: str) -> None: ...

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        assert done_ids <= total_ids

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.received.append(received.clone())
        self.layers.append({name: gradient.clone() for name, gradient in layers.items()})


@dataclass
class ActiveParty:
    settings: ActiveSettings
    session: ActiveSession
    engine: EcdhEngine
    seen: ActiveRecording


@dataclass
class PassiveParty:
    settings: PassiveSettings
    run: PassiveRun
    seen: PassiveRecording
    builder: BottomBuilder | None = None


@dataclass
class Simulation:
    """All parties of a run, ready to meet."""

    active: ActiveParty
    passive: dict[str, PassiveParty]

    def meet(self, connect: "Connect | None" = None) -> None:
        """Let all parties meet; a run with checkpoints is resumed."""
        runs = {name: party.run for name, party in self.passive.items()}
        meet(self.active.session, runs, partial(connect or connect_in_process, self))

    def start(
        self, name: str, connect: "Connect", on_error: Callable[[BaseException], None]
    ) -> threading.Thread:
        return start(name, self.passive[name].run, partial(connect, self), on_error)

    def fit_top(self) -> None:
        """Fit the top model of a one-shot run that is over, as its process does."""
        session = self.active.session
        trainer = session.lifecycle.trainer
        if trainer is None:
            raise RuntimeError("nothing to fit before the alignment")
        trainer.fit_top()
        for evaluation in session.lifecycle.answering.measure_held_out():
            session.lifecycle.observer.on_evaluation(evaluation)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of all models, ``top.<parameter>`` and ``<party>.<parameter>``."""
        trainers = {name: party.run.trainer for name, party in self.passive.items()}
        found: dict[str, Tensor] = {}
        top = self.active.session.lifecycle.trainer
        for party, trainer in {"top": top, **trainers}.items():
            if trainer is None:
                raise RuntimeError("no weights before the alignment")
            weights = trainer.model.state_dict()
            found |= {f"{party}.{name}": value for name, value in weights.items()}
        return found


Connect = Callable[[Simulation, str], Peer]
"""Connects a passive party of a simulation, given by its name, to the active party."""


def connect_in_process(simulation: Simulation, name: str) -> Peer:
    active = simulation.active
    return InProcessPeer(active.session, active.engine, name)


def build(
    settings: PartiesSettings,
    *,
    runs: Path | None = None,
    active_seen: ActiveRecording | None = None,
    passive_seen: Mapping[str, PassiveRecording] | None = None,
) -> Simulation:
    """Build all parties of a run.

    With ``runs``, each keeps checkpoints in a folder there.
    """
    observers = passive_seen or {}
    active = build_active(settings.active, runs=runs, seen=active_seen)
    passive = {
        name: build_passive(each, runs=runs, seen=observers.get(name))
        for name, each in settings.passive.items()
    }
    return Simulation(active, passive)


def build_active(
    settings: ActiveSettings,
    *,
    runs: Path | None = None,
    device: torch.device | None = None,
    seen: ActiveRecording | None = None,
) -> ActiveParty:
    observer = ActiveRecording() if seen is None else seen
    engine = build_engine(settings.contract.alignment)
    num_parties = len(settings.contract.passive_parties)
    store = _store(settings, ACTIVE, runs, num_parties)
    session, _ = assemble_active(settings, observer, store=store, device=device)
    return ActiveParty(settings, session, engine, observer)


def assemble_active(
    settings: ActiveSettings,
    observer: SessionObserver,
    *,
    store: RunStore | None = None,
    device: torch.device | None = None,
) -> tuple[ActiveSession, TrainerBuilder]:
    """Build the active party's session with any observer, and what builds its trainer."""
    data, draw = PartyData.of(settings), partial(draw_nonce, settings)
    builder = TrainerBuilder(settings, data, device or torch_device(settings.device))
    earlier = settings.earlier_answers()
    return build_session(settings, data, builder, observer, draw, store, earlier), builder


def build_passive(
    settings: PassiveSettings,
    *,
    runs: Path | None = None,
    device: torch.device | None = None,
    seen: PassiveRecording | None = None,
) -> PassiveParty:
    observer = PassiveRecording() if seen is None else seen
    data = PartyData.of(settings)
    builder = BottomBuilder(settings, data, device or torch_device(settings.device))
    me = Participant(settings.contract, settings.party, data.ids, data.table.splits)
    aligner = Aligner(me, build_engine(settings.contract.alignment), partial(draw_nonce, settings))
    store = _store(settings, settings.folder_name(), runs)
    return PassiveParty(settings, PassiveRun(aligner, builder, observer, store), observer, builder)


def _store(
    settings: PartySettings, name: str, runs: Path | None, num_parties: int = 1
) -> RunStore | None:
    if runs is None:
        return None
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    return RunStore(folder, num_parties, keep=100)


_PORTS = range(20_000, 30_000)
"""Below those that systems give to outgoing connections, one of which could take a free port before
its server does."""

_given: deque[int] = deque(maxlen=1000)


def free_address() -> str:
    """Return an address of loopback at which nobody listens, and which was not returned yet."""
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if port in _given:  # whoever asked for it may not listen yet
            continue
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.append(port)
            return f"127.0.0.1:{port}"
    raise OSError("found no free port on loopback")


@contextmanager
def serving(active: ActiveParty, address: str) -> Iterator[ActiveService]:
    """Serve an active party at an address, with the protection that its settings ask for."""
    settings = active.settings
    service = ActiveService(active.session, active.engine, settings.reconnect.deadline_s)
    credentials = credential_files(settings, ACTIVE)
    server = start_server(service, settings.contract, address, credentials)
    try:
        yield service
    finally:
        server.stop(0).wait()


def meet_over_grpc(simulation: Simulation, address: str | None = None) -> None:
    """Let all parties meet over gRPC, by default at a free port; raises what ended the run."""
    address = address or free_address()
    with ExitStack() as resources:
        resources.enter_context(serving(simulation.active, address))

        def connect(simulation: Simulation, name: str) -> GrpcPeer:
            settings = simulation.passive[name].settings
            connection = PeerConnection(
                address, settings.contract, credential_files(settings, name)
            )
            peer = GrpcPeer(connection, settings.reconnect, party=name)
            return resources.enter_context(peer)

        simulation.meet(connect)

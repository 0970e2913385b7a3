"""Builds the parties of a run from their settings, and lets them meet in this process."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from splitveil.active_party.assembly import allowance_of, build_session
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder as TopBuilder
from splitveil.common.alignment import AlignmentEngine, build_engine
from splitveil.common.party.command_line import draw_nonce, torch_device
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.course import AlignedRows
from splitveil.passive_party.assembly import BottomBuilder
from splitveil.passive_party.opening import Aligner, Participant, Peer
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from splitveil.passive_party.training import RunObserver
from splitveil.simulation.in_process import InProcessPeer
from splitveil.simulation.recordings import ActiveRecording, PassiveRecording

ResultT = TypeVar("ResultT")

_seeding = threading.Lock()
"""Held while weights are drawn: torch has one generator for all parties of this process."""


class PartiesSettings(NamedTuple):
    active: ActiveSettings
    passive: Mapping[str, PassiveSettings]
    """By the name of each passive party in the contract."""


@dataclass
class ActiveParty:
    settings: ActiveSettings
    session: ActiveSession
    engine: AlignmentEngine
    seen: ActiveRecording


@dataclass
class PassiveParty:
    settings: PassiveSettings
    run: PassiveRun
    seen: PassiveRecording


@dataclass
class Simulation:
    """All parties of a run, ready to meet."""

    active: ActiveParty
    passive: dict[str, PassiveParty]

    def meet(self, connect: "Connect | None" = None) -> None:
        """Let all parties meet, and return when all of them have finished.

        A run with checkpoints is resumed. A single passive party runs in the calling thread,
        several parties in one thread each.

        Raises:
            SplitveilError: the error that ended the run; with several passive parties the first.
        """
        connect = connect or connect_in_process
        if self.active.session.stage is Stage.WAITING:
            self.active.session.reopen()
        if len(self.passive) == 1:
            for name, party in self.passive.items():
                party.run.run(connect(self, name))
            return
        errors: list[BaseException] = []
        threads = [self.start(name, connect, errors.append) for name in self.passive]
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def start(
        self,
        name: str,
        connect: "Connect | None" = None,
        on_error: Callable[[BaseException], None] = lambda _: None,
    ) -> threading.Thread:
        """Let one passive party run in a thread of its own.

        An error that ends its run is given to ``on_error`` in that thread.
        """
        party, connect = self.passive[name], connect or connect_in_process

        def run() -> None:
            try:
                party.run.run(connect(self, name))
            except BaseException as error:  # the thread's owner decides how to handle it
                on_error(error)

        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of all models, ``top.<parameter>`` and ``<party>.<parameter>``.

        Raises:
            RuntimeError: the parties have not aligned yet, so that models do not exist.
        """
        top = self.active.session.lifecycle.phase.trainer
        if top is None:
            raise RuntimeError("no weights before the alignment")
        found = {f"top.{name}": value for name, value in top.model.state_dict().items()}
        for party, passive in self.passive.items():
            if passive.run.trainer is None:
                raise RuntimeError("no weights before the alignment")
            weights = passive.run.trainer.model.state_dict()
            found |= {f"{party}.{name}": value for name, value in weights.items()}
        return found


Connect = Callable[[Simulation, str], Peer]
"""Connects a passive party of a simulation, given by its name, to the active party."""


def connect_in_process(simulation: Simulation, name: str) -> Peer:
    active = simulation.active
    return InProcessPeer(active.session, active.engine, name)


def read_settings(
    folder: Path,
    active: Sequence[str] = (),
    passive: Sequence[str] = (),
    each: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> PartiesSettings:
    """Read the settings of all parties from a folder.

    Args:
        folder: with ``active.yaml`` and either ``passive.yaml`` or, for several passive parties,
            one file for each, such as ``passive_a.yaml``.
        active: overrides of the active party's settings, ``dotted.name=yaml`` each; overrides of
            the contract begin with ``contract.`` and belong in ``passive``, too.
        passive: overrides of every passive party's settings.
        each: further overrides of single passive parties, by the names of their files.

    Raises:
        SettingsError: lists every problem of a party's file and of the contract.
    """
    files = sorted(folder.glob("passive_*.yaml")) or [folder / "passive.yaml"]
    own = load_party_settings(ActiveSettings, folder / "active.yaml", active)
    read = [
        load_party_settings(PassiveSettings, path, [*passive, *each.get(path.stem, ())])
        for path in files
    ]
    return PartiesSettings(own, {settings.party: settings for settings in read})


def build(
    settings: PartiesSettings,
    *,
    runs: Path | None = None,
    device: torch.device | None = None,
    active_seen: ActiveRecording | None = None,
    passive_seen: Mapping[str, PassiveRecording] | None = None,
) -> Simulation:
    """Build all parties of a run.

    Args:
        settings: settings of all parties.
        runs: folder in which each party keeps its checkpoints, in a subfolder of its name; by
            default checkpoints are not kept.
        device: device of all models; by default the device in each party's settings.
        active_seen: the active party's observer; a new recording by default.
        passive_seen: observers of passive parties, by name; new recordings by default.

    Raises:
        SplitveilError: settings or data cannot be used.
    """
    observers = passive_seen or {}
    active = build_active(settings.active, runs=runs, device=device, seen=active_seen)
    passive = {
        name: build_passive(each, runs=runs, device=device, seen=observers.get(name))
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
    """Build the active party, with the arguments and errors of ``build``."""
    observer = ActiveRecording() if seen is None else seen
    engine = build_engine(settings.contract.alignment)
    num_parties = len(settings.contract.passive_parties)
    store = _store(settings, ACTIVE, runs, num_parties)
    session, _ = assemble_active(settings, observer, store=store, device=device)
    return ActiveParty(settings, session, engine, observer)


def build_passive(
    settings: PassiveSettings,
    *,
    runs: Path | None = None,
    device: torch.device | None = None,
    seen: PassiveRecording | None = None,
) -> PassiveParty:
    """Build a passive party, with the arguments and errors of ``build``."""
    observer = PassiveRecording() if seen is None else seen
    data = PartyData.of(settings)
    store = _store(settings, settings.folder_name(), runs)
    engine = build_engine(settings.contract.alignment)
    run, _ = assemble_passive(settings, data, observer, engine, store=store, device=device)
    return PassiveParty(settings, run, observer)


def assemble_active(
    settings: ActiveSettings,
    observer: SessionObserver,
    *,
    store: RunStore | None = None,
    device: torch.device | None = None,
) -> tuple[ActiveSession, TopBuilder]:
    """Build the active party's session with any observer, and what builds its trainer."""
    data = PartyData.of(settings)
    builder = TopBuilder(settings, data, device or torch_device(settings.device))
    session = build_session(
        settings,
        data,
        _one_at_a_time(builder),
        observer,
        partial(draw_nonce, settings),
        store,
        allowance_of(settings, settings.earlier_answers()),
    )
    return session, builder


def assemble_passive(
    settings: PassiveSettings,
    data: PartyData,
    observer: RunObserver,
    engine: AlignmentEngine,
    *,
    store: RunStore | None = None,
    device: torch.device | None = None,
) -> tuple[PassiveRun, BottomBuilder]:
    """Build a passive party's run with any observer, and what builds its trainer."""
    builder = BottomBuilder(settings, data, device or torch_device(settings.device))
    me = Participant(settings.contract, settings.party, data.ids, data.table.splits)
    aligner = Aligner(me, engine, partial(draw_nonce, settings))
    return PassiveRun(aligner, _one_at_a_time(builder), observer, store), builder


def _store(
    settings: PartySettings, name: str, runs: Path | None, num_parties: int = 1
) -> RunStore | None:
    if runs is None:
        return None
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    return RunStore(folder, settings.contract.checkpoints.keep, num_parties)


def _one_at_a_time(build: Callable[[AlignedRows], ResultT]) -> Callable[[AlignedRows], ResultT]:
    def locked(rows: AlignedRows) -> ResultT:
        with _seeding:
            return build(rows)

    return locked

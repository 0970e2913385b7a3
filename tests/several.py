"""Small whole runs with several passive parties, in one process or over a wire."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import yaml
from torch import Tensor

from splitveil.active_party.assembly import TrainerBuilder as TopBuilder
from splitveil.active_party.assembly import build_session
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.serving.service import agreeing
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment import (
    AlignChannel,
    AlignmentEngine,
    AlignmentResources,
    align,
    build_engine,
)
from splitveil.common.errors import (
    NotOpen,
    OthersAwaited,
    PeerRestarted,
    PeerUnreachable,
    SplitveilError,
)
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import (
    Activation,
    Answer,
    AuditQuestion,
    Course,
    LeaveReason,
    Offer,
    Opening,
)
from splitveil.common.storage.run_store import RunStore
from splitveil.passive_party.assembly import TrainerBuilder as BottomBuilder
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from tests.peers import InProcessPeer
from tests.runs import ACTIVE, CONTRACT, CPU, PASSIVE, ActiveRecording, PassiveRecording
from tests.waiting import HANGS_AFTER_S

NAMES = ("ash", "birch", "cedar")

ResultT = TypeVar("ResultT")


def write_several(folder: Path, parties: int = 3, rows: int = 400, seed: int = 3) -> None:
    """Write data of an active and several passive parties, of which each lacks other rows."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    x, own = generator.normal(size=(rows, 2 * parties)), generator.normal(size=(rows, 2))
    score = x[:, ::2].sum(axis=1) + own[:, 0] + generator.normal(scale=0.5, size=rows)
    labels = (score > 1.0).astype(int)
    ids = [f"person-{number:05d}" for number in range(rows)]
    names, cut = NAMES[:parties], rows // 20
    contract = {**CONTRACT, "passive_parties": list(names)}
    settings: dict[str, dict[str, object]] = {"contract": contract, "active": {**ACTIVE}}
    (folder / "active.csv").write_text(
        "id,label,own1,own2\n"
        + "".join(
            f"{ids[i]},{labels[i]},{own[i, 0]},{own[i, 1]}\n"
            for i in generator.permutation(rows - cut)
        )
    )
    for place, name in enumerate(names):
        columns = x[:, 2 * place : 2 * place + 2]
        present = [i for i in generator.permutation(rows) if (i + place * cut) % rows >= cut]
        (folder / f"{name}.csv").write_text(
            "id,x1,x2\n" + "".join(f"{ids[i]},{columns[i, 0]},{columns[i, 1]}\n" for i in present)
        )
        data = {"source": {"kind": "csv", "path": f"{name}.csv"}, "id_column": "id"}
        settings[name] = {
            **PASSIVE,
            "party": name,
            "data": {**data, "features": {"numeric": "x*"}},
            "insecure_nonce_seed": 10 + place,
            "model_seed": 20 + place,
        }
    for name, values in settings.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


_seeding = threading.Lock()


def one_at_a_time(build: Callable[[AlignedRows], ResultT]) -> Callable[[AlignedRows], ResultT]:
    """Let no other party of this process draw weights meanwhile: torch has one generator."""

    def locked(rows: AlignedRows) -> ResultT:
        with _seeding:
            return build(rows)

    return locked


@dataclass
class Passive:
    """One passive party."""

    settings: PassiveSettings
    run: PassiveRun
    seen: PassiveRecording


@dataclass
class Several:
    """All parties of a run, built from the settings in a folder, ready to meet."""

    session: ActiveSession
    settings: ActiveSettings
    seen: ActiveRecording
    engine: AlignmentEngine
    passive: dict[str, Passive]
    errors: dict[str, BaseException] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        """Return all models' weights by name."""
        assert self.session.trainer is not None
        found = {f"top.{k}": v for k, v in self.session.trainer.model.state_dict().items()}
        for name, party in self.passive.items():
            assert party.run.trainer is not None
            weights = party.run.trainer.model.state_dict()
            found |= {f"{name}.{k}": v for k, v in weights.items()}
        return found


def build_several(
    folder: Path,
    both: Sequence[str] = (),
    active: Sequence[str] = (),
    *,
    runs: Path | None = None,
) -> Several:
    """Build all parties with overrides.

    Args:
        folder: where ``write_several`` has written.
        both: overrides for all.
        active: overrides for the active party.
        runs: where all keep checkpoints; by default they keep none.
    """
    settings = load_party_settings(ActiveSettings, folder / "active.yaml", [*both, *active])
    data, seen = PartyData.load(settings.data, folder, settings.contract.split), ActiveRecording()
    session = build_session(
        settings,
        data,
        one_at_a_time(TopBuilder(settings, data, CPU)),
        seen,
        partial(draw_nonce, settings),
        _store(runs, "active", settings.contract.passive_parties),
    )
    engine = build_engine(settings.contract.alignment, AlignmentResources())
    passive = {
        name: build_passive(folder, name, both, runs=runs)
        for name in settings.contract.passive_parties
    }
    return Several(session, settings, seen, engine, passive)


def build_passive(
    folder: Path, name: str, overrides: Sequence[str] = (), *, runs: Path | None = None
) -> Passive:
    """Build one passive party."""
    settings = load_party_settings(PassiveSettings, folder / f"{name}.yaml", overrides)
    data, seen = PartyData.load(settings.data, folder, settings.contract.split), PassiveRecording()
    me = Participant(settings.contract, name, data.ids, data.table.splits)
    engine = build_engine(settings.contract.alignment, AlignmentResources())
    run = PassiveRun(
        Aligner(me, engine, partial(draw_nonce, settings)),
        one_at_a_time(BottomBuilder(settings, data, CPU)),
        seen,
        _store(runs, name),
    )
    return Passive(settings, run, seen)


def _store(runs: Path | None, name: str, asked_by: Sequence[str] = ("one",)) -> RunStore | None:
    if runs is None:
        return None
    (runs / name).mkdir(parents=True, exist_ok=True)
    return RunStore(runs / name, 3, len(asked_by))


class PartyPeer(InProcessPeer):
    """The active party in the same process, for one of several: what fails there, ends the run.

    Where the test replaces the session, the active party was started again.
    """

    def __init__(self, several: Several, party: str) -> None:
        super().__init__(several.session, several.engine)
        self._several = several
        self._party = party

    def handshake(
        self, party: str, canonical_contract: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        until = time.monotonic() + HANGS_AFTER_S
        while True:
            self._session = self._several.session
            try:
                return super().handshake(party, canonical_contract, commitment, offer)
            except OthersAwaited:
                if time.monotonic() > until:
                    raise

    def _align(self, channel: AlignChannel) -> None:
        session = self._session
        try:
            session.require_aligning(party=self._party)
            align(
                self._engine,
                session.ids,
                channel,
                nonce=session.nonce,
                run_id=session.run_id,
                agree=agreeing(session, self._party),
                splits=session.file_splits,
            )
        except SplitveilError as error:
            self._failure = error
            if not isinstance(error, NotOpen | PeerUnreachable):
                session.end(error)

    def open_alignment(self) -> AlignChannel:
        self._failure = None
        return super().open_alignment()

    def close_alignment(self) -> None:
        self._told(super().close_alignment)

    def receive_gradient(self) -> Answer:
        session, sent = self._several.session, self._sent
        assert sent is not None
        reply = self._told(lambda: session.exchange(sent, self._party, self._is_connected(session)))
        session.finish_step()
        return reply

    def evaluate(self, activation: Activation) -> Course:
        session = self._several.session
        course = self._told(
            lambda: session.evaluate(activation, self._party, self._is_connected(session))
        )
        session.finish_step()
        return course

    def audit(self, question: AuditQuestion) -> float:
        return self._several.session.audit(question, self._party)

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        while True:
            session = self._several.session
            connected = self._is_connected(session)
            with contextlib.suppress(OthersAwaited):
                self._told(lambda: session.leave(run_id, reason, self._party, connected))  # noqa: B023
                return

    def _is_connected(self, session: ActiveSession) -> Callable[[], bool]:
        return lambda: session is self._several.session

    @staticmethod
    def _told(ask: Callable[[], ResultT]) -> ResultT:
        try:
            return ask()
        except NotOpen as error:
            raise PeerRestarted from error  # as its status means on the other side


Connect = Callable[[Several, str], PartyPeer]


def start(several: Several, name: str, connect: Connect = PartyPeer) -> threading.Thread:
    """Let one passive party run beside the test."""
    several.errors.pop(name, None)
    party = several.passive[name]

    def run() -> None:
        try:
            party.run.run(connect(several, name))
        except BaseException as error:
            several.errors[name] = error

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    return thread


def finish(threads: Sequence[threading.Thread]) -> None:
    """Wait for their end."""
    for thread in threads:
        thread.join(HANGS_AFTER_S)
        assert not thread.is_alive(), f"{thread.name} hangs"


def run_in_process(several: Several, **connect: Connect) -> None:
    """Let all parties meet in this process."""
    finish([start(several, name, connect.get(name, PartyPeer)) for name in several.passive])
    for error in several.errors.values():
        raise error


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

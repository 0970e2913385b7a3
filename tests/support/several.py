"""Small whole runs with several passive parties, in one process or over a wire."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from tests.support import simulation
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, PassiveRecording, write_table, write_yaml
from tests.support.simulation import (
    ActiveParty,
    ActiveRecording,
    InProcessPeer,
    PassiveParty,
    Simulation,
    build_active,
)
from tests.support.waiting import HANGS_AFTER_S

NAMES = ("ash", "birch", "cedar")


def write_several(folder: Path, parties: int = 3, rows: int = 400, seed: int = 3) -> None:
    """Write data of an active and several passive parties, each of which lacks different rows."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    x, own = generator.normal(size=(rows, 2 * parties)), generator.normal(size=(rows, 2))
    score = x[:, ::2].sum(axis=1) + own[:, 0] + generator.normal(scale=0.5, size=rows)
    labels = (score > 1.0).astype(int)
    ids = [f"person-{number:05d}" for number in range(rows)]
    names, cut = NAMES[:parties], rows // 20
    contract = {**CONTRACT, "passive_parties": list(names)}
    settings: dict[str, dict[str, object]] = {"contract": contract, "active": {**ACTIVE}}
    order = generator.permutation(rows - cut)
    write_table(folder / "active.csv", "id,label,own1,own2", order, ids, labels, *own.T)
    for place, name in enumerate(names):
        columns = x.T[2 * place : 2 * place + 2]
        present = [i for i in generator.permutation(rows) if (i + place * cut) % rows >= cut]
        write_table(folder / f"{name}.csv", "id,x1,x2", present, ids, *columns)
        data = {"source": {"kind": "csv", "path": f"{name}.csv"}, "id_column": "id"}
        settings[name] = {
            **PASSIVE,
            "party": name,
            "data": {**data, "features": {"numeric": "x*"}},
            "insecure_nonce_seed": 10 + place,
            "model_seed": 20 + place,
        }
    write_yaml(folder, **settings)


@dataclass
class Several:
    """All parties of a run, built from the settings in a folder, ready to meet."""

    session: ActiveSession
    settings: ActiveSettings
    seen: ActiveRecording
    engine: EcdhEngine
    passive: dict[str, PassiveParty]
    errors: dict[str, BaseException] = field(default_factory=dict)

    def simulation(self) -> Simulation:
        active = ActiveParty(self.settings, self.session, self.engine, self.seen)
        return Simulation(active, self.passive)

    def weights(self) -> dict[str, Tensor]:
        return self.simulation().weights()


def build_several(
    folder: Path, both: Sequence[str] = (), active: Sequence[str] = (), *, runs: Path | None = None
) -> Several:
    """Build all parties with overrides.

    With ``runs``, each keeps checkpoints in a folder there.
    """
    settings = load_party_settings(ActiveSettings, folder / "active.yaml", [*both, *active])
    one = build_active(settings, runs=runs)
    passive = {
        name: build_passive(folder, name, both, runs=runs)
        for name in settings.contract.passive_parties
    }
    return Several(one.session, settings, one.seen, one.engine, passive)


def build_passive(
    folder: Path, name: str, overrides: Sequence[str] = (), *, runs: Path | None = None
) -> PassiveParty:
    settings = load_party_settings(PassiveSettings, folder / f"{name}.yaml", overrides)
    return simulation.build_passive(settings, runs=runs, seen=PassiveRecording())


class PartyPeer(InProcessPeer):
    """The active party in the same process, for one of several parties: its errors end the run.

    A test replaces the session to simulate a restart of the active party.
    """

    def __init__(self, several: Several, party: str) -> None:
        super().__init__(several.session, several.engine, party, HANGS_AFTER_S)
        self._several = several

    @property
    def session(self) -> ActiveSession:
        return self._several.session


Connect = Callable[[Several, str], PartyPeer]


def start(several: Several, name: str, connect: Connect = PartyPeer) -> threading.Thread:
    several.errors.pop(name, None)
    return several.simulation().start(
        name,
        lambda _, name: connect(several, name),
        lambda error: several.errors.update({name: error}),
    )


def finish(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(HANGS_AFTER_S)
        assert not thread.is_alive(), f"{thread.name} hangs"


def run_in_process(several: Several, **connect: Connect) -> None:
    finish([start(several, name, connect.get(name, PartyPeer)) for name in several.passive])
    for error in several.errors.values():
        raise error

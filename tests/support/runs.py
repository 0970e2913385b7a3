"""Small whole runs for tests: files, settings, and both parties in one process or over a wire."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.party.party_settings import load_party_settings
from splitveil.library.in_process import InProcessPeer
from splitveil.passive_party.opening import Peer
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from tests.support import simulation
from tests.support.simulation import (
    ActiveParty,
    ActiveRecording,
    PassiveParty,
    PassiveRecording,
    Simulation,
)
from tests.support.waiting import HANGS_AFTER_S

__all__ = ["ActiveRecording", "PassiveRecording"]  # besides its own names

CPU = torch.device("cpu")
NAMES = ("ash", "birch", "cedar")
"""Of several passive parties."""

EVERY_2 = "contract.checkpoint_steps=2"
MARVELL_2 = [EVERY_2, "defense={name: marvell, statistics: running, insecure_noise_seed: 7}"]

CONTRACT = {
    "run_name": "small",
    "cut_shape": [4],
    "batch_size": 64,
    "evaluation_batch_size": 50,
    "epochs": 2,
    "split": {"kind": "hash", "train": 0.6, "validation": 0.2, "test": 0.2},
    "alignment": {"min_aligned": 20},
}
EVERY_BATCH = {"max_cpu_share": None}
"""Audits that leave no batch out, however slow the machine: figures depend on which ones it was."""

ACTIVE = {
    "contract": "contract.yaml",
    "listen": "127.0.0.1:1",
    "security": {"mode": "insecure"},
    "data": {
        "source": {"kind": "csv", "path": "active.csv"},
        "id_column": "id",
        "label_column": "label",
        "features": {"numeric": "own*"},
    },
    "top_model": {"kind": "mlp", "hidden": [8]},
    "defense": {"name": "none"},
    "optimizer": {"kind": "adam", "learning_rate": 0.01},
    "device": "cpu",
    "torch_threads": 1,
    "insecure_nonce_seed": 1,
    "leak_monitor": EVERY_BATCH,
    "reconnect": {"max_s": 300, "deadline_s": 300},
}
PASSIVE = {
    "contract": "contract.yaml",
    "connect": "127.0.0.1:1",
    "security": {"mode": "insecure"},
    "data": {
        "source": {"kind": "csv", "path": "passive.csv"},
        "id_column": "id",
        "features": {"numeric": "x*"},
    },
    "bottom_model": {"kind": "mlp", "hidden": [8]},
    "adversary": {
        **EVERY_BATCH,
        "labels": {
            "source": {"kind": "csv", "path": "active.csv"},
            "id_column": "id",
            "label_column": "label",
        },
    },
    "optimizer": {"kind": "adam", "learning_rate": 0.01},
    "device": "cpu",
    "torch_threads": 1,
    "insecure_nonce_seed": 2,
    "reconnect": {"max_s": 300, "deadline_s": 300},
}


def write_example(folder: Path, rows: int = 400, seed: int = 3) -> None:
    """Write data of two parties (9 in 10 rows common, in different orders) and their settings."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    x, own = generator.normal(size=(rows, 5)), generator.normal(size=(rows, 2))
    score = x[:, 0] - x[:, 1] + own[:, 0] + generator.normal(scale=0.5, size=rows)
    labels = (score > 1.0).astype(int)
    ids = [f"person-{number:05d}" for number in range(rows)]
    cut = rows // 20
    active, passive = generator.permutation(rows - cut), cut + generator.permutation(rows - cut)
    write_table(folder / "active.csv", "id,label,own1,own2", active, ids, labels, *own.T)
    write_table(folder / "passive.csv", "id,x1,x2,x3,x4,x5", passive, ids, *x.T)
    write_yaml(folder, contract=CONTRACT, active=ACTIVE, passive=PASSIVE)


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


def write_table(path: Path, head: str, order: Iterable[int], *columns: Any) -> None:
    rows = (",".join(str(column[row]) for column in columns) for row in order)
    path.write_text("\n".join([head, *rows, ""]))


def write_yaml(folder: Path, **files: Mapping[str, object]) -> None:
    for name, values in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(values)))


class Parties:
    """All parties of a run, built from the settings in a folder, ready to meet.

    ``run``, ``passive`` and ``passive_settings`` are those of a single passive party.
    """

    def __init__(self, active: ActiveParty, peers: dict[str, PassiveParty]) -> None:
        self.session, self.engine = active.session, active.engine
        self.active_settings, self.active = active.settings, active.seen
        self.peers = peers
        self.errors: dict[str, BaseException] = {}

    @property
    def _single(self) -> PassiveParty:
        (party,) = self.peers.values()
        return party

    @property
    def run(self) -> PassiveRun:
        return self._single.run

    @run.setter
    def run(self, run: PassiveRun) -> None:
        self._single.run = run

    @property
    def passive(self) -> PassiveRecording:
        return self._single.seen

    @property
    def passive_settings(self) -> PassiveSettings:
        return self._single.settings

    def simulation(self) -> Simulation:
        active = ActiveParty(self.active_settings, self.session, self.engine, self.active)
        return Simulation(active, self.peers)

    def weights(self) -> dict[str, Tensor]:
        return self.simulation().weights()


def build_parties(
    folder: Path,
    active: Sequence[str] = (),
    passive: Sequence[str] = (),
    *,
    runs: Path | None = None,
    device: torch.device = CPU,
    active_seen: ActiveRecording | None = None,
    passive_seen: PassiveRecording | None = None,
) -> Parties:
    """Build all parties with overrides of their settings; ``contract.`` ones may differ, too.

    With ``runs``, each keeps checkpoints in a folder there. Only a single passive party can be
    given a recording.
    """
    # Persistent noise keeps its key with the run: tests in other folders have other labels.
    own = [f"runs_dir={folder / 'runs'}", *active]
    settings = simulation.read_settings(folder, own, passive)
    return Parties(
        simulation.build_active(settings.active, runs=runs, device=device, seen=active_seen),
        {
            name: simulation.build_passive(each, runs=runs, device=device, seen=passive_seen)
            for name, each in settings.passive.items()
        },
    )


def build_passive(
    folder: Path, name: str, overrides: Sequence[str] = (), *, runs: Path | None = None
) -> PassiveParty:
    settings = load_party_settings(PassiveSettings, folder / f"{name}.yaml", overrides)
    return simulation.build_passive(settings, runs=runs)


class PartyPeer(InProcessPeer):
    """The active party in the same process, for one of several parties: its errors end the run.

    A test replaces the session to simulate a restart of the active party.
    """

    def __init__(self, parties: Parties, party: str) -> None:
        super().__init__(parties.session, parties.engine, party, HANGS_AFTER_S)
        self._parties = parties

    @property
    def session(self) -> ActiveSession:
        return self._parties.session


Connect = Callable[[Parties, str], PartyPeer]


def start(parties: Parties, name: str, connect: Connect = PartyPeer) -> threading.Thread:
    parties.errors.pop(name, None)
    return parties.simulation().start(
        name,
        lambda _, name: connect(parties, name),
        lambda error: parties.errors.update({name: error}),
    )


def finish(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(HANGS_AFTER_S)
        assert not thread.is_alive(), f"{thread.name} hangs"


def run_in_process(
    parties: Parties, connect: Callable[[ActiveSession, EcdhEngine], Peer] = InProcessPeer
) -> None:
    parties.run.run(connect(parties.session, parties.engine))


def run_together(parties: Parties, connect: Connect = PartyPeer) -> None:
    """Let several passive parties run, each in a thread of its own; the first error is raised."""
    finish([start(parties, name, connect) for name in parties.peers])
    for error in parties.errors.values():
        raise error


def run_over_grpc(parties: Parties, port: int) -> None:
    simulation.meet_over_grpc(parties.simulation(), f"127.0.0.1:{port}")


def pipelined(depth: int, *more: str) -> list[str]:
    """Return overrides of a run with 14 batches of training rows an epoch, and checkpoints."""
    return [
        f"contract.pipeline_depth={depth}",
        "contract.batch_size=16",
        "contract.evaluation_batch_size=400",
        "contract.checkpoint_steps=5",
        *more,
    ]


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread

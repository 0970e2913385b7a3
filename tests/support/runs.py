"""Small whole runs for tests: files, settings, and both parties in one process or over a wire."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.passive_party.opening import Peer
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from tests.support import simulation
from tests.support.simulation import (
    ActiveParty,
    ActiveRecording,
    InProcessPeer,
    PassiveParty,
    PassiveRecording,
    Simulation,
)

__all__ = ["ActiveRecording", "PassiveRecording"]  # besides its own names

CPU = torch.device("cpu")

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


def write_table(path: Path, head: str, order: Iterable[int], *columns: Any) -> None:
    rows = (",".join(str(column[row]) for column in columns) for row in order)
    path.write_text("\n".join([head, *rows, ""]))


def write_yaml(folder: Path, **files: Mapping[str, object]) -> None:
    for name, values in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(values)))


@dataclass
class Parties:
    session: ActiveSession
    run: PassiveRun
    active: ActiveRecording
    passive: PassiveRecording
    active_settings: ActiveSettings
    passive_settings: PassiveSettings
    engine: EcdhEngine

    def simulation(self) -> Simulation:
        active = ActiveParty(self.active_settings, self.session, self.engine, self.active)
        passive = PassiveParty(self.passive_settings, self.run, self.passive)
        return Simulation(active, {self.passive_settings.party: passive})

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
    """Build both parties with overrides of their settings; ``contract.`` ones may differ, too.

    With ``runs``, each keeps checkpoints in a folder there.
    """
    # Persistent noise keeps its key with the run: tests in other folders have other labels.
    own = [f"runs_dir={folder / 'runs'}", *active]
    settings = simulation.read_settings(folder, own, passive)
    (passive_settings,) = settings.passive.values()
    seen = PassiveRecording() if passive_seen is None else passive_seen
    one = simulation.build_active(settings.active, runs=runs, device=device, seen=active_seen)
    other = simulation.build_passive(passive_settings, runs=runs, device=device, seen=seen)
    return Parties(
        one.session, other.run, one.seen, seen, one.settings, passive_settings, one.engine
    )


def run_in_process(
    parties: Parties, connect: Callable[[ActiveSession, EcdhEngine], Peer] = InProcessPeer
) -> None:
    parties.run.run(connect(parties.session, parties.engine))


def run_over_grpc(parties: Parties, port: int) -> None:
    simulation.meet_over_grpc(parties.simulation(), f"127.0.0.1:{port}")


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread

"""Small whole runs for tests: files, settings, and both parties in one process or over a wire."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from splitveil.active_party.assembly import TrainerBuilder as TopBuilder
from splitveil.active_party.assembly import build_session
from splitveil.active_party.ledger.ledger import LeakBounds
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.serving.server import start_server
from splitveil.active_party.serving.service import ActiveService
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.common.alignment import AlignmentEngine, AlignmentResources, build_engine
from splitveil.common.errors import SplitveilError
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.storage.run_store import RunStore
from splitveil.passive_party.assembly import TrainerBuilder as BottomBuilder
from splitveil.passive_party.connection import PeerConnection
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.peer import Peer
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from tests.peers import InProcessPeer

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
EVERY_BATCH = {"queue_batches": 1024, "max_cpu_share": None}
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
    (folder / "active.csv").write_text(
        "id,label,own1,own2\n"
        + "".join(f"{ids[i]},{labels[i]},{own[i, 0]},{own[i, 1]}\n" for i in active)
    )
    (folder / "passive.csv").write_text(
        "id,x1,x2,x3,x4,x5\n"
        + "".join(f"{ids[i]},{','.join(str(v) for v in x[i])}\n" for i in passive)
    )
    for name, values in (("contract", CONTRACT), ("active", ACTIVE), ("passive", PASSIVE)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


@dataclass
class Recording:
    """What an observer of either side saw."""

    rows: AlignedRows | None = None
    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    layers: list[dict[str, Tensor]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    ledger: list[tuple[int, LeakBounds]] = field(default_factory=list)
    audits: list[tuple[AuditQuestion, float]] = field(default_factory=list)
    resumed: list[int | None] = field(default_factory=list)

    def on_opened(self) -> None:
        """Take no note."""

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        assert done_ids <= total_ids

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        self.rows = rows

    def on_resumed(self, epoch: int | None) -> None:
        self.resumed.append(epoch)

    def state_dict(self) -> dict[str, int]:
        return {name: len(seen) for name, seen in vars(self).items() if isinstance(seen, list)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Forget what was seen since; what another process saw before is not known here."""
        for name, count in state.items():
            if name != "resumed":
                del getattr(self, name)[count:]

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ActiveRecording(Recording):
    earlier: tuple[int, LeakBounds] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._ahead: tuple[LeakBounds, ...] = ()
        self.audits_answered = 0

    @property
    def ahead(self) -> tuple[LeakBounds, ...]:
        """What was told of answers ahead; not forgotten where the run goes back."""
        return self._ahead

    def on_step(self, batch: Batch, result: StepResult) -> None:
        self.losses.append(float(result.loss.detach()))
        self.sent.append(result.defended.clone())

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        self.earlier = (examples, bounds)

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        self.ledger.append((epoch, bounds))

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        self._ahead += (bounds,)

    def on_audit(self, question: AuditQuestion, leak_auc: float, party: str) -> None:
        self.audits.append((question, leak_auc))

    def on_audits_answered(self, count: int) -> None:
        self.audits_answered = count

    def objection(self) -> SplitveilError | None:
        return None


class PassiveRecording(Recording):
    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.received.append(received.clone())
        self.layers.append({name: gradient.clone() for name, gradient in layers.items()})


@dataclass
class Parties:
    """Both parties, built from the settings in a folder, ready to meet."""

    session: ActiveSession
    run: PassiveRun
    active: ActiveRecording
    passive: PassiveRecording
    active_settings: ActiveSettings
    passive_settings: PassiveSettings
    engine: AlignmentEngine

    def weights(self) -> dict[str, Tensor]:
        """Return both models' weights by name."""
        assert self.session.trainer is not None
        assert self.run.trainer is not None
        top = self.session.trainer.model.state_dict()
        bottom = self.run.trainer.model.state_dict()
        return {f"top.{k}": v for k, v in top.items()} | {
            f"bottom.{k}": v for k, v in bottom.items()
        }


def build_parties(
    folder: Path,
    active: Sequence[str] = (),
    passive: Sequence[str] = (),
    *,
    runs: Path | None = None,
    device: torch.device = CPU,
) -> Parties:
    """Build both parties with overrides of their settings; ``contract.`` ones may differ, too.

    Args:
        folder: where the settings are.
        active: overrides.
        passive: overrides.
        runs: where both keep checkpoints, in a folder for each; by default they keep none.
        device: where both models are.
    """
    active_settings = load_party_settings(ActiveSettings, folder / "active.yaml", active)
    passive_settings = load_party_settings(PassiveSettings, folder / "passive.yaml", passive)
    active_data = PartyData.load(active_settings.data, folder, active_settings.contract.split)
    passive_data = PartyData.load(passive_settings.data, folder, passive_settings.contract.split)
    active_recording, passive_recording = ActiveRecording(), PassiveRecording()
    session = build_session(
        active_settings,
        active_data,
        TopBuilder(active_settings, active_data, device),
        active_recording,
        partial(draw_nonce, active_settings),
        _store(active_settings, runs and runs / "active"),
        active_settings.earlier_answers(),
    )
    engine = build_engine(passive_settings.contract.alignment, AlignmentResources())
    me = Participant(
        passive_settings.contract,
        passive_settings.party,
        passive_data.ids,
        passive_data.table.splits,
    )
    run = PassiveRun(
        Aligner(me, engine, partial(draw_nonce, passive_settings)),
        BottomBuilder(passive_settings, passive_data, device),
        passive_recording,
        _store(passive_settings, runs and runs / "passive"),
    )
    return Parties(
        session,
        run,
        active_recording,
        passive_recording,
        active_settings,
        passive_settings,
        build_engine(active_settings.contract.alignment, AlignmentResources()),
    )


def _store(settings: PartySettings, folder: Path | None) -> RunStore | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return RunStore(folder, settings.contract.checkpoints.keep)


def run_in_process(
    parties: Parties,
    connect: Callable[[ActiveSession, AlignmentEngine], Peer] = InProcessPeer,
) -> None:
    """Let the parties meet in this process."""
    parties.run.run(connect(parties.session, parties.engine))


@contextmanager
def serving(parties: Parties, port: int) -> Iterator[ActiveService]:
    """Serve the active party at a port of localhost."""
    service = ActiveService(parties.session, parties.engine, deadline_s=300)
    settings = parties.active_settings
    server = start_server(
        service, settings.contract, f"127.0.0.1:{port}", settings.credential_files("active")
    )
    try:
        yield service
    finally:
        server.stop(0).wait()


def run_over_grpc(parties: Parties, port: int) -> None:
    """Let the parties meet over localhost."""
    settings = parties.passive_settings
    with (
        serving(parties, port),
        GrpcPeer(
            PeerConnection(f"127.0.0.1:{port}", settings.contract), settings.reconnect
        ) as peer,
    ):
        parties.run.run(peer)


def in_background(action: Callable[[], None]) -> threading.Thread:
    """Start something beside the test."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread

"""How fast is wide_deep, cut between two processes, beside the same model trained whole in one?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=... python -m benchmarks.wide_deep [--defense marvell]

The criteo example's model, features and rows at batch 1024 in float32, without leak monitor or
adversary. "Whole" is the two halves as one model in a plain PyTorch loop. Every process computes on
one thread: the whole model has one process and so at most one core, the cut one has two processes,
which overlap where neither waits for the other. Two ratios of steps per second therefore stand
side by side:

- by the clock: what a user sees, overlap and waiting included. On a busy machine two processes also
  get twice the share of one, so the ratio is that of the quickest epochs, which were disturbed
  least, and the median stands beside it;
- by CPU time, both processes added up: what it would be if nothing overlapped. Others who load the
  machine hardly change it. The active party goes through its top model backwards twice, once for
  the answer and once to learn while the passive party learns: CPU time that nobody waits for.

An epoch of one and an epoch of the other take turns within one run, a few hundredths of a second
each, so that both see the same load. A step's time is that between two gradients learned from
within an epoch: evaluations do not count. Aim: at least 70 % of the steps per second of the whole
model.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.environment import print_environment, spread
from benchmarks.step import active_process
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.models.factory import build_bottom_model, build_top_model
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.course import Batch
from splitveil.common.settings import read_yaml
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.settings import PassiveSettings
from tests.runs import PassiveRecording, build_parties

EXAMPLE = Path(__file__).parents[1] / "deploy" / "examples" / "criteo"
BATCH = 1024
EPOCHS = 20
WARM_UP_EPOCHS = 2


class Cost(NamedTuple):
    """The cost of one step, as the mean over an epoch."""

    wall_ms: float
    cpu_ms: float
    active_cpu_ms: float = 0.0


class TakingTurns(PassiveRecording):
    """Trains the whole model for an epoch after each epoch of the cut one."""

    def __init__(self, whole: "WholeModel") -> None:
        super().__init__()
        self.split: list[Cost] = []
        self.whole: list[Cost] = []
        self._model = whole
        self._begin = Cost(0.0, 0.0)

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        if batch.step == 0:
            self._begin = _now(_active_cpu_s())
        if not batch.closes_split:
            return
        split = _mean(self._begin, _now(_active_cpu_s()), batch.step)
        whole = self._model.epoch()
        if batch.epoch >= WARM_UP_EPOCHS:
            self.split.append(split)
            self.whole.append(whole)


def _active_cpu_s() -> float:
    (active,) = multiprocessing.active_children()
    if active.pid is None:
        raise RuntimeError("the active party's process did not start")
    # Another process's CPU clock, as clock_getcpuclockid(3) names it: psutil's ticks are too rough.
    return time.clock_gettime((~active.pid << 3) | 2)


def _now(active_cpu_s: float = 0.0) -> Cost:
    return Cost(1e3 * time.perf_counter(), 1e3 * time.process_time(), 1e3 * active_cpu_s)


def _mean(begin: Cost, end: Cost, steps: int) -> Cost:
    return Cost(*((after - before) / steps for before, after in zip(begin, end, strict=True)))


def write_settings(folder: Path) -> None:
    """Write the example's settings, with what this benchmark changes."""
    contract = read_yaml(EXAMPLE / "contract.yaml")
    contract |= {"batch_size": BATCH, "epochs": EPOCHS, "drop_last": True}
    common: dict[str, Any] = {
        "security": {"mode": "insecure"},
        "device": "cpu",
        "torch_threads": 1,
    }
    active = read_yaml(EXAMPLE / "active.yaml") | common
    active |= {"leak_monitor": None, "distributions": None, "insecure_nonce_seed": 1}
    passive = read_yaml(EXAMPLE / "passive.yaml") | common
    passive |= {"adversary": None, "insecure_nonce_seed": 2}
    for name, values in (("contract", contract), ("active", active), ("passive", passive)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


class WholeModel:
    """Both halves as one model, with the rows that it is trained on."""

    def __init__(self, folder: Path) -> None:
        active = load_party_settings(ActiveSettings, folder / "active.yaml")
        passive = load_party_settings(PassiveSettings, folder / "passive.yaml")
        own, other = PartyData.load(active.data, folder), PartyData.load(passive.data, folder)
        order = np.random.default_rng(0).permutation(len(own.ids))
        training = order[: int(0.8 * len(order))]
        own_encoder, encoder = own.fit(training), other.fit(training)
        if own_encoder is None or encoder is None:
            raise TypeError("both parties of the example have features")
        self._own_features = own_encoder.transform(own.table, training)
        self._features = encoder.transform(other.table, training)
        self._labels = own.labels_at(training)
        cut_shape = active.contract.cut_shape
        self._bottom = build_bottom_model(passive.bottom_model, encoder, cut_shape, seed=0)
        self._top = build_top_model(active.top_model, cut_shape, own_encoder, seed=0)
        self._optimizers = (
            build_optimizer(passive.optimizer, self._bottom),
            build_optimizer(active.optimizer, self._top),
        )

    def epoch(self) -> Cost:
        """Train for an epoch; return what a step took that followed another one."""
        batches = torch.split(torch.randperm(len(self._labels)), BATCH)[
            : len(self._labels) // BATCH
        ]
        self._step(batches[0])
        begin = _now()
        for rows in batches[1:]:
            self._step(rows)
        return _mean(begin, _now(), len(batches) - 1)

    def _step(self, rows: Tensor) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        logits = self._top(self._bottom(self._features.rows(rows)), self._own_features.rows(rows))
        loss = binary_cross_entropy_with_logits(logits, self._labels[rows])
        torch.autograd.backward(loss)
        for optimizer in self._optimizers:
            optimizer.step()


def measure(folder: Path, defense: str) -> TakingTurns:
    """Train the cut model and the whole one in turns."""
    turns = TakingTurns(WholeModel(folder))
    parties = build_parties(folder, passive_seen=turns)
    settings = parties.passive_settings
    with (
        active_process(folder, defense) as address,
        GrpcPeer(PeerConnection(address, settings.contract), settings.reconnect) as peer,
    ):
        parties.run.run(peer)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--defense", default="none")
    arguments = parser.parse_args()
    if "SPLITVEIL_DATA" not in os.environ:
        parser.error("SPLITVEIL_DATA names no folder that holds criteo/criteo.tsv.gz")
    torch.set_num_threads(1)
    print_environment("grpcio")
    print(
        f"load average {os.getloadavg()[0]:.1f}, defense {arguments.defense}, batch {BATCH}, one "
        f"thread per process: the cut model has two processes, the whole one has one"
    )
    print("each figure: median (5 % .. 95 %) over epochs")
    turns = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_settings(folder)
        for number in range(arguments.rounds):
            turns.append(measure(folder, arguments.defense))
            print(f"round {number + 1}")
            report(turns[-1].split, turns[-1].whole)
    print("all rounds")
    report([cost for t in turns for cost in t.split], [cost for t in turns for cost in t.whole])


def report(split: Sequence[Cost], whole: Sequence[Cost]) -> None:
    """Print what a step took, and how the two compare epoch by epoch."""
    both_cpu_ms = [cost.cpu_ms + cost.active_cpu_ms for cost in split]
    print(
        f"  ms per step: cut {spread([cost.wall_ms for cost in split])}, "
        f"whole {spread([cost.wall_ms for cost in whole])}"
    )
    print(
        f"  CPU ms per step: cut {spread(both_cpu_ms)}, of which passive party "
        f"{spread([cost.cpu_ms for cost in split])}, active party "
        f"{spread([cost.active_cpu_ms for cost in split])}; "
        f"whole {spread([cost.cpu_ms for cost in whole])}"
    )
    by_clock = [w.wall_ms / s.wall_ms for s, w in zip(split, whole, strict=True)]
    by_cpu = [w.cpu_ms / cpu_ms for cpu_ms, w in zip(both_cpu_ms, whole, strict=True)]
    quickest = min(cost.wall_ms for cost in whole) / min(cost.wall_ms for cost in split)
    print(
        f"  steps/s of the cut model / whole: quickest epochs {quickest:.2f}, all "
        f"{spread(by_clock, 2)} by the clock, {spread(by_cpu, 2)} by CPU time"
    )


if __name__ == "__main__":
    main()

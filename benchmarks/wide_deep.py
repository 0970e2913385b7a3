"""How fast is wide_deep, cut between two processes, beside the same model trained whole in one?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=... python -m benchmarks.wide_deep [--defense marvell]

The criteo example's model, features and rows at batch 1024 in float32, without leak monitor or
adversary. Each process computes on one thread; "whole" is the two halves as one model in a plain
PyTorch loop with one thread, and with two for comparison, as two processes use two cores. Rounds
alternate. A step's time is that between two gradients learned from within an epoch, so that
evaluations do not count. Aim: at least 70 % of the steps per second of the whole model.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from active_party.settings import ActiveSettings
from benchmarks.environment import print_environment, spread
from benchmarks.step import active_process
from common.models.factory import build_bottom_model, build_top_model
from common.models.optimizers import build_optimizer
from common.party_data import PartyData
from common.party_settings import load_party_settings
from common.run_course import Batch
from common.settings import read_yaml
from passive_party.grpc_peer import GrpcPeer
from passive_party.settings import PassiveSettings
from tests.runs import PassiveRecording, build_parties

EXAMPLE = Path(__file__).parents[1] / "deploy" / "examples" / "criteo"
BATCH = 1024
EPOCHS = 20
WARM_UP_EPOCHS = 2


class StepTimes(PassiveRecording):
    """Keeps how long each step took that followed another one of its epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.step_ms: list[float] = []
        self._last = 0.0

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.stepped(batch.epoch, batch.step)

    def stepped(self, epoch: int, step: int) -> None:
        now = time.perf_counter()
        if step > 0 and epoch >= WARM_UP_EPOCHS:
            self.step_ms.append(1e3 * (now - self._last))
        self._last = now


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


def in_two_processes(folder: Path, defense: str) -> list[float]:
    torch.set_num_threads(1)
    parties = build_parties(folder)
    times = StepTimes()
    parties.run._observer = times  # noqa: SLF001
    settings = parties.passive_settings
    with (
        active_process(folder, defense) as address,
        GrpcPeer(address, settings.contract, settings.reconnect) as peer,
    ):
        parties.run.run(peer)
    return times.step_ms


def whole(folder: Path, threads: int) -> list[float]:
    torch.set_num_threads(threads)
    active = load_party_settings(ActiveSettings, folder / "active.yaml")
    passive = load_party_settings(PassiveSettings, folder / "passive.yaml")
    own, other = PartyData.load(active.data, folder), PartyData.load(passive.data, folder)
    order = np.random.default_rng(0).permutation(len(own.ids))
    training = order[: int(0.8 * len(order))]
    own_encoder, encoder = own.fit(training), other.fit(training)
    if own_encoder is None or encoder is None:
        raise TypeError("both parties of the example have features")
    own_features = own_encoder.transform(own.table, training)
    features = encoder.transform(other.table, training)
    labels = own.labels_at(training)
    cut_shape = active.contract.cut_shape
    bottom = build_bottom_model(passive.bottom_model, encoder, cut_shape, seed=0)
    top = build_top_model(active.top_model, cut_shape, own_encoder, seed=0)
    optimizers = (
        build_optimizer(passive.optimizer, bottom),
        build_optimizer(active.optimizer, top),
    )
    times = StepTimes()
    for epoch in range(EPOCHS):
        for step, rows in enumerate(torch.split(torch.randperm(len(training)), BATCH)):
            if len(rows) < BATCH:
                continue
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            logits = top(bottom(features.rows(rows)), own_features.rows(rows))
            loss = binary_cross_entropy_with_logits(logits, labels[rows])
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            times.stepped(epoch, step)
    return times.step_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--defense", default="none")
    arguments = parser.parse_args()
    if "SPLITVEIL_DATA" not in os.environ:
        parser.error("SPLITVEIL_DATA names no folder that holds criteo/criteo.tsv.gz")
    torch.set_num_threads(1)
    print_environment("grpcio")
    print(f"load average {os.getloadavg()[0]:.1f}, defense {arguments.defense}, batch {BATCH}")
    print("step time in ms: median (5 % .. 95 %)")
    ratios: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_settings(folder)
        for number in range(arguments.rounds):
            split = in_two_processes(folder, arguments.defense)
            line = f"round {number + 1}: two processes {spread(split)}"
            for threads, found in ratios.items():
                one = whole(folder, threads)
                found.append(statistics.median(one) / statistics.median(split))
                line += f"; whole, {threads} threads, {spread(one)}: ratio {found[-1]:.2f}"
            print(line, flush=True)
    for threads, found in ratios.items():
        rate = statistics.median(found)
        print(f"steps/s of two processes / whole with {threads} threads: median {rate:.2f}")


if __name__ == "__main__":
    main()

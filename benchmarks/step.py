"""What does a training step through localhost gRPC cost more than the same step in one process?

    OMP_NUM_THREADS=1 python -m benchmarks.step [--tls]

Both run the same settings on the same synthetic rows, batch 1024 and cut 128 in float32, without
leak monitor or adversary; rounds of the two alternate. The time of a step is that between two
gradients learned from, as the passive party sees it. Aim: a difference of at most 2 ms, and of at
most 2.9 ms with --tls, which adds mutual TLS.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from benchmarks.environment import free_port, print_environment, spread
from splitveil.common.models.device import use_device
from splitveil.common.party.credentials import credential_files
from splitveil.common.run.course import Batch
from splitveil.common.wire.connection import PeerConnection
from splitveil.deploy.authority import make_certificates
from splitveil.experiments.preparation import write_columns
from splitveil.passive_party.grpc_peer import GrpcPeer
from tests.support.certificates import NAMES, use
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, build_parties, run_in_process
from tests.support.simulation import PassiveRecording, serving

CPU = torch.device("cpu")
WARM_UP_STEPS = 20


class StepTimes(PassiveRecording):
    """Takes the time of every step, from the one before in the same epoch."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._all_ms: list[float] = []
        self._before = 0.0

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        now = self._clock()
        if batch.step:
            self._all_ms.append(1e3 * (now - self._before))
        self._before = now

    def step_ms(self) -> list[float]:
        """Return the times of the steps, the first ones left out."""
        return self._all_ms[WARM_UP_STEPS:]


def write_example(folder: Path, steps: int, batch: int, cut: int, width: int) -> None:
    """Write synthetic rows and settings for both parties."""
    rows = batch * (steps + 1) * 10 // 9
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 64)).astype(np.float32)
    ids = np.array([f"{i:09d}" for i in range(rows)])
    label = (x[:, 0] + generator.normal(size=rows) > 1).astype(np.int64)
    write_columns(folder / "active.parquet", id=ids, label=label)
    write_columns(folder / "passive.parquet", id=ids, x=x)
    contract = CONTRACT | {
        "cut_shape": [cut],
        "batch_size": batch,
        "evaluation_batch_size": batch,
        "epochs": 1,
        "split": {"train": 0.9, "test": 0.1},
    }
    source = {"kind": "parquet", "path": "active.parquet"}
    active = ACTIVE | {
        "data": {"source": source, "id_column": "id", "label_column": "label"},
        "top_model": {"kind": "mlp", "hidden": [width]},
    }
    passive = PASSIVE | {
        "data": {
            "source": {"kind": "parquet", "path": "passive.parquet"},
            "id_column": "id",
            "features": {"numeric": "x*"},
        },
        "bottom_model": {"kind": "mlp", "hidden": [width]},
        "adversary": None,
    }
    write_parties(folder, contract, active, passive)


def write_parties(folder: Path, *settings: Any) -> None:
    """Write the contract, and the settings of the active and the passive party."""
    for name, values in zip(("contract", "active", "passive"), settings, strict=True):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def serve(folder: Path, port: int, defense: str, device: torch.device) -> None:
    torch.set_num_threads(1)
    use_device(str(device))
    parties = build_parties(folder, [f"defense={{name: {defense}}}"], device=device)
    parties.active.on_step = lambda batch, result: None  # type: ignore[method-assign]
    with serving(parties.simulation().active, f"127.0.0.1:{port}"):
        parties.session.wait_for_farewell(610)


@contextmanager
def active_process(folder: Path, defense: str, device: torch.device) -> Iterator[str]:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(folder, port, defense, device)
    )
    process.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.join(30)
        process.kill()


def over_grpc(folder: Path, defense: str, device: torch.device = CPU) -> list[float]:
    """Train in two processes, and return the milliseconds of the steps."""
    times = StepTimes()
    parties = build_parties(folder, passive_seen=times, device=device)
    settings = parties.passive_settings
    credentials = credential_files(settings, settings.party)
    with active_process(folder, defense, device) as address:
        connection = PeerConnection(address, settings.contract, credentials=credentials)
        with GrpcPeer(connection, settings.reconnect) as peer:
            parties.run.run(peer)
    return times.step_ms()


def in_one_process(folder: Path) -> list[float]:
    times = StepTimes()
    parties = build_parties(folder, ["defense={name: none}"], passive_seen=times)
    parties.active.on_step = lambda batch, result: None  # type: ignore[method-assign]
    run_in_process(parties)
    return times.step_ms()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true", help="with mutual TLS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_environment("grpcio", "protobuf")
    wire = "gRPC over mutual TLS" if arguments.tls else "gRPC"
    print("step time in ms at (1024, 128) float32: median (5 % .. 95 %)")
    differences = []
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_example(folder, steps=200, batch=1024, cut=128, width=256)
        if arguments.tls:
            make_certificates(folder / "certificates", NAMES)
            use(folder / "certificates", folder)
        for number in range(arguments.rounds):
            here, there = in_one_process(folder), over_grpc(folder, "none")
            differences.append(statistics.median(there) - statistics.median(here))
            print(
                f"round {number + 1}: one process {spread(here)}, two processes over "
                f"{wire} {spread(there)}, difference {differences[-1]:+.3f}"
            )
    print(f"median difference over the rounds: {statistics.median(differences):+.3f} ms")


if __name__ == "__main__":
    main()

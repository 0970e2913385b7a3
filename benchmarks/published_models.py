"""How fast do the published models train, and what does a step spend its time on?

    OMP_NUM_THREADS=1 python -m benchmarks.published_models [--device cuda]

``conv`` at ISIC's shape (84 x 84 x 3, cut 64 x 5 x 5, batch 128) and ``wide_deep`` at Criteo's (13
numbers, 26 columns of categories, cut 128, batches of 1024 and 32768), both halves on one device,
``marvell`` before each answer, two processes that talk gRPC over localhost. The rows are drawn at
random: what they say does not matter to the speed. Marvell's authors needed .39, 4.84 and 6.22 s
per update on a GTX 1080 Ti (Li et al., ICLR 2022, Table 1).

Epochs of two kinds take turns. In the first kind nothing is measured but the clock, and on a GPU
how busy ``nvidia-smi`` finds it. In the second both parties wait for the device before and after
each part of a step, so that what it did is counted where it was asked for:

- bottom model: forward, backward and optimiser;
- top model: loss and gradient at the cut layer;
- defense;
- transport: what is left of the passive party's waiting, which is encoding, gRPC and decoding, the
  tensors' way from device to host and back, and the rules of the protocol;
- the top model learns after it has answered, while the passive party learns, too. That part stands
  apart: nobody waits for it unless it takes longer than the bottom model, and then it is part of
  what is called transport here.
"""

import argparse
import multiprocessing
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from benchmarks.environment import print_environment, spread
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.run.course import Batch
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.passive_party.grpc_peer import GrpcPeer
from tests.runs import ACTIVE, CONTRACT, PASSIVE, PassiveRecording, build_parties, serving

WARM_UP_EPOCHS = 2
CATEGORY_COUNTS = np.geomspace(4, 50_000, 26).astype(int)
BOTTOM, TOP, DEFENSE, LEARNING = "bottom model", "top model", "defense", "top model learns"


class Shape(NamedTuple):
    """The model and data that are trained, and the batch size."""

    model: str
    batch: int
    steps: int  # per epoch
    epochs: int  # of each kind, after those that warm up


SHAPES = (
    Shape("conv", 128, 6, 3),
    Shape("wide_deep", 1024, 30, 5),
    Shape("wide_deep", 32768, 5, 3),
)


class Shares:
    """Adds up what parts of a step take; silent while ``is_on`` is false."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self.spent_s: dict[str, float] = defaultdict(float)
        self._device = device

    def time(self, owner: object, method: str, part: str) -> None:
        """Let every call of a method count."""
        call: Callable[..., Any] = getattr(owner, method)

        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.is_on:
                return call(*arguments, **named)
            begin = self._now()
            result = call(*arguments, **named)
            self.spent_s[part] += self._now() - begin
            return result

        setattr(owner, method, timed)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Epochs(PassiveRecording):
    """Times whole epochs, and asks both parties for their shares in every second one."""

    def __init__(self, shares: Shares, active: Connection) -> None:
        super().__init__()
        self.step_ms: list[float] = []
        self.parts_ms: dict[str, float] = defaultdict(float)
        self.measured: list[tuple[float, float]] = []  # clock times of epochs of the first kind
        self._shares = shares
        self._active = active
        self._begin = 0.0

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        is_second_kind = batch.epoch % 2 == 1
        if batch.step == 0:  # the first step of an epoch is not measured
            self._shares.spent_s.clear()
            self._shares.is_on = is_second_kind
            self._active.send(is_second_kind)
            self._active.recv()
            self._begin = time.perf_counter()
        if not batch.closes_split:
            return
        now = time.perf_counter()
        step_ms = 1e3 * (now - self._begin) / batch.step
        self._shares.is_on = False
        self._active.send(False)
        spent_s = self._shares.spent_s | self._active.recv()
        if batch.epoch < WARM_UP_EPOCHS:
            return
        if not is_second_kind:
            self.step_ms.append(step_ms)
            self.measured.append((self._begin, now))
            return
        self.parts_ms["step"] += step_ms
        for part, seconds in spent_s.items():
            self.parts_ms[part] += 1e3 * seconds / batch.step


def write_settings(folder: Path, shape: Shape) -> None:
    """Write random rows and both parties' settings."""
    rows = shape.batch * (shape.steps + 1) * 10 // 9
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "id": np.array([f"{i:09d}" for i in range(rows)]),
        "label": (generator.random(rows) < 0.2).astype(np.int64),
    }
    halves: dict[str, dict[str, Any]]
    if shape.model == "conv":
        cut_shape = [64, 5, 5]
        arrays["image"] = generator.integers(0, 256, (rows, 84, 84, 3), dtype=np.uint8)
        features: dict[str, Any] | None = {"image": {"array": "image"}}
        own = None
        halves = {
            "bottom": {"kind": "conv", "channels": [64] * 4},
            "top": {"kind": "conv", "channels": [64] * 2, "hidden": [64]},
        }
    else:
        cut_shape = [128]
        arrays["I"] = generator.random((rows, 13), dtype=np.float32)
        for number, count in enumerate(CATEGORY_COUNTS, start=1):
            # The square of a uniform number: some categories are frequent, most are rare.
            arrays[f"C{number}"] = (count * generator.random(rows) ** 2).astype(np.int64)
        own = features = {"numeric": "I*", "categorical": "C*"}
        halves = {
            "bottom": {"kind": "wide_deep", "hidden": [128] * 3, "embedding_dim": 4},
            "top": {"kind": "wide_deep", "hidden": [128] * 3},
        }
    np.savez(folder / "rows.npz", **arrays)
    data = {"source": {"kind": "npz", "path": "rows.npz"}, "id_column": "id"}
    contract = CONTRACT | {
        "cut_shape": cut_shape,
        "batch_size": shape.batch,
        "evaluation_batch_size": shape.batch,
        "epochs": WARM_UP_EPOCHS + 2 * shape.epochs,
        "drop_last": True,
        "split": {"kind": "hash", "train": 0.9, "test": 0.1},
    }
    active = ACTIVE | {
        "data": data | {"label_column": "label"} | ({"features": own} if own else {}),
        "top_model": halves["top"],
        "defense": {"name": "marvell"},
    }
    passive = PASSIVE | {
        "data": data | {"features": features},
        "bottom_model": halves["bottom"],
        "adversary": None,
    }
    for name, values in (("contract", contract), ("active", active), ("passive", passive)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def serve(folder: Path, port: int, device_name: str, orders: Connection) -> None:
    """Be the active party, and measure when the passive party's process says so."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    shares = Shares(device)
    shares.time(TopTrainer, "gradient", TOP)
    shares.time(TopTrainer, "learn", LEARNING)
    shares.time(TopTrainer, "_defend", DEFENSE)
    parties = build_parties(folder, device=device)
    parties.active.on_step = lambda batch, result: None  # type: ignore[method-assign]

    def obey() -> None:
        while True:
            try:
                shares.is_on = orders.recv()
            except EOFError:
                return
            orders.send(dict(shares.spent_s))
            shares.spent_s.clear()

    threading.Thread(target=obey, daemon=True).start()
    with serving(parties, port):
        parties.session.wait(600)
        parties.session.wait_for_farewell(10)


def measure(folder: Path, device: torch.device) -> Epochs:
    """Train one shape."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    shares = Shares(device)
    for method in ("rows", "forward", "backward"):
        shares.time(BottomTrainer, method, BOTTOM)
    epochs = Epochs(shares, here)
    parties = build_parties(folder, device=device, passive_seen=epochs)
    settings = parties.passive_settings
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    active = context.Process(target=serve, args=(folder, port, device.type, there))
    active.start()
    try:
        with GrpcPeer(
            PeerConnection(f"127.0.0.1:{port}", settings.contract), settings.reconnect
        ) as peer:
            parties.run.run(peer)
    finally:
        active.join(30)
        active.kill()
    return epochs


@contextmanager
def utilisation(device: torch.device) -> Iterator[list[tuple[float, float]]]:
    """Collect (clock time, per cent) of how busy the GPU is, five times a second."""
    seen: list[tuple[float, float]] = []
    command = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if command is None:
        yield seen
        return
    query = [command, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            seen.extend((time.perf_counter(), float(line)) for line in process.stdout or ())

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield seen
        finally:
            process.terminate()
            reader.join()


def report(shape: Shape, epochs: Epochs, busy: list[tuple[float, float]]) -> None:
    """Print what a step took, and on what."""
    print(f"{shape.model}, batch {shape.batch}")
    steps_per_s = [1e3 / step_ms for step_ms in epochs.step_ms]
    print(f"  steps/s {spread(steps_per_s, 2)}, ms per step {spread(epochs.step_ms, 2)}")
    during = [percent for at, percent in busy if any(a <= at <= b for a, b in epochs.measured)]
    if during:
        print(f"  GPU busy {np.mean(during):.0f} % of the time, {len(during)} samples")
    parts = epochs.parts_ms
    inside = parts[TOP] - parts[DEFENSE]
    waited = parts["step"] - parts[BOTTOM] - parts[TOP]
    print(
        "  of a step: "
        + ", ".join(
            f"{name} {part / parts['step']:.1%}"
            for name, part in (
                (BOTTOM, parts[BOTTOM]),
                (TOP, inside),
                (DEFENSE, parts[DEFENSE]),
                ("transport", waited),
            )
        )
        + f"; beside it, {LEARNING} {parts[LEARNING] / parts['step']:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", choices=("conv", "wide_deep"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    print_environment("grpcio")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))
    print("each figure: median (5 % .. 95 %) over epochs")
    for shape in SHAPES:
        if arguments.only in (None, shape.model):
            with tempfile.TemporaryDirectory() as name:
                write_settings(Path(name), shape)
                with utilisation(device) as busy:
                    epochs = measure(Path(name), device)
                report(shape, epochs, busy)


if __name__ == "__main__":
    main()

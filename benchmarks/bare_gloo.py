"""The marks of `benchmarks.whole_run`: its model in one process, and in two over bare sockets.

    python -m benchmarks.bare_gloo --mark gloo --rank 0 --address HOST:PORT

A split MLP FEATURES-256-128 | 128-64-1 on synthetic rows, batch 1,024, Adam: in one process
(`monolithic`), and in two with `torch.distributed`'s gloo between them (`gloo`): no messages, no
encryption, no defense, no files. The command runs one process of a mark; rank 1 has the labels and
listens. It prints what whole epochs after the first took, as JSON.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import binary_cross_entropy_with_logits

CUT, BATCH = 128, 1024
PROCESSES = {"monolithic": 1, "gloo": 2}


class Work(NamedTuple):
    """The table and the length of a run."""

    rows: int = 67_000
    features: int = 64
    epochs: int = 20

    @property
    def training(self) -> int:
        return self.rows * 9 // 10

    @property
    def options(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self._asdict().items()]


class Timed(NamedTuple):
    """What whole epochs after the first took a process."""

    steps: int
    wall_s: float
    cpu_s: float
    memory_mib: float
    """The largest resident set of the process."""


def halves(features: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    bottom = nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, CUT), nn.ReLU())
    return bottom, nn.Sequential(nn.Linear(CUT, 64), nn.ReLU(), nn.Linear(64, 1))


def table(work: Work) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.rows, work.features, generator=generator)
    return x, (x[:, 0] + torch.randn(work.rows, generator=generator) > 1).float()


def batches(work: Work, epoch: int) -> tuple[Tensor, ...]:
    """Return the rows of each batch of an epoch; both processes draw the same order."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.split(torch.randperm(work.training, generator=generator), BATCH)


def timed(work: Work, epoch: Callable[[int], None]) -> Timed:
    epoch(0)
    wall, cpu = time.perf_counter(), time.process_time()
    for number in range(1, work.epochs):
        epoch(number)
    steps = -(-work.training // BATCH) * (work.epochs - 1)
    return Timed(
        steps, time.perf_counter() - wall, time.process_time() - cpu, status_mib("self", "VmHWM")
    )


def loss_of(logits: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = binary_cross_entropy_with_logits(logits[:, 0], labels)
    loss.backward()  # type: ignore[no-untyped-call]


def monolithic(work: Work) -> Timed:
    model = nn.Sequential(*halves(work.features))
    optimizer = torch.optim.Adam(model.parameters())
    x, labels = table(work)

    def epoch(number: int) -> None:
        for rows in batches(work, number):
            loss_of(model(x[rows]), labels[rows], optimizer)
            optimizer.step()
        with torch.no_grad():
            model(x[work.training :])

    return timed(work, epoch)


def gloo(work: Work, rank: int, address: str) -> Timed:
    """Train one half; rank 0 is the passive party, and rank 1 listens."""
    host, port = address.rsplit(":", 1)
    store = TCPStore(host, int(port), 2, is_master=rank == 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    half = halves(work.features)[rank]
    optimizer = torch.optim.Adam(half.parameters())
    x, labels = table(work)
    part = partial(active_epoch, values=labels) if rank else partial(passive_epoch, values=x)
    taken = timed(work, partial(part, work, half, optimizer))
    # Rank 1 has the store, and must not be gone before rank 0 is done with it.
    dist.barrier()
    dist.destroy_process_group()
    return taken


def passive_epoch(
    work: Work, half: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, values: Tensor
) -> None:
    for rows in batches(work, number):
        activation = half(values[rows])
        dist.send(activation.detach(), 1)
        gradient = torch.empty_like(activation)
        dist.recv(gradient, 1)
        optimizer.zero_grad()
        activation.backward(gradient)
        optimizer.step()
    with torch.no_grad():
        dist.send(half(values[work.training :]), 1)


def active_epoch(
    work: Work, half: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, values: Tensor
) -> None:
    for rows in batches(work, number):
        cut = torch.empty(len(rows), CUT)
        dist.recv(cut, 0)
        loss_of(half(cut.requires_grad_()), values[rows], optimizer)
        dist.send(cut.grad if cut.grad is not None else cut * 0, 0)
        optimizer.step()
    held_out = torch.empty(work.rows - work.training, CUT)
    dist.recv(held_out, 0)
    with torch.no_grad():
        half(held_out)


def cost_of_mark(name: str, work: Work) -> list[Timed]:
    """Run a mark's processes, and return what each of them took, rank by rank."""
    # Programs of their own, because a forked or spawned one would import this one's modules.
    call = [sys.executable, "-m", "benchmarks.bare_gloo", "--mark", name, *work.options]
    call += ["--address", f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen([*call, f"--rank={rank}"], stdout=subprocess.PIPE)
        for rank in range(PROCESSES[name])
    ]
    return [Timed(**json.loads(process.communicate()[0])) for process in started]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def status_mib(process: int | str, field: str) -> float:
    """Return a field of a process's status, such as its resident set; 0 if it is gone.

    Not ru_maxrss: Linux carries the parent's peak over into a new program.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table and of the length of a run."""
    for name, value in Work()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)


def work_of(given: Any) -> Work:
    return Work(given.rows, given.features, given.epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mark", choices=PROCESSES, default="monolithic")
    parser.add_argument("--rank", type=int, choices=(0, 1), default=0)
    parser.add_argument("--address", help="HOST:PORT of rank 1, for gloo")
    add_work(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = work_of(given)
    taken = (
        monolithic(work) if given.mark == "monolithic" else gloo(work, given.rank, given.address)
    )
    print(json.dumps(taken._asdict()))


if __name__ == "__main__":
    main()

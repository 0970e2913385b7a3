"""The marks to beat: the workload in one process, and in two that only send and receive.

    python -m benchmarks.bare_gloo --rank 0 --address HOST:PORT [--ahead 3] [--dtype bfloat16]

`benchmarks.whole_run` and `benchmarks.slow_line` train a split MLP 64-256-128 | 128-64-1 on 67,000
synthetic rows, batch 1,024, Adam. Here is the same model in one process (`monolithic`) and in two
with `torch.distributed`'s gloo between them (`gloo`): no messages, no encryption, no defense, no
files. gloo sends a tensor only when its receiver asks for it, so that sending ahead hides the
computation on a slow line but not the round trip. The command runs one of the two; rank 1, which
has the labels and listens, prints the seconds of a step.
"""

import argparse
import json
import socket
import statistics
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
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.processes import most_mib

ROWS, FEATURES, CUT, BATCH, EPOCHS = 67_000, 64, 128, 1024, 20
TRAINING = ROWS * 9 // 10
STEPS = -(-TRAINING // BATCH)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Timed(NamedTuple):
    """What whole epochs after the first took."""

    wall_s: float
    cpu_s: float
    step_s: float
    """Median over the epochs, from the first step's end to the last one's."""
    memory_mib: float = 0.0
    """The largest resident set of the process."""


class Line(NamedTuple):
    """What two processes send to each other, and where."""

    address: str
    """``HOST:PORT`` of rank 1."""
    ahead: int = 0
    """Batches that rank 0 sends before it has the oldest one's gradient."""
    dtype: torch.dtype = torch.float32

    def send(self, values: Tensor, to: int) -> Any:
        # Bytes, because gloo does not know every dtype.
        return dist.isend(values.detach().to(self.dtype).contiguous().view(torch.uint8), to)

    def receive(self, rows: int, sender: int) -> Tensor:
        values = torch.empty(rows, CUT, dtype=self.dtype)
        dist.recv(values.view(torch.uint8), sender)
        return values.float()


def halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    bottom = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CUT), nn.ReLU())
    return bottom, nn.Sequential(nn.Linear(CUT, 64), nn.ReLU(), nn.Linear(64, 1))


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, (x[:, 0] + torch.randn(ROWS, generator=generator) > 1).float()


def batches(epoch: int) -> tuple[Tensor, ...]:
    """Return the rows of each batch of an epoch; both processes draw the same order."""
    generator = torch.Generator().manual_seed(epoch)
    return torch.split(torch.randperm(TRAINING, generator=generator), BATCH)


Epoch = Callable[[int], list[float]]
"""Runs the epoch of a number, and returns the moments at which its steps ended."""


def timed(epoch: Epoch, epochs: int) -> Timed:
    epoch(0)
    wall, cpu = time.perf_counter(), time.process_time()
    moments = [epoch(number) for number in range(1, epochs)]
    steps = [(of[-1] - of[0]) / (len(of) - 1) for of in moments]
    return Timed(time.perf_counter() - wall, time.process_time() - cpu, statistics.median(steps))


def monolithic() -> Timed:
    model = nn.Sequential(*halves())
    optimizer = torch.optim.Adam(model.parameters())
    x, labels = table()

    def epoch(number: int) -> list[float]:
        moments = []
        for rows in batches(number):
            loss = binary_cross_entropy_with_logits(model(x[rows])[:, 0], labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            moments.append(time.perf_counter())
        with torch.no_grad():
            model(x[TRAINING:])
        return moments

    return timed(epoch, EPOCHS)


def gloo(rank: int, line: Line, epochs: int = EPOCHS) -> Timed:
    """Train one half; rank 0 is the passive party, and rank 1 listens."""
    host, port = line.address.rsplit(":", 1)
    store = TCPStore(host, int(port), 2, is_master=rank == 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    half = halves()[rank]
    optimizer = torch.optim.Adam(half.parameters())
    x, labels = table()
    if rank:
        taken = timed(partial(gloo_active, half, optimizer, labels, line), epochs)
    else:
        taken = timed(partial(gloo_passive, half, optimizer, x, line), epochs)
    # Rank 1 has the store, and must not be gone before rank 0 is done with it.
    dist.barrier()
    dist.destroy_process_group()
    return taken


class Sent(NamedTuple):
    """A batch whose gradient is awaited."""

    activation: Tensor
    sending: Any
    weights: dict[str, Tensor]


def gloo_passive(
    half: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, line: Line, number: int
) -> list[float]:
    moments: list[float] = []
    under_way: list[Sent] = []

    def learn() -> None:
        gloo_learn(half, optimizer, under_way.pop(0), line)
        moments.append(time.perf_counter())

    for rows in batches(number):
        weights: dict[str, Tensor] = dict(half.named_parameters())
        if line.ahead:  # the weights change before this batch's gradient is here
            weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        activation = functional_call(half, weights, x[rows])
        # A send returns when it was received; the peer may still be sending a gradient itself.
        under_way.append(Sent(activation, line.send(activation, 1), weights))
        if len(under_way) > line.ahead:
            learn()
    while under_way:
        learn()
    with torch.no_grad():
        line.send(half(x[TRAINING:]), 1).wait()
    return moments


def gloo_learn(half: nn.Module, optimizer: torch.optim.Optimizer, sent: Sent, line: Line) -> None:
    gradient = line.receive(len(sent.activation), 1)
    sent.sending.wait()
    optimizer.zero_grad()
    sent.activation.backward(gradient)  # type: ignore[no-untyped-call]
    for name, parameter in half.named_parameters():
        parameter.grad = sent.weights[name].grad
    optimizer.step()


def gloo_active(
    half: nn.Module, optimizer: torch.optim.Optimizer, labels: Tensor, line: Line, number: int
) -> list[float]:
    moments = []
    under_way: list[Any] = []
    for rows in batches(number):
        cut = line.receive(len(rows), 0).requires_grad_()
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(half(cut)[:, 0], labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        under_way.append(line.send(cut.grad if cut.grad is not None else cut * 0, 0))
        if len(under_way) > line.ahead:
            under_way.pop(0).wait()
        optimizer.step()
        moments.append(time.perf_counter())
    for sending in under_way:
        sending.wait()
    held_out = line.receive(ROWS - TRAINING, 0)
    with torch.no_grad():
        half(held_out)
    return moments


Mark = Callable[[int, str], Timed]
MARKS: dict[str, tuple[Mark, int]] = {
    "monolithic": (lambda _rank, _address: monolithic(), 1),
    "gloo": (lambda rank, address: gloo(rank, Line(address)), 2),
    "gloo ahead": (lambda rank, address: gloo(rank, Line(address, ahead=1)), 2),
}


def cost_of_mark(name: str) -> list[Timed]:
    """Run a mark's processes, and return what each of them took, rank by rank."""
    # Programs of their own, because a forked or spawned one would import this one's modules.
    call = [sys.executable, "-m", "benchmarks.bare_gloo", "--mark", name]
    call += ["--address", f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen([*call, "--rank", str(rank)], stdout=subprocess.PIPE)
        for rank in range(MARKS[name][1])
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    return [Timed(**json.loads(text)) for text in printed]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, choices=(0, 1), required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of rank 1")
    parser.add_argument("--mark", choices=MARKS, help="print all figures of a process of this mark")
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--write", type=Path, help="file that rank 1 writes the figure to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.mark is not None:
        taken = MARKS[given.mark][0](given.rank, given.address)
        print(json.dumps(taken._replace(memory_mib=most_mib())._asdict()))
        return
    taken = gloo(given.rank, Line(given.address, given.ahead, DTYPES[given.dtype]), given.epochs)
    if given.rank and given.write is not None:
        given.write.write_text(str(taken.step_s))
    elif given.rank:
        print(taken.step_s)


if __name__ == "__main__":
    main()

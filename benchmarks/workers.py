"""How much faster does a party train a compute-bound model with two processes than with one?

    OMP_NUM_THREADS=1 python -m benchmarks.workers [--processes 2] [--batch 128]

The model is the published bottom half of `conv`, for images of 84 x 84, and a step is what the
passive party does for one: forward, backward, optimizer. Each process computes on one thread. Steps
by one process and steps by all alternate within the same run, so that a machine that is shared
slows both down; by the clock they say little on cores that are busy otherwise. CPU time says what
spreading costs in addition. Aim: two processes on two idle cores are at least 1.6 times as fast.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.environment import print_environment, spread
from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.settings import AdamOptimizer, ConvModel
from splitveil.common.models.spread_model import RowForm, SpreadModel
from splitveil.common.models.worker import Replica, Worker
from splitveil.common.models.worker_line import WorkerLine
from splitveil.simulation import free_address

CPU = torch.device("cpu")
CUT = (64, 5, 5)
SHAPES = FeatureShapes(0, (), (3, 84, 84), "uint8")


def build() -> nn.Module:
    """Return the bottom model, with the same weights in every process."""
    settings = ConvModel(kind="conv", channels=(64, 64, 64, 64))
    return build_bottom_model(settings, SHAPES, CUT, seed=0)


class Spent(NamedTuple):
    """The time of one step, in milliseconds."""

    clock: float
    cpu: float
    """Of rank 0."""


def step(compute: Callable[[Features], Tensor], optimizer: Any, images: Tensor) -> Spent:
    """Train on one batch, as if each output's gradient were its value."""
    clock, cpu = time.perf_counter(), time.process_time()
    output = compute(Features(image=images))
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(output, output.detach())
    optimizer.step()
    return Spent(1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - cpu))


def work(rank: int, size: int) -> None:
    """Be a worker until rank 0 ends."""
    torch.set_num_threads(1)
    line = WorkerLine.join(rank, size)
    worker = Worker(line, lambda _: Replica(build(), RowForm(None, SHAPES), CPU))
    begun = time.process_time()
    worker.work()
    line.send(torch.tensor(1e3 * (time.process_time() - begun)), 0).wait()


class Times(NamedTuple):
    """The times of all steps but the first."""

    alone: list[Spent]
    together: list[Spent]
    worker_cpu: float
    """CPU milliseconds of the busiest worker for each step."""


def measure(processes: int, batch: int, rounds: int) -> Times:
    """Return the times of steps by this process alone, and of steps by all, in turn."""
    model = build()
    optimizer = build_optimizer(AdamOptimizer(kind="adam"), model)
    images = torch.randint(0, 256, (batch, 3, 84, 84), dtype=torch.uint8)
    line = WorkerLine.join(0, processes)
    line.begin({})
    spread_model = SpreadModel(model, line)
    alone, together = [], []
    for _ in range(rounds + 1):
        alone.append(step(model, optimizer, images))
        together.append(step(spread_model, optimizer, images))
    line.close()
    spent = [float(line.receive(torch.zeros(()), worker)) for worker in line.workers]
    return Times(alone[1:], together[1:], max(spent) / (rounds + 1))


def main() -> None:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    print_environment()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = free_address().rsplit(":", 1)
    context = multiprocessing.get_context("spawn")
    ranks = range(1, parsed.processes)
    workers = [context.Process(target=work, args=(rank, parsed.processes)) for rank in ranks]
    for worker in workers:
        worker.start()
    alone, together, worker_cpu = measure(parsed.processes, parsed.batch, parsed.rounds)
    for worker in workers:
        worker.join()
    for name, found in (("one process", alone), (f"{parsed.processes} processes", together)):
        clock = spread([one.clock for one in found], 0)
        print(
            f"{name}: {clock} ms a step, {spread([one.cpu for one in found], 0)} ms CPU at rank 0"
        )
    ratios = [one.clock / other.clock for one, other in zip(alone, together, strict=True)]
    print(f"faster by {spread(ratios, 2)}; the best of each: {best(alone) / best(together):.2f}")
    cpu = max(worker_cpu, statistics.median(one.cpu for one in together))
    own = statistics.median(one.cpu for one in alone)
    print(f"CPU of the busiest process: {cpu:.0f} ms a step, {own / cpu:.2f} times less than alone")


def best(found: list[Spent]) -> float:
    """Return the shortest time by the clock, which a busy machine disturbs least."""
    return min(one.clock for one in found)


if __name__ == "__main__":
    main()

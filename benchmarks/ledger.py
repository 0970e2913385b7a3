"""What does the leak ledger cost a training step, at ten million aligned rows?

    OMP_NUM_THREADS=1 python -m benchmarks.ledger

The time of ``after`` and ``charge`` for one batch of random positions, as a step asks for them, and
that of an epoch's bounds, by the number of steps of the epoch. Aim: together at most 1 % of a step
of the same shape between two processes (`python -m benchmarks.step`).
"""

import argparse
import time

import numpy as np
import torch

from benchmarks.environment import print_environment, spread
from splitveil.active_party.defenses import LeakCharge
from splitveil.active_party.ledger.ledger import LeakLedger, logged
from splitveil.active_party.ledger.limit import Limit
from splitveil.common.privacy.covers import Covers
from splitveil.common.storage.answer_log import ChargedAnswer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--train-share", type=float, default=0.8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_environment()
    print(f"{arguments.rows} aligned rows, batch {arguments.batch}: median (5 % .. 95 %)")
    training = np.sort(
        np.random.default_rng(1).permutation(arguments.rows)[
            : int(arguments.train_share * arguments.rows)
        ]
    )
    for name, charge in (
        ("fresh noise", logged(LeakCharge(0.0625))),
        ("persistent noise", logged(LeakCharge(0.0625, "identity", 1.0))),
    ):
        ledger = LeakLedger(arguments.rows)
        step_us = time_steps(ledger, charge, training, arguments.batch, arguments.steps)
        print(f"{name}: after and charge {spread(step_us, 1)} us per step")
        bounds_s = time_bounds(ledger, training)
        per_step_us = [1e6 * seconds * arguments.batch / len(training) for seconds in bounds_s]
        print(f"{name}: bounds {spread(bounds_s, 2)} s per epoch")
        print(f"{name}: that is {spread(per_step_us, 1)} us per step of the epoch")


def time_steps(
    ledger: LeakLedger,
    charge: ChargedAnswer,
    training: "np.typing.NDArray[np.int64]",
    batch: int,
    steps: int,
) -> list[float]:
    """Time the steps of one epoch in a fresh order, in microseconds."""
    order = np.random.default_rng(2).permutation(training)
    limit, times_us = Limit.of_sum_kl(1e6, Covers.CLASS_MEANS), []
    for step in range(min(steps, len(order) // batch)):
        positions = order[step * batch : (step + 1) * batch]
        start = time.perf_counter()
        if limit.objection(ledger.after(positions, charge)) is None:
            ledger.enter(positions, charge)
        times_us.append(1e6 * (time.perf_counter() - start))
    return times_us


def time_bounds(ledger: LeakLedger, training: "np.typing.NDArray[np.int64]") -> list[float]:
    """Time the bounds of some epochs, in seconds."""
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        ledger.bounds(training)
        times_s.append(time.perf_counter() - start)
    return times_s


if __name__ == "__main__":
    main()

"""How long does each attack take per batch?

    OMP_NUM_THREADS=1 python -m benchmarks.attacks [--rows 1024] [--cut 32 128]

CPU time of one thread on one batch, which other processes disturb less than time on the clock. The
aim for ``residual_energy`` is at most 2.5 ms on (1024, 128) and 1 ms on (1024, 32), so that the
monitor measures many batches within its share. Attacks that only an evaluation runs have no aim.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.environment import print_environment
from splitveil.common.privacy.attacks import ATTACKS, Knowledge
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.scores import KnownClasses
from splitveil.common.privacy.settings import DEFAULT_ATTACKS

NUM_RUNS = 40
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cut", type=int, nargs="*", default=[32, 128])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_environment()
    for cut_dim in arguments.cut:
        gradients, knowledge = batch(arguments.rows, cut_dim)
        shape = tuple(gradients.shape)
        print(f"\n{shape}: median (5 % .. 95 %) of {NUM_RUNS} runs, ms; * in the default attacks")
        for name, attack in ATTACKS.items():
            times = times_ms(partial(attack.score, gradients, knowledge))
            star = "*" if name in DEFAULT_ATTACKS else " "
            cuts = statistics.quantiles(times, n=20)
            middle = statistics.median(times)
            print(f"  {star} {name:24} {middle:8.3f} ({cuts[0]:.3f} .. {cuts[-1]:.3f})")


def batch(num_rows: int, cut_dim: int) -> tuple[Tensor, Knowledge]:
    """Return noisy gradients (p - y) J of a batch, and everything that attacks may be told."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(num_rows, generator=generator) < 0.2).float()
    slopes = 1 + 0.2 * torch.randn(num_rows, cut_dim, generator=generator)
    noise = torch.randn(num_rows, cut_dim, generator=generator)
    gradients = (0.2 - labels)[:, None] * slopes + noise
    classes = KnownClasses(gradients[labels == 0], gradients[labels == 1])
    predictions = KnownPredictions(torch.full((num_rows,), 0.2), slopes)
    known = Knowledge(
        positive_gradient=classes.positives[0],
        hints=classes.positives[:5],
        classes=classes,
        activations=torch.randn(num_rows, cut_dim, generator=generator),
        predictions=predictions,
        other_hints=classes.negatives[:1],
    )
    return gradients, known


def times_ms(run: Callable[[], object]) -> list[float]:
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(NUM_RUNS):
        start = time.thread_time()
        run()
        times.append(1e3 * (time.thread_time() - start))
    return times


if __name__ == "__main__":
    main()

"""How much faster do two processes of one party compute the steps of `conv` than one?

    OMP_NUM_THREADS=1 python -m benchmarks.ranks

Batches of 256 images of 3 x 32 x 32, channels 32 and 64, a cut of 64 numbers or, without a dense
layer, of 64 x 8 x 8; rounds of one process and of two alternate. A step is forward, backward with
a random gradient, and the optimizer's. Aim, with two idle cores and the small cut: 1.7 x or more.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.environment import print_environment
from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.models.data_parallel import Beginning, Learner, begin, work
from splitveil.common.models.dense import ConvBottom
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.ranks import Ranks
from splitveil.common.models.settings import AdamOptimizer, ConvModel

SHAPES = FeatureShapes(0, (), (3, 32, 32))
ROWS, BATCH, STEPS, ROUNDS = 2048, 256, 12, 3
CUTS = ((64,), (64, 8, 8))


def learner(cut: tuple[int, ...], _beginning: Beginning | None = None) -> Learner:
    torch.manual_seed(0)
    settings = ConvModel(kind="conv", channels=(32, 64), hidden=cut if len(cut) == 1 else ())
    model = ConvBottom(settings, SHAPES, cut).train()
    optimizer = build_optimizer(AdamOptimizer(kind="adam"), model)
    return Learner(model, optimizer, LambdaLR(optimizer, lambda _step: 1.0), torch.device("cpu"))


def second_rank(file: Path, cut: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(1, 2, file=file)
    work(ranks, partial(learner, cut))
    ranks.close()


def ms_per_step(compute: Callable[[Tensor], Tensor], by: Learner) -> float:
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        output = compute(torch.randperm(ROWS)[:BATCH])
        by.optimizer.zero_grad()
        torch.autograd.backward(output, torch.randn_like(output))
        by.optimizer.step()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def measure(cut: tuple[int, ...], file: Path) -> tuple[float, float]:
    """Return milliseconds for a step of one process, and of two."""
    features = Features(image=torch.randint(0, 255, (ROWS, *(3, 32, 32)), dtype=torch.uint8))
    other = multiprocessing.get_context("spawn").Process(target=second_rank, args=(file, cut))
    other.start()
    ranks = Ranks(0, 2, file=file)
    single, parallel = learner(cut), learner(cut)
    together = begin(
        ranks, parallel, Beginning(SHAPES, None, 1), features, torch.arange(ROWS).numpy()
    )
    rounds = [
        (
            ms_per_step(lambda at: single.model(features.rows(at)), single),
            ms_per_step(together, parallel),
        )
        for _ in range(ROUNDS)
    ]
    ranks.close()
    other.join()
    one, two = zip(*rounds, strict=True)
    return statistics.median(one), statistics.median(two)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print_environment()
    for cut in CUTS:
        with tempfile.TemporaryDirectory() as folder:
            one, two = measure(cut, Path(folder, "ranks"))
        print(f"cut {cut}: one process {one:.1f} ms, two {two:.1f} ms: {one / two:.2f} x")


if __name__ == "__main__":
    main()

"""What does a stage of projected labels cost, and its share of a run?

    python -m benchmarks.projected_labels [--rows 1000000] [--threads 2] [--repeats 3]

A stage is: columns and design of all rows (features that are not those of a real model, but as
many), the exact sums and their noise, the Gram matrix of the new weights with those in memory, and
targets. Aim: 3 s and 1 GiB at a million rows and 128 columns on two cores.

The last line compares, in CPU seconds, what an epoch takes on average (8 stages in 30 epochs, and
new targets in each) with an epoch of training of a small MLP in one process, without the network
between the parties. A run between two parties takes longer, and the share is smaller.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.environment import print_environment
from splitveil.active_party.defenses.gaussian_dp import mu_of_leak_auc
from splitveil.active_party.defenses.noise import SecureNoise
from splitveil.active_party.defenses.projection.design import design, stage_sigma
from splitveil.active_party.defenses.projection.features import Chunks, RowChunk, columns_of
from splitveil.active_party.defenses.projection.posterior import Posterior
from splitveil.active_party.defenses.projection.release import draw_release

CUT_DIM, OWN, HIDDEN = 32, 13, 32
CHUNK_ROWS = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rank", type=int, default=96)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--memory-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages-per-epoch", type=float, default=8 / 30)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print_environment()
    chunks = rows_of(given.rows)
    labels = (torch.rand(given.rows, generator=torch.Generator().manual_seed(2)) < 0.2).double()
    prior = torch.full((given.rows,), 0.2)
    before_mib = peak_mib()
    posterior = Posterior(given.memory_mib * 2**20)
    sigma = stage_sigma(mu_of_leak_auc(0.6), 1 / given.stages)
    num_columns = columns_of(next(chunks())).of(next(chunks())).shape[1]
    print(f"{given.rows} rows, {num_columns} columns, rank {given.rank}; CPU seconds in brackets")
    for stage in range(given.stages):
        told = posterior.released
        made, took = timed(partial(design, chunks, given.rows, given.rank, earlier=told))
        release, sums = timed(partial(draw_release, made, labels, sigma, SecureNoise()))
        _, gram = timed(partial(posterior.add, made, release))
        _, targets = timed(partial(posterior.targets, prior))
        parts = {"design": took, "release": sums, "gram": gram, "targets": targets}
        wall, cpu = (sum(part[kind] for part in parts.values()) for kind in (0, 1))
        shown = ", ".join(f"{name} {part[0]:.2f} ({part[1]:.2f})" for name, part in parts.items())
        print(f"stage {stage}: {wall:.2f} s ({cpu:.2f}): {shown}; {posterior.num_stages} in memory")
    print(f"peak memory beyond the rows themselves: {peak_mib() - before_mib:.0f} MiB")
    epoch_s = given.rows / 100_000 * timed(epoch_of_training)[1][1]
    per_epoch_s = cpu * given.stages_per_epoch + parts["targets"][1]
    print(
        f"an epoch of training alone: {epoch_s:.1f} CPU s; {given.stages_per_epoch:.2f} stages and "
        f"new targets: {per_epoch_s:.2f} CPU s, {per_epoch_s / epoch_s:.1%}"
    )


def rows_of(num_rows: int) -> Chunks:
    """Return chunks that share one block of memory per kind, as a large table's rows would."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(num_rows, CUT_DIM, generator=generator)
    own, top = torch.randn(CUT_DIM, OWN, generator=generator), torch.randn(CUT_DIM, HIDDEN)

    def chunks() -> Iterator[RowChunk]:
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = normal[start : start + CHUNK_ROWS]
            hidden = (rows @ top).relu()
            yield RowChunk(rows.relu(), rows @ own, hidden, hidden.sum(dim=1), (hidden > 0).float())

    return chunks


def epoch_of_training() -> None:
    """Train on 100,000 rows in batches of 1,024: an MLP of 100 features, and one of 45."""
    bottom = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, CUT_DIM), nn.ReLU())
    top = nn.Sequential(nn.Linear(CUT_DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.Adam([*bottom.parameters(), *top.parameters()])
    features, labels = torch.randn(1024, 100), torch.rand(1024)
    for _ in range(98):
        loss: Tensor = binary_cross_entropy_with_logits(top(bottom(features))[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return a result with wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()

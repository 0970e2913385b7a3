"""How much faster does a party align with two worker processes than with one, on idle cores?

    python -m benchmarks.alignment_workers [--ids 60000] [--rounds 5]

Two parties with two workers each need four cores, so `benchmarks.alignment` cannot tell on two.
Here one party does alone what an alignment of so many ids asks of it: it hashes and multiplies its
own ids and multiplies the points of the peer, in the chunks and by the two threads of an exchange.
Pools of one and of two workers take turns; the figures are by the clock, and nothing else should
run. The aim is 1.7.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.environment import print_environment, spread
from splitveil.common.alignment.ristretto import DIGEST_BYTES, load
from splitveil.common.alignment.workers import WorkerPool
from splitveil.common.wire.limits import CHUNK_IDS, POINT_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ids", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print_environment()
    library = load()
    scalar = library.random_scalar()
    pools = {number: WorkerPool(number, library.name) for number in (1, 2)}
    taken: dict[int, list[float]] = {number: [] for number in pools}
    try:
        for _ in range(given.rounds):
            for number, pool in pools.items():
                taken[number].append(seconds_of(pool, given.ids, scalar))
    finally:
        for pool in pools.values():
            pool.close()
        library.close()
    for number, seconds in taken.items():
        rates = [given.ids / each for each in seconds]
        print(f"{number} workers: {spread(rates)} ids per second")
    ratios = [one / two for one, two in zip(taken[1], taken[2], strict=True)]
    print(f"two workers are {statistics.median(ratios):.2f} times as fast ({spread(ratios)})")


def seconds_of(pool: WorkerPool, num_ids: int, scalar: bytes) -> float:
    """Return the time that a party's part of an alignment takes."""
    digests = os.urandom(DIGEST_BYTES * num_ids)
    points = pool.mask(os.urandom(DIGEST_BYTES * CHUNK_IDS), scalar)

    def own() -> None:
        size = DIGEST_BYTES * CHUNK_IDS
        for start in range(0, len(digests), size):
            pool.mask(digests[start : start + size], scalar)

    def of_peer() -> None:
        for start in range(0, num_ids, CHUNK_IDS):
            pool.multiply(points[: POINT_BYTES * min(CHUNK_IDS, num_ids - start)], scalar)

    begun = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for work in (threads.submit(own), threads.submit(of_peer)):
            work.result()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()

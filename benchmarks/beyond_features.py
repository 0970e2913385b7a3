"""How long does a run's end take to measure what attacks tell beyond features?

    OMP_NUM_THREADS=1 python -m benchmarks.beyond_features [--rows 50000]

Predicts labels across folds, adjusts six attacks and bounds epsilon, on made-up rows of 32
activations and 13 own features. ``--rows`` beyond the 30,000 that a run keeps show how it grows.
"""

import argparse
import time

import numpy as np

from benchmarks.environment import print_environment
from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.beyond_features import Covariates, measure_beyond_features

BATCH_ATTACKS = ("norm", "cosine", "spectral")
RUN_ATTACKS = ("accumulated_spectral", "accumulated_cosine", "hint_combiner_50")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[5_000, 30_000])
    arguments = parser.parse_args()
    print_environment()
    measure(1_000)  # imports scikit-learn
    for rows in arguments.rows:
        seconds, cpu = measure(rows)
        print(f"{rows:>9,} rows: {seconds:.1f} s, of which {cpu:.1f} s of CPU")


def measure(rows: int) -> tuple[float, float]:
    """Return elapsed seconds and seconds of CPU time."""
    generator = np.random.default_rng(0)
    activations = np.maximum(generator.normal(size=(rows, 32)), 0).astype(np.float32)
    own = generator.normal(size=(rows, 13)).astype(np.float32)
    logits = activations[:, 0] + own[:, 0] * own[:, 1] - 1.5
    labels = (generator.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    outlooks = np.column_stack([logits, logits]) + generator.normal(size=(rows, 2))
    covariates = Covariates(np.arange(rows), activations, outlooks.astype(np.float32), own, labels)
    scores = {
        name: [RunScores(np.arange(rows), logits + 0.5 * labels + generator.normal(size=rows))]
        for name in (*BATCH_ATTACKS, *RUN_ATTACKS)
    }
    started, cpu_started = time.perf_counter(), time.process_time()
    measure_beyond_features(
        covariates,
        {name: scores[name] for name in BATCH_ATTACKS},
        {name: scores[name] for name in RUN_ATTACKS},
    )
    return time.perf_counter() - started, time.process_time() - cpu_started


if __name__ == "__main__":
    main()

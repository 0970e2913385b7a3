"""Does memory stay flat, however long a run is?

    OMP_NUM_THREADS=1 python -m benchmarks.soak [--minutes 30]

A real two-process run on synthetic rows, batch 64 and cut 16 for many small steps, with
`marvell`, checkpoints, transcripts and all attacks that gather over a run. The resident set of both
processes is read every few seconds; the first part, in which caches fill, is left out. Slope with
its standard error, from the means of ten stretches: neighbouring readings are not independent.
"""

import argparse
import json
import math
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.environment import free_port, print_environment, status_mib
from benchmarks.step import write_example
from benchmarks.whole_run import Parties, start

BATCH, CUT = 64, 16
EVERY_S = 5.0
WARM_UP = 0.2
STRETCHES = 10
ATTACKS = ["norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine"]


class Slope(NamedTuple):
    mib_per_hour: float
    error: float  # standard error
    means: list[float]  # of the stretches, MiB


def write_settings(folder: Path) -> dict[str, list[str]]:
    """Write data and settings; return each party's overrides for a run without an end."""
    write_example(folder, 128, BATCH, CUT, 64)
    source = {"kind": "parquet", "path": str(folder / "active.parquet")}
    labels = {"source": source, "id_column": "id", "label_column": "label"}
    adversary = {"attacks": ATTACKS, "layers": ["cut", "first"], "labels": labels}
    both = ["contract.run_name=soak", "contract.epochs=100000"]
    both.append("contract.checkpoint_steps=50")
    address = f"127.0.0.1:{free_port()}"
    monitor = f"leak_monitor={json.dumps({'attacks': ATTACKS})}"
    return {
        "active": [*both, f"listen={address}", "defense={name: marvell}", monitor],
        "passive": [*both, f"connect={address}", f"adversary={json.dumps(adversary)}"],
    }


def slope(seconds: list[float], mib: list[float]) -> Slope:
    """Fit a line to the means of the last readings, in stretches."""
    start = int(WARM_UP * len(mib))
    times = [part.mean() / 3600 for part in np.array_split(np.array(seconds[start:]), STRETCHES)]
    means = [part.mean() for part in np.array_split(np.array(mib[start:]), STRETCHES)]
    (rate, _), covariance = np.polyfit(times, means, 1, cov=True)
    return Slope(float(rate), math.sqrt(covariance[0, 0]), [float(mean) for mean in means])


def watch(parties: Parties, minutes: float) -> dict[str, list[float]]:
    """Read both resident sets for a while; ``seconds`` are among the columns."""
    columns: dict[str, list[float]] = {"seconds": [], "active": [], "passive": []}
    start = time.monotonic()
    while (now := time.monotonic() - start) < 60 * minutes:
        columns["seconds"].append(now)
        for party, process in parties.items():
            columns[party].append(status_mib(process.pid, "VmRSS"))
        time.sleep(EVERY_S)
        if any(process.poll() is not None for process in parties.values()):
            raise SystemExit("the run ended by itself")
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    print_environment("grpcio")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parties = {}
        for party, values in write_settings(folder).items():
            options = [f"--set={value}" for value in values]
            settings = folder / f"{party}.yaml"
            parties[party] = start(party, settings, ["--runs", str(folder / "runs"), *options])
        try:
            columns = watch(parties, minutes)
        finally:
            for process in parties.values():
                process.send_signal(signal.SIGINT)
            for process in parties.values():
                process.wait(60)
        metrics = (folder / "runs" / "soak" / "active" / "metrics.jsonl").read_text()
        steps = metrics.count('"kind": "train"')
        print(f"{minutes:g} minutes, {steps:,} steps, {steps / minutes / 60:.1f} steps/s")
        for party in ("active", "passive"):
            found = slope(columns["seconds"], columns[party])
            print(f"{party}: {found.mib_per_hour:+.2f} +- {found.error:.2f} MiB/h")
            print("  stretches: " + " ".join(f"{mean:.1f}" for mean in found.means))


if __name__ == "__main__":
    main()

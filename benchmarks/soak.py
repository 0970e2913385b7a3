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
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.environment import print_environment
from benchmarks.step import write_example

BATCH, CUT = 64, 16
EVERY_S = 5.0
WARM_UP = 0.2
STRETCHES = 10
ATTACKS = ["norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine"]


class Slope(NamedTuple):
    """The growth of a resident set."""

    mib_per_hour: float
    error: float
    """Standard error."""
    first: float
    last: float
    """MiB at the beginning and the end of what was looked at."""
    means: list[float]
    """Of the stretches, MiB."""


def write_settings(folder: Path) -> list[str]:
    """Write data and settings; return the overrides for a run without an end."""
    write_example(folder, 128, BATCH, CUT, 64)
    source = {"kind": "npz", "path": "active.npz"}
    labels = {"source": source, "id_column": "id", "label_column": "label"}
    adversary = {"attacks": ATTACKS, "layers": ["cut", "first"], "labels": labels}
    return [
        "contract.run_name=soak",
        "contract.epochs=100000",
        "contract.checkpoints.every_steps=50",
        "active.defense={name: marvell}",
        f"active.leak_monitor={json.dumps({'attacks': ATTACKS})}",
        f"passive.adversary={json.dumps(adversary)}",
    ]


def children(parent: int) -> dict[str, int]:
    """Return party -> process id of the two processes that a launcher has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            own, rest = path.read_text().rsplit(")", 1)
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue  # it ended meanwhile
        if int(rest.split()[1]) == parent:
            for party in ("active", "passive"):
                if f"{party}_party" in command or f"{party}-party" in command:
                    found[party] = int(own.split()[0])
    return found


def resident_mib(process: int) -> float:
    """Return the resident set of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def slope(seconds: list[float], mib: list[float]) -> Slope:
    """Fit a line to the means of the last readings, in stretches."""
    start = int(WARM_UP * len(mib))
    times = [part.mean() / 3600 for part in np.array_split(np.array(seconds[start:]), STRETCHES)]
    means = [part.mean() for part in np.array_split(np.array(mib[start:]), STRETCHES)]
    (rate, _), covariance = np.polyfit(times, means, 1, cov=True)
    return Slope(float(rate), math.sqrt(covariance[0, 0]), float(means[0]), float(means[-1]), means)


def watch(launcher: "subprocess.Popen[bytes]", minutes: float) -> Mapping[str, list[float]]:
    """Read both resident sets for a while; ``seconds`` are among the columns."""
    deadline = time.monotonic() + 120
    while len(processes := children(launcher.pid)) < 2:
        if time.monotonic() > deadline:
            raise SystemExit("the parties did not start")
        time.sleep(0.2)
    columns: dict[str, list[float]] = {"seconds": [], "active": [], "passive": []}
    start = time.monotonic()
    while (now := time.monotonic() - start) < 60 * minutes:
        columns["seconds"].append(now)
        for party, process in processes.items():
            columns[party].append(resident_mib(process))
        time.sleep(EVERY_S)
        if launcher.poll() is not None:
            raise SystemExit(f"the run ended by itself, with exit code {launcher.returncode}")
    return columns


def main() -> None:
    """Run, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    print_environment("grpcio")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = write_settings(folder)
        options = [text for override in overrides for text in ("--set", override)]
        command = [
            sys.executable,
            "-P",
            "-m",
            "splitveil",
            "local",
            name,
            "--runs",
            f"{name}/runs",
        ]
        command += options
        with (folder / "log").open("wb") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                columns = watch(launcher, minutes)
            except SystemExit:
                print((folder / "log").read_text()[-2000:])
                raise
            finally:
                launcher.send_signal(signal.SIGINT)
                launcher.wait(60)
        metrics = (folder / "runs" / "soak" / "active" / "metrics.jsonl").read_text()
        steps = metrics.count('"kind": "train"')
        print(f"{minutes:g} minutes, {steps:,} steps, {steps / minutes / 60:.1f} steps/s")
        for party in ("active", "passive"):
            found = slope(columns["seconds"], columns[party])
            print(
                f"{party}: {found.first:.1f} MiB, then {found.last:.1f} MiB: "
                f"{found.mib_per_hour:+.2f} +- {found.error:.2f} MiB/h"
            )
            print("  stretches: " + " ".join(f"{mean:.1f}" for mean in found.means))


if __name__ == "__main__":
    main()

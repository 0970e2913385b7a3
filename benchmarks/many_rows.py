"""What does a run of a million rows take: until its first step, in memory, and for each step?

    OMP_NUM_THREADS=1 python -m benchmarks.many_rows [--rows 250000 1000000] [--features 16]

One epoch of `splitveil active run` and `splitveil passive run` with mutual TLS, `marvell` and the
default audits, for each number of rows: MLP FEATURES-256-128 | 128-64-1, batch 1,024, ids of nine
digits, all of them in common, one torch thread per process. Both parties are on this
machine, and share its cores.

Printed are the time from the start of both processes to the first step, the CPU time of each party
until then with the processes that align, steps per second, and the most memory of each party: its
own process, and all of its processes together, shared pages divided (PSS). From the least and the
largest number of rows follow the bytes for each row, and a straight line to five million rows,
which is an extrapolation and is called so. The table itself is FEATURES x 4 bytes a row at the
passive party.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.bare_gloo import free_port
from benchmarks.environment import print_environment
from benchmarks.processes import CLOCK_TICKS, most_mib
from benchmarks.whole_run import (
    NAMES,
    security,
    start,
    write_settings,
)
from splitveil.deploy.authority import make_certificates

EXTRAPOLATED = 5_000_000
EVERY_S = 0.5
MIB = 2**20
PARTIES = ("active", "passive")


class Most(NamedTuple):
    """The most memory of a party, in MiB."""

    own: float
    """Resident set of its process."""
    all: float
    """Of its process and those that it started, shared pages divided."""


class Found(NamedTuple):
    """What one run took."""

    first_step_s: float
    cpu_s: dict[str, float]
    """By party, until the first step."""
    steps_per_s: float
    most: dict[str, Most]


def write_tables(folder: Path, rows: int, features: int) -> None:
    """Write settings, and tables of so many rows in different orders."""
    write_settings(folder)
    generator = np.random.default_rng(0)
    ids = np.array([f"{row:09d}" for row in range(rows)])
    x = generator.standard_normal((rows, features), dtype=np.float32)
    labels = (x[:, 0] + generator.standard_normal(rows) > 1).astype(np.int64)
    order = generator.permutation(rows)
    np.savez(folder / "active.npz", id=ids[order], label=labels[order])
    np.savez(folder / "passive.npz", id=ids, x=x)


def run(folder: Path) -> Found:
    """Run both parties for one epoch."""
    address = f"127.0.0.1:{free_port()}"
    own: dict[str, dict[str, Any]] = {
        "active": {"listen": address, "defense": {"name": "marvell"}},
        "passive": {"connect": address},
    }
    contract = yaml.safe_load((folder / "contract.yaml").read_text())
    (folder / "contract.yaml").write_text(yaml.safe_dump(contract | {"epochs": 1}))
    for party, values in own.items():
        settings = yaml.safe_load((folder / f"{party}.yaml").read_text()) | values
        settings["security"] = security(folder, party)
        (folder / f"{party}-now.yaml").write_text(yaml.safe_dump(settings))
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.monotonic()
        parties = {party: start(party, folder, Path(scratch), 1) for party in PARTIES}
        try:
            return follow(parties, Path(scratch) / "whole" / "active" / "metrics.jsonl", begun)
        finally:
            for process in parties.values():
                process.kill()
                process.wait()


def follow(parties: dict[str, subprocess.Popen[bytes]], metrics: Path, begun: float) -> Found:
    """Read both parties' memory until both have ended, and the times of the steps."""
    most = {party: Most(0.0, 0.0) for party in parties}
    cpu_s: dict[str, float] = {}
    first_at = 0.0
    while any(process.poll() is None for process in parties.values()):
        for party, process in parties.items():
            if process.poll() is None:
                most[party] = larger(most[party], process.pid)
        if not first_at and has_begun(metrics):
            first_at = time.monotonic()
            cpu_s = {party: cpu_of(process.pid) for party, process in parties.items()}
        time.sleep(EVERY_S)
    if any(process.returncode for process in parties.values()):
        raise SystemExit("a party failed")
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    times = [line["time_s"] for line in lines if line["kind"] == "train"]
    rate = (len(times) - 1) / (times[-1] - times[0])
    return Found(first_at - begun, cpu_s, rate, most)


def has_begun(metrics: Path) -> bool:
    """Return whether the first step is in the metrics."""
    return metrics.exists() and '"train"' in metrics.read_text()


def family(pid: int) -> Iterator[Path]:
    """Yield the folders in /proc of a process and of those that it started."""
    own = Path(f"/proc/{pid}")
    yield own
    for task in own.glob("task/*/children"):
        for child in task.read_text().split():
            yield from family(int(child))


def larger(most: Most, pid: int) -> Most:
    """Return the larger of a party's memory so far and now."""
    try:
        sizes = [proportional(process) for process in family(pid)]
    except (FileNotFoundError, ProcessLookupError):  # one of them has ended meanwhile
        return most
    return Most(max(most.own, most_mib(pid)), max(most.all, sum(sizes)))


def proportional(process: Path) -> float:
    """Return the memory of a process in MiB, shared pages divided."""
    for line in (process / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process, and of those that it started, ended or not."""
    ticks = 0
    for process in family(pid):
        fields = (process / "stat").read_text().rpartition(") ")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / CLOCK_TICKS


def print_slopes(found: dict[int, Found]) -> None:
    """Print the bytes for each row, and what a straight line says of many more."""
    least, largest = min(found), max(found)
    for party in PARTIES:
        for what in Most._fields:
            low, high = (getattr(found[rows].most[party], what) for rows in (least, largest))
            slope = (high - low) / (largest - least)
            further = high + slope * (EXTRAPOLATED - largest)
            print(
                f"{party}, {what}: {slope * MIB:.0f} bytes a row; extrapolated to "
                f"{EXTRAPOLATED:,} rows {further / 1024:.1f} GiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--features", type=int, default=16)
    given = parser.parse_args()
    print_environment("grpcio")
    print("| rows | first step after | CPU s active / passive | steps/s | MiB active | passive |")
    print("|---|---|---|---|---|---|")
    found = {}
    for rows in given.rows:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_tables(folder, rows, given.features)
            make_certificates(folder / "certificates", NAMES)
            one = found[rows] = run(folder)
        sizes = [f"{size.own:.0f} ({size.all:.0f})" for size in one.most.values()]
        print(
            f"| {rows:,} | {one.first_step_s:.0f} s "
            f"| {one.cpu_s['active']:.0f} / {one.cpu_s['passive']:.0f} "
            f"| {one.steps_per_s:.0f} | {sizes[0]} | {sizes[1]} |",
            flush=True,
        )
    if len(found) > 1:
        print_slopes(found)


if __name__ == "__main__":
    main()

"""How much do leak monitor and adversary slow a run down?

    OMP_NUM_THREADS=1 python -m benchmarks.audited_training [--rounds 3]

Real two-process runs on synthetic rows, batch 1024 and cut 128: without any audit, with the default
share of the CPU time, and with no limit; norm, cosine, spectral and both accumulated attacks, at
the cut layer on the active side and at two layers on the passive side. Rounds of the three
alternate. Steps/s and CPU time per step over the second half of each run, when the second that
counts for nothing is used up; other programs disturb CPU time less. Epochs are short, and what
audits do once an epoch weighs accordingly. Aim: at most 5 % slower. Audits leave batches out rather
than hold up training: how many of the second half they measured is part of the answer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.environment import print_environment
from benchmarks.step import write_example
from splitveil.common.record.lines import LeakLine, TrainingLine
from splitveil.common.record.run_record import read_metrics

ATTACKS = ["norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine"]
STEPS_PER_EPOCH = 30
AUDITS: dict[str, dict[str, Any] | None] = {
    "no audit": None,
    "default share": {"attacks": ATTACKS},
    "no limit": {"attacks": ATTACKS, "max_cpu_share": None},
}


class Speed(NamedTuple):
    """The speed of a run, and the measurements in it."""

    steps_per_s: float
    cpu_ms: float
    """CPU time of both parties per step."""
    measured: list[float]
    """Fraction of the batches that each audit measured."""


class Sample(NamedTuple):
    """The progress of a run at some moment."""

    steps: int
    cpu_s: float
    """CPU time of both parties so far."""


def run(folder: Path, name: str, epochs: int, audit: dict[str, Any] | None) -> Speed:
    """Run both parties."""
    labels = {
        "source": {"kind": "npz", "path": "active.npz"},
        "id_column": "id",
        "label_column": "label",
    }
    adversary = None if audit is None else audit | {"layers": ["cut", "first"], "labels": labels}
    command = [sys.executable, "-P", "-m", "splitveil", "local", str(folder)]
    command += ["--runs", str(folder / "runs")]
    for override in (
        f"contract.run_name={name}",
        f"contract.epochs={epochs}",
        f"active.leak_monitor={json.dumps(audit)}",
        f"passive.adversary={json.dumps(adversary)}",
        "active.defense={name: marvell}",
    ):
        command += ["--set", override]
    results = folder / "runs" / name
    samples = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            samples.append(Sample(num_steps(results), cpu_s_of(process.pid)))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    active, passive = (read_metrics(results / party) for party in ("active", "passive"))
    times_s = [
        time_s
        for time_s, line in active.timed
        if isinstance(line, TrainingLine) and line.epoch >= epochs // 2 and time_s is not None
    ]
    in_all = len(active.of(TrainingLine))
    second = [sample for sample in samples if in_all - len(times_s) <= sample.steps < in_all]
    cpu_s = second[-1].cpu_s - second[0].cpu_s
    measured = [
        sum(line.epoch >= epochs // 2 for line in metrics.of(LeakLine)) / len(times_s)
        for metrics in (active, passive)
    ]
    return Speed(
        (len(times_s) - 1) / (times_s[-1] - times_s[0]),
        1e3 * cpu_s / (second[-1].steps - second[0].steps),
        measured if audit is not None else [],
    )


def num_steps(results: Path) -> int:
    """Return the number of steps that a running run has made."""
    metrics = results / "active" / "metrics.jsonl"
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


def cpu_s_of(ancestor: int) -> float:
    """Return the CPU time of a process and of those that it started and that still run."""
    parents, ticks = {}, {}
    for entry in filter(str.isdecimal, map(str, (path.name for path in Path("/proc").iterdir()))):
        with suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            parents[int(entry)], ticks[int(entry)] = int(fields[1]), sum(map(int, fields[11:13]))
    family = {ancestor}
    for process, parent in sorted(parents.items()):  # a child's number is the larger one
        if parent in family:
            family.add(process)
    return sum(ticks.get(process, 0) for process in family) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=150, help=f"of {STEPS_PER_EPOCH} steps")
    arguments = parser.parse_args()
    print_environment("grpcio")
    ratios: dict[str, list[float]] = {name: [] for name in AUDITS}
    of_cpu: dict[str, list[float]] = {name: [] for name in AUDITS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_example(folder, STEPS_PER_EPOCH, batch=1024, cut=128, width=256)
        for party in ("active", "passive"):
            settings = yaml.safe_load((folder / f"{party}.yaml").read_text())
            settings["torch_threads"] = 1
            (folder / f"{party}.yaml").write_text(yaml.safe_dump(settings))
        for number in range(arguments.rounds):
            speeds = {
                name: run(folder, f"{name.replace(' ', '-')}-{number}", arguments.epochs, audit)
                for name, audit in AUDITS.items()
            }
            for name, (steps_per_s, cpu_ms, measured) in speeds.items():
                ratios[name].append(steps_per_s / speeds["no audit"].steps_per_s)
                of_cpu[name].append(speeds["no audit"].cpu_ms / cpu_ms)
                parts = ", ".join(f"{part:.0%}" for part in measured)
                print(
                    f"round {number + 1}: {name:13} {steps_per_s:6.1f} steps/s, "
                    f"ratio {ratios[name][-1]:.3f}, CPU {cpu_ms:.2f} ms per step, "
                    f"ratio {of_cpu[name][-1]:.3f}" + (f", measured {parts}" if parts else ""),
                    flush=True,
                )
    for name, found in ratios.items():
        print(
            f"{name:13} median ratio of steps/s {statistics.median(found):.3f}, "
            f"of CPU time {statistics.median(of_cpu[name]):.3f}"
        )


if __name__ == "__main__":
    main()

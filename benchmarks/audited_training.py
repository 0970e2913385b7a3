"""How much do leak monitor and adversary slow a run down?

    OMP_NUM_THREADS=1 python -m benchmarks.audited_training [--rounds 3]

Real two-process runs on synthetic rows, batch 1024 and cut 128: without any audit, with the default
share of a core, and with no limit; norm, cosine, spectral and both accumulated attacks, at the cut
layer on the active side and at two layers on the passive side. Rounds of the three alternate.
Steps/s over the second half of each run, when the second that counts for nothing is used up, and
CPU time, which says the same on saturated cores and is disturbed less by others. Aim: at most 5 %
slower. Audits leave batches out rather than hold up training: how many they measured is
part of the answer.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.environment import print_environment
from benchmarks.step import write_example

ATTACKS = ["norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine"]
STEPS_PER_EPOCH = 30
AUDITS: dict[str, dict[str, Any] | None] = {
    "no audit": None,
    "default share": {"attacks": ATTACKS},
    "no limit": {"attacks": ATTACKS, "max_cpu_share": None},
}


class Speed(NamedTuple):
    """How fast a run went, and what was measured of it."""

    steps_per_s: float
    cpu_s: float
    """CPU time of both parties, start and alignment included."""
    measured: list[float]
    """Fraction of the batches that each audit measured."""


def run(folder: Path, name: str, epochs: int, audit: dict[str, Any] | None) -> Speed:
    """Run both parties."""
    labels = {
        "source": {"kind": "npz", "path": "active.npz"},
        "id_column": "id",
        "label_column": "label",
    }
    adversary = None if audit is None else audit | {"layers": ["cut", "first"], "labels": labels}
    command = [sys.executable, "-m", "deploy.local", str(folder), "--runs", str(folder / "runs")]
    for override in (
        f"contract.run_name={name}",
        f"contract.epochs={epochs}",
        f"active.leak_monitor={json.dumps(audit)}",
        f"passive.adversary={json.dumps(adversary)}",
        "active.defense={name: marvell}",
    ):
        command += ["--set", override]
    before_s = children_cpu_s()
    subprocess.run(command, check=True, capture_output=True)
    cpu_s = children_cpu_s() - before_s
    results = folder / "runs" / name
    counts = [
        json.loads((results / party / "summary.json").read_text()).get("leak_batches")
        for party in ("active", "passive")
    ]
    lines = (results / "active" / "metrics.jsonl").read_text().splitlines()
    ends_s = [line["time_s"] for line in map(json.loads, lines) if line["kind"] == "train"]
    half = len(ends_s) // 2
    speed = (len(ends_s) - 1 - half) / (ends_s[-1] - ends_s[half])
    return Speed(speed, cpu_s, [count["observed"] / len(ends_s) for count in counts if count])


def children_cpu_s() -> float:
    """Return the CPU time of all processes started so far that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=50, help=f"of {STEPS_PER_EPOCH} steps")
    arguments = parser.parse_args()
    print_environment("grpcio")
    ratios: dict[str, list[float]] = {name: [] for name in AUDITS}
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
            for name, (steps_per_s, cpu_s, measured) in speeds.items():
                ratios[name].append(steps_per_s / speeds["no audit"].steps_per_s)
                parts = ", ".join(f"{part:.0%}" for part in measured)
                print(
                    f"round {number + 1}: {name:13} {steps_per_s:6.1f} steps/s, "
                    f"ratio {ratios[name][-1]:.3f}, CPU {cpu_s:.1f} s"
                    + (f", measured {parts}" if parts else ""),
                    flush=True,
                )
    for name, found in ratios.items():
        print(f"{name:13} median ratio {statistics.median(found):.3f}")


if __name__ == "__main__":
    main()

"""How much do leak monitor and adversary slow a run down?

    OMP_NUM_THREADS=1 python -m benchmarks.audited_training [--rounds 3]

Real two-process runs on synthetic rows, batch 1024 and cut 128: without any audit, and with norm,
cosine, spectral and both accumulated attacks, at the cut layer on the active side and at two layers
on the passive side. Rounds of the two alternate; steps/s as the active party counts them. Aim: at
most 5 % slower. Audits fall behind rather than hold up training: how many batches they left out is
part of the answer.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.environment import print_environment
from benchmarks.step import write_example

ATTACKS = ["norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine"]


def run(folder: Path, name: str, *, audited: bool) -> tuple[float, list[int]]:
    """Return steps per second, and the batches that each audit left out."""
    audit = json.dumps({"attacks": ATTACKS, "queue_batches": 8})
    labels = {
        "source": {"kind": "npz", "path": "active.npz"},
        "id_column": "id",
        "label_column": "label",
    }
    adversary = json.dumps(
        {"attacks": ATTACKS, "queue_batches": 8, "layers": ["cut", "first"], "labels": labels}
    )
    command = [sys.executable, "-m", "deploy.local", str(folder), "--runs", str(folder / "runs")]
    for override in (
        f"contract.run_name={name}",
        f"active.leak_monitor={audit if audited else 'null'}",
        f"passive.adversary={adversary if audited else 'null'}",
        "active.defense={name: marvell}",
    ):
        command += ["--set", override]
    subprocess.run(command, check=True, capture_output=True)
    summaries = [
        json.loads((folder / "runs" / name / party / "summary.json").read_text())
        for party in ("active", "passive")
    ]
    left_out = [s["leak_batches"]["left_out"] for s in summaries if "leak_batches" in s]
    return summaries[0]["steps_per_s"], left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print_environment("grpcio")
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_example(folder, arguments.steps, batch=1024, cut=128, width=256)
        for party in ("active", "passive"):
            settings = yaml.safe_load((folder / f"{party}.yaml").read_text())
            settings["torch_threads"] = 1
            (folder / f"{party}.yaml").write_text(yaml.safe_dump(settings))
        for number in range(arguments.rounds):
            plain, _ = run(folder, f"plain-{number}", audited=False)
            audited, left_out = run(folder, f"audited-{number}", audited=True)
            ratios.append(audited / plain)
            print(
                f"round {number + 1}: {plain:.1f} steps/s without, {audited:.1f} with audits, "
                f"ratio {ratios[-1]:.3f}; left out of {arguments.steps} batches: {left_out}"
            )
    print(f"median ratio: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()

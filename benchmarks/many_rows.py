"""How does a whole job in one pass grow with its rows, and what is it beside alignment alone?

    OMP_NUM_THREADS=1 python -m benchmarks.many_rows 10000 100000 1000000
        [--without-curve] [--cached]

Runs ``splitveil align`` and a whole job in one pass with each number of rows, ids all in common: 4
numbers at the label owner, 16 at the feature owner, which sends 16 components of each row; the
label owner fits its network, trees and the model of its own columns. Prints both, the whole job
over the alignment alone, and how each grows: with exponent 1, ten times the rows cost ten times as
much.

``--without-curve`` puts an exclusive or in the place of each multiplication on the curve, whose
time follows from the number of ids, and leaves the rest of the exchange as it is: what ten million
rows cost beside it. ``--cached`` has both tables converted to memory-mapped columns first, which
counts.
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.environment import free_port, in_a_process, print_environment
from benchmarks.whole_run import NAMES, Work, cpu_of_ended, security, table, wait_for_end
from splitveil.deploy.authority import make_certificates
from splitveil.deploy.init.proposal import recommended_sizes
from splitveil.experiments.preparation import write_columns

WITHOUT_CURVE = """
import sys
import numpy as np
from splitveil.command.program import main
from splitveil.common.alignment import ristretto

group = ristretto.load()

def masked(digests, scalar):
    points = np.frombuffer(digests, np.uint8).reshape(-1, 64)[:, :32].copy()
    points[:, 31] &= 0x7F
    return multiplied(points, scalar)

def multiplied(points, scalar):
    rows = np.frombuffer(points, np.uint8).reshape(-1, 32)
    return (rows ^ np.frombuffer(scalar, np.uint8)).tobytes()

group.mask, group.multiply = masked, multiplied
main(sys.argv[1:])
"""


def write_parties(folder: Path, rows: int, is_cached: bool) -> None:  # noqa: FBT001
    x, labels = table(Work(rows, 20))
    sizes, address = recommended_sizes(rows), f"127.0.0.1:{free_port()}"
    contract: dict[str, Any] = {
        "run_name": "whole",
        "exchange": "one_shot",
        "cut_shape": [16],
        "batch_size": sizes.batch_size,
        "schedule": {"warmup_steps": sizes.warmup_steps, "decay": "cosine"},
        "alignment": {"max_set_size": rows},
    }
    optimizer = {"kind": "adamw", "learning_rate": 0.004, "weight_decay": 0.01}
    own: dict[str, dict[str, Any]] = {
        "active": {
            "listen": address,
            "top_model": {"kind": "tabular", "hidden": [64]},
            "optimizer": optimizer,
            "refit": {"epochs": sizes.epochs, "boosting": True},
            "defense": {"name": "none"},
            "serving": {"fallback": True},
        },
        "passive": {"connect": address, "bottom_model": {"kind": "pca"}},
    }
    for seed, (party, columns) in enumerate(
        {"active": {"label": labels.long(), "own": x[:, :4]}, "passive": {"x": x[:, 4:]}}.items()
    ):
        order = np.random.default_rng(seed).permutation(rows)
        ids = np.array([f"{row:09d}" for row in order.tolist()])
        written = {name: values.numpy()[order] for name, values in columns.items()}
        write_columns(folder / f"{party}.parquet", id=ids, **written)
        source = {"kind": "parquet", "path": f"{party}.parquet"}
        source |= {"cache_dir": f"{party}-cache"} if is_cached else {}
        data: dict[str, Any] = {"source": source, "id_column": "id"}
        data |= {"features": {"numeric": "own*" if party == "active" else "x*"}}
        data |= {"label_column": "label"} if party == "active" else {}
        own[party] |= {"contract": "contract.yaml", "data": data}
        own[party]["security"] = security(folder, party)
    make_certificates(folder / "certificates", NAMES)
    for name, values in {"contract": contract, **own}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[10_000, 30_000])
    parser.add_argument("--without-curve", action="store_true", help="none of its arithmetic")
    parser.add_argument("--cached", action="store_true", help="tables as memory-mapped columns")
    given = parser.parse_args()
    print_environment("grpcio", "pyarrow")
    program = ["-c", WITHOUT_CURVE] if given.without_curve else ["-m", "splitveil"]
    print("\n| rows | | wall, s | CPU s | MiB active | MiB passive |")
    print("|---" * 6 + "|")
    before: dict[str, tuple[float, ...]] = {}
    for rows in given.rows:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            in_a_process(write_parties, folder, rows, given.cached)
            now = {what: job(folder, program, what) for what in ("align", "run")}
        for what, cost in now.items():
            print(f"| {rows:,} | {what} |", " | ".join(f"{x:,.4g}" for x in cost), "|", flush=True)
            if what in before:
                scale = math.log(rows / before["rows"][0])
                grown = (math.log(x / y) / scale for x, y in zip(cost, before[what], strict=True))
                print("| exponent | |", " | ".join(f"{x:.2f}" for x in grown), "|")
        over = (x / y for x, y in zip(now["run"], now["align"], strict=True))
        print("| run / align | |", " | ".join(f"{x:.2f}" for x in over), "|", flush=True)
        before = {"rows": (rows,), **now}


def job(folder: Path, program: Sequence[str], what: str) -> tuple[float, ...]:
    """Return seconds and CPU seconds of both parties, and the memory of each."""
    begun, ended_before_s = time.monotonic(), cpu_of_ended()
    for cache in folder.glob("*-cache"):
        shutil.rmtree(cache)
    parties = {}
    for party in ("active", "passive"):
        command = [sys.executable, *program, what, f"{party}.yaml", "-qq"]
        command += ["--output", f"{party}-aligned.parquet"] if what == "align" else []
        parties[party] = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        most = wait_for_end(parties)
    finally:
        for process in parties.values():
            process.kill()
    return time.monotonic() - begun, cpu_of_ended() - ended_before_s, *most


if __name__ == "__main__":
    main()

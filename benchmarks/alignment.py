"""Aligns two files of a million ids each, half of them in common, with one command per party.

    python -m benchmarks.alignment [--ids 1000000] [--buckets 1 2 4]

Both parties run ``align`` as processes of their own, over the loopback interface, in
plain text. The two files that they write are compared with the true intersection, which comes from
how the tables are made: the same ids in both, in one order, each with the rest of its own row.
The figures are of whole processes, with reading and writing the files: seconds, CPU seconds and
the largest resident memory of each.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray
from pyarrow import csv

from benchmarks.environment import in_a_process, print_environment
from tests.support.simulation import free_address

CONTRACT = {"run_name": "files", "cut_shape": [1], "batch_size": 1, "epochs": 1}
PARTY = {
    "contract": "contract.yaml",
    "security": {"mode": "insecure"},
    "optimizer": {"kind": "adam", "learning_rate": 0.01},
}


class Cost(NamedTuple):
    """What one party's process took."""

    seconds: float
    cpu_s: float
    max_mb: float


def write_parties(folder: Path, num_ids: int, buckets: int) -> None:
    """Write two tables and their settings: the second half of one is the first of the other."""
    address, generator = free_address(), np.random.default_rng(1)
    numbers = {
        "active": generator.permutation(num_ids),
        "passive": num_ids // 2 + generator.permutation(num_ids),
    }
    for party, own in numbers.items():
        columns = {"id": [f"person-{n:09d}" for n in own.tolist()], "x": _value(party, own)}
        if party == "active":
            columns["label"] = own % 2
        csv.write_csv(pa.table(columns), folder / f"{party}.csv")
    contract = CONTRACT | {"alignment": {"max_set_size": 2 * num_ids, "buckets": buckets}}
    (folder / "contract.yaml").write_text(yaml.safe_dump(contract))
    active = {
        "listen": address,
        "top_model": {"kind": "mlp", "hidden": [1]},
        "defense": {"name": "none"},
    }
    passive = {"connect": address, "bottom_model": {"kind": "mlp", "hidden": [1]}}
    for party, own_settings in (("active", active), ("passive", passive)):
        source = {"kind": "csv", "path": f"{party}.csv"}
        data: dict[str, Any] = {"id_column": "id", "source": source, "features": {"numeric": "x"}}
        if party == "active":
            data["label_column"] = "label"
        settings = PARTY | own_settings | {"data": data}
        (folder / f"{party}.yaml").write_text(yaml.safe_dump(settings))


def align(folder: Path) -> dict[str, Cost]:
    """Run both commands, and return what each took."""
    started, begun = {}, time.monotonic()
    for party in ("active", "passive"):
        command = [sys.executable, "-P", "-m", "splitveil", party, "align", f"{party}.yaml"]
        command += ["--output", f"{party}.out.parquet"]
        started[subprocess.Popen(command, cwd=folder).pid] = party
    costs = {}
    while started:
        pid, status, used = os.wait4(-1, 0)
        party = started.pop(pid)
        if status:
            raise SystemExit(f"{party}: ended with exit code {os.waitstatus_to_exitcode(status)}")
        seconds, cpu_s = time.monotonic() - begun, used.ru_utime + used.ru_stime
        costs[party] = Cost(seconds, cpu_s, used.ru_maxrss * 1024 / 1e6)
    return costs


def check(folder: Path, num_ids: int) -> int:
    """Compare both outputs with the true intersection, and return its size.

    Raises:
        SystemExit: they differ from it, or from each other.
    """
    from pyarrow import parquet  # noqa: PLC0415 - after the processes were measured

    tables = {p: parquet.read_table(folder / f"{p}.out.parquet") for p in ("active", "passive")}
    found = {}
    for party, table in tables.items():
        numbers = np.array([int(text.removeprefix("person-")) for text in table["id"].to_pylist()])
        if not np.array_equal(np.sort(numbers), np.arange(num_ids // 2, num_ids)):
            raise SystemExit(f"{party}: the file does not have exactly the common ids")
        if not np.array_equal(table["x"].to_numpy().astype(np.int64), _value(party, numbers)):
            raise SystemExit(f"{party}: some row has another row's value")
        found[party] = numbers
    if not np.array_equal(found["active"], found["passive"]):
        raise SystemExit("the files differ in their order")
    return len(found["active"])


def _value(party: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers * (3 if party == "active" else 7) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=1_000_000, help="ids of each party")
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    print_environment("pyarrow")
    for buckets in options.buckets:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # What a command's process took counts from this one's peak.
            in_a_process(write_parties, folder, options.ids, buckets)
            costs = align(folder)
            common = in_a_process(check, folder, options.ids)
        print(f"{buckets} buckets: {common:,} common ids of {options.ids:,}, exact, in one order")
        for party, cost in costs.items():
            print(
                f"{party}: {cost.seconds:.0f} s, {cost.cpu_s:.0f} CPU s, "
                f"{options.ids / cost.cpu_s:,.0f} own ids per CPU s, at most {cost.max_mb:,.0f} MB"
            )


if __name__ == "__main__":
    main()

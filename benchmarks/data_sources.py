"""How much longer does a table take that is a folder of Parquet files instead of one file?

    OMP_NUM_THREADS=1 python -m benchmarks.data_sources [--rows 1000000] [--parts 50] [--rounds 7]

Writes one table (a text id, a label, 10 numbers, 4 categories) as one file and as a folder of
parts, and reads both as a party does: into memory, and by converting them to memory-mapped columns.
The two are read in turns, so that a busy machine slows both; each figure is the median over the
rounds of the ratio within a round. Aim: at most 1.10.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from benchmarks.environment import print_environment
from splitveil.common.data.converted import open_converted
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import read_table

NUMBERS, CATEGORIES = 10, 4
AIM = 1.10


def rows(count: int) -> Any:
    generator = np.random.default_rng(1)
    columns: dict[str, Any] = {
        "id": [f"client-{row:09d}" for row in generator.permutation(count)],
        "label": generator.integers(0, 2, count),
    }
    columns |= {f"n{j}": generator.normal(size=count) for j in range(NUMBERS)}
    words = np.array([f"word-{j}" for j in range(500)])
    columns |= {f"c{j}": words[generator.integers(0, 500, count)] for j in range(CATEGORIES)}
    return pa.table(columns)


def write(folder: Path, count: int, num_parts: int) -> None:
    table = rows(count)
    parquet.write_table(table, folder / "one.parquet")
    (folder / "parts").mkdir()
    for part, chosen in enumerate(np.array_split(np.arange(count), num_parts)):
        path = folder / "parts" / f"part-{part:05d}.parquet"
        parquet.write_table(table.slice(chosen[0], len(chosen)), path)


def settings(path: str, **source: str) -> DataSettings:
    return DataSettings.model_validate(
        {
            "source": {"kind": "parquet", "path": path, **source},
            "id_column": "id",
            "label_column": "label",
            "features": {"numeric": "n*", "categorical": "c*"},
        }
    )


def into_memory(folder: Path, path: str) -> None:
    read_table(settings(path), folder)


def to_columns(folder: Path, path: str) -> None:
    shutil.rmtree(folder / "cache", ignore_errors=True)
    open_converted(settings(path, cache_dir="cache"), folder, lambda _: None)


def seconds(work: Callable[[Path, str], None], folder: Path, path: str) -> float:
    start = time.perf_counter()
    work(folder, path)
    return time.perf_counter() - start


def compare(name: str, work: Callable[[Path, str], None], folder: Path, rounds: int) -> None:
    ratios, ones = [], []
    for turn in range(rounds + 1):
        order = ("one.parquet", "parts") if turn % 2 else ("parts", "one.parquet")
        took = {path: seconds(work, folder, path) for path in order}
        if turn:  # the first round fills the caches of the system and of the libraries
            ratios.append(took["parts"] / took["one.parquet"])
            ones.append(took["one.parquet"])
    low, high = min(ratios), max(ratios)
    found = statistics.median(ratios)
    verdict = "met" if found <= AIM else "missed"
    print(
        f"{name}: one file {statistics.median(ones):.2f} s, folder / file {found:.3f} "
        f"({low:.3f} to {high:.3f}); aim {AIM:.2f} {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    print_environment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, chosen.rows, chosen.parts)
        print(f"{chosen.rows:,} rows, {chosen.parts} parts, {chosen.rounds} rounds in turns")
        compare("into memory", into_memory, folder, chosen.rounds)
        compare("to columns on disk", to_columns, folder, chosen.rounds)


if __name__ == "__main__":
    main()

"""What does it take to convert a file like Criteo's to columns on disk, and to read them?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=... python -m benchmarks.readers [--rows 45840617]

Writes rows shaped like Criteo's train.txt: labels, 13 counts and empty cells are repeated from
$SPLITVEIL_DATA/criteo/criteo.tsv.gz, and the texts of the 26 categories are drawn, with the whole
set's numbers of different values. Converts them in a process of its own, which may hold 2 GiB, and
reads batches of 1,024 in a random order. Figures per core are in CPU time: they hold on a busy
machine, too. Aim: at most 2 GiB, and at least a million rows per second and core.
Memory is the process's own (RssAnon), without pages of mapped files.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv as arrow_csv

from benchmarks.environment import in_a_process, print_environment, status_mib
from splitveil.common.data.converted import open_converted
from splitveil.common.data.features import FeatureEncoder, RowEncoder
from splitveil.common.data.settings import DataSettings
from splitveil.common.party.party_data import PartyData

CARDINALITIES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Different values of C1 to C26 in the whole set."""

BATCH = 1024
WRITTEN_AT_ONCE = 200_000


def write_rows(path: Path, num_rows: int) -> None:
    """Write rows shaped like Criteo's: few values are frequent, and most are rare."""
    generator = np.random.default_rng(0)
    real = _read_sample(Path(os.environ["SPLITVEIL_DATA"]) / "criteo" / "criteo.tsv.gz")
    with path.open("wb") as file:
        for start in range(0, num_rows, WRITTEN_AT_ONCE):
            count = min(WRITTEN_AT_ONCE, num_rows - start)
            rows = real.take(generator.integers(0, len(real), count))
            columns = rows.columns[:14]
            empty = [pc.equal(column, "").to_numpy() for column in rows.columns[14:]]
            for size, is_empty in zip(CARDINALITIES, empty, strict=True):
                # Uniform to the power of 4: about as many different values as in the real file.
                codes = (size * generator.random(count) ** 4).astype(np.uint64)
                codes = (codes * np.uint64(2_654_435_761)) % np.uint64(2**32)
                text = _hexadecimal(codes)
                columns.append(pc.if_else(is_empty, "", text) if is_empty.any() else text)
            table = pa.table(columns, NAMES)
            options = arrow_csv.WriteOptions(
                include_header=False, delimiter="\t", quoting_style="none"
            )
            arrow_csv.write_csv(table, file, options)


def _read_sample(path: Path) -> Any:
    return arrow_csv.read_csv(
        path,
        arrow_csv.ReadOptions(column_names=NAMES),
        arrow_csv.ParseOptions(delimiter="\t"),
        arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(NAMES, pa.string()), strings_can_be_null=False
        ),
    ).combine_chunks()


def _hexadecimal(codes: Any) -> pa.Array:
    ends = pa.py_buffer(np.arange(0, 8 * len(codes) + 1, 8, dtype=np.int32))
    text = pa.py_buffer(codes.astype(">u4").tobytes().hex().encode())
    return pa.Array.from_buffers(pa.string(), len(codes), [None, ends, text])


NAMES = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def settings(folder: Path) -> DataSettings:
    path, cache = str(folder / "train.tsv"), str(folder / "cache")
    source = {"kind": "csv", "path": path, "column_names": NAMES, "cache_dir": cache}
    numbers = {"numeric": "I*", "missing_numeric": "zero", "signed_log1p": True}
    features = {**numbers, "numeric_scaling": "min_max", "categorical": "C*", "min_count": 10}
    given = {"source": source, "label_column": "label", "features": features}
    return DataSettings.model_validate(given)


class Memory:
    """The most that this process holds, looked at 50 times a second."""

    def __init__(self) -> None:
        self.own_gib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> "Memory":
        self._over.set()
        self._thread.join()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.own_gib = max(self.own_gib, status_mib("self", "RssAnon") / 1024)


def measured_conversion(folder: Path) -> tuple[float, ...]:
    memory, start, cpu = Memory(), time.perf_counter(), time.process_time()
    table = open_converted(settings(folder), Path(), lambda _: None)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    memory.stop()
    return len(table), wall_s, cpu_s, memory.own_gib


def measured_reading(folder: Path) -> tuple[float, ...]:
    torch.set_num_threads(1)
    data = PartyData.load(settings(folder), Path())
    features = data.settings.features
    if features is None or not data.table.is_on_disk:
        raise TypeError("the settings name features and a cache")
    memory, cpu = Memory(), time.process_time()
    encoder = FeatureEncoder.fit(features, data.table, np.arange(len(data.ids)))
    fit_s = time.process_time() - cpu
    encode = RowEncoder(encoder, data.table)
    order = np.random.default_rng(1).permutation(len(data.ids))
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    done, cpu = 0, time.process_time()
    for batch in batches:
        done += len(encode(batch))
        if time.process_time() - cpu > 10:
            break
    speed = done / (time.process_time() - cpu)
    memory.stop()
    return fit_s, speed, memory.own_gib, sum(encoder.shapes.vocabulary_sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--folder", type=Path, help="where the file is kept; else a temporary one")
    arguments = parser.parse_args()
    print_environment("pyarrow")
    folder = arguments.folder or Path(tempfile.mkdtemp())
    try:
        folder.mkdir(exist_ok=True)
        path = folder / "train.tsv"
        if not path.is_file():
            write_rows(path, arguments.rows)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        report(folder, path)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


def report(folder: Path, path: Path) -> None:
    num_rows, wall_s, cpu_s, own_gib = in_a_process(measured_conversion, folder)
    kept = sum(file.stat().st_size for file in (folder / "cache").glob("train*/*"))
    print(
        f"convert: {num_rows:,} rows, {path.stat().st_size / 2**20:,.0f} MiB of text to "
        f"{kept / 2**20:,.0f} MiB: {wall_s:.1f} s, {num_rows / wall_s:,.0f} rows/s, "
        f"{num_rows / cpu_s:,.0f} rows per CPU second"
    )
    print(f"  most memory: {own_gib:.2f} GiB own")
    fit_s, speed, own_gib, slots = in_a_process(measured_reading, folder)
    print(
        f"fit: {num_rows / fit_s:,.0f} rows per CPU second, {slots:,} slots seen 10 times or more"
    )
    print(
        f"read and encode: {speed:,.0f} rows per CPU second in batches of {BATCH} in a random "
        f"order; most memory {own_gib:.2f} GiB own"
    )


if __name__ == "__main__":
    main()

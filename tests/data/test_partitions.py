"""The example that divides both parties' tables into parts which meet each other."""

from hashlib import md5
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from splitveil.deploy.examples.partitions import split


def test_an_id_is_in_the_part_of_its_digest_whatever_file_it_comes_from(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    ids = [f"{number:03d}" for number in range(60)]
    tables = {"own.csv": ids[:40], "other.parquet": ids[20:][::-1]}
    for file, some in tables.items():
        rows = pa.table({"the id": some, "x": [int(one) for one in some]})
        write = csv.write_csv if file.endswith("csv") else parquet.write_table
        write(rows, tmp_path / file)
        split(str(tmp_path / file), "the id", str(tmp_path / f"{file} parts"), 3)
        for part in range(3):
            found = parquet.read_table(tmp_path / f"{file} parts" / f"{part}.parquet")
            wanted = [one for one in some if int(md5(one.encode()).hexdigest()[:8], 16) % 3 == part]  # noqa: S324
            assert found["the id"].to_pylist() == wanted
            assert [int(x) for x in found["x"].to_pylist()] == [int(one) for one in wanted]

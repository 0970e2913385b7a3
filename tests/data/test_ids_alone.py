"""Ids that are read for an alignment without a training: compact, and the same as for a run."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from splitveil.common.data import kinds, table
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.stored_ids import StoredIds
from splitveil.common.party.party_data import PartyData, read_ids_alone
from splitveil.common.run.contract import ColumnSplit
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule, TextId

NUM_ROWS = 700
SPLITS = ["train", "validation", "test"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_ROWS_AT_ONCE", 64)
    monkeypatch.setattr(kinds, "_SMALL_BYTES", 4096)


def people() -> dict[str, list[Any]]:
    order = np.random.default_rng(5).permutation(NUM_ROWS).tolist()
    return {
        "note": ["n" * (number % 50) for number in order],
        "id": [f"Zo\u00eb {number}" if number % 3 else f" person-{number} " for number in order],
        "split": [SPLITS[number % 3] for number in order],
    }


def settings(path: Path, columns: dict[str, list[Any]], **given: Any) -> DataSettings:
    table = pa.table(columns)
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path, row_group_size=100)
    source = {"kind": path.suffix[1:], "path": path.name}
    data = {"source": source, "id_column": "id", "features": {"numeric": "x"}} | given
    return DataSettings.model_validate(data).model_copy(update={"features": None})


def both(
    folder: Path, data: DataSettings, rules: list[IdRule] | None = None
) -> tuple[PartyData, PartyData]:
    split, id_rules = (
        ColumnSplit(kind="column", column="split"),
        AS_WRITTEN if rules is None else rules,
    )
    return (
        read_ids_alone(data, folder, split, id_rules),
        PartyData.load(data, folder, split, id_rules),
    )


def assert_same(alone: PartyData, whole: PartyData) -> None:
    assert isinstance(alone.ids, StoredIds)
    assert list(alone.ids) == list(whole.ids)
    assert [alone.ids[row] for row in (0, 5, -1)] == [whole.ids[row] for row in (0, 5, -1)]
    kept = [None if data.kept is None else data.kept.tolist() for data in (alone, whole)]
    assert kept[0] == kept[1]
    assert alone.table.splits is not None
    assert whole.table.splits is not None
    assert alone.table.splits.tolist() == whole.table.splits.tolist()
    assert alone.table.id_report == whole.table.id_report
    assert alone.table.source == whole.table.source


def test_rows_without_an_id_and_repeated_ids_are_left_out_alike(tmp_path: Path) -> None:
    """Some repeat an id of an earlier part, in other words or in the same."""
    columns = people()
    ids = columns["id"]
    ids[650], ids[651], ids[652] = ids[3], f"  {ids[4]}", ids[651]
    ids[80], ids[81] = "", ids[79]
    data = settings(
        tmp_path / "people.csv", columns, duplicate_ids="first", unusable_ids="leave_out"
    )
    alone, whole = both(tmp_path, data, [TextId(fold_case=True)])
    assert_same(alone, whole)
    assert alone.table.id_report.left_out == NUM_ROWS - len(alone.ids) == 4


def test_a_row_that_is_longer_than_a_part_is_read(tmp_path: Path) -> None:
    columns = people()
    columns["note"][333] = "long" * 5000
    alone, whole = both(tmp_path, settings(tmp_path / "people.csv", columns))
    assert_same(alone, whole)


def test_ids_alone_take_their_bytes_and_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    num_rows = 120_000
    data = settings(tmp_path / "people.csv", {"id": [f"person-{n:09d}" for n in range(num_rows)]})

    def peak(read: Any) -> int:
        tracemalloc.start()
        try:
            found = read(data, tmp_path, None, AS_WRITTEN)
            assert len(found.ids) == num_rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    alone, whole = peak(read_ids_alone), peak(PartyData.load)
    assert alone < 100 * num_rows
    assert whole > 1.5 * alone, (alone, whole)

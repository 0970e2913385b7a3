"""Rows found by their ids, lists of ids, a limited rate, and blocks whose size changes no bit."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from torch import nn

from splitveil.common.data import stored_ids
from splitveil.common.data.features import Features
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.source_settings import CsvSource, ParquetSource
from splitveil.common.data.stored_ids import ABSENT, IdIndex, RowNumbers, StoredIds
from splitveil.common.data.table_files import read_id_list, source_of
from splitveil.common.errors import DataError
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.run.id_rules import TextId
from splitveil.passive_party.predict.service import Throttle


def stored(ids: list[str]) -> StoredIds:
    texts = [text.encode() for text in ids]
    text = np.frombuffer(b"".join(texts), np.uint8)
    return StoredIds(text, np.cumsum([0, *map(len, texts)]).astype(np.int64))


NAMES = st.lists(st.text("abä漢", min_size=1, max_size=4), min_size=1, max_size=40, unique=True)


@given(NAMES, st.lists(st.text("abä漢", max_size=4), max_size=40), st.booleans())
def test_an_index_finds_what_a_dictionary_finds(
    ids: list[str], asked: list[str], on_disk: bool
) -> None:
    row_of = {name: row for row, name in enumerate(ids)}
    wanted = [*asked, *ids[::2]]
    found = IdIndex(stored(ids) if on_disk else ids).rows_of(wanted)
    assert found.tolist() == [row_of.get(name, ABSENT) for name in wanted]


@pytest.mark.parametrize("on_disk", [True, False])
def test_equal_hashes_of_different_ids_confuse_nothing(
    monkeypatch: pytest.MonkeyPatch, on_disk: bool
) -> None:
    def hashes(ids: list[str]) -> np.ndarray:
        return np.array([len(text) for text in ids], np.int64)

    monkeypatch.setattr(stored_ids, "_hashes", hashes)
    ids = ["a", "b", "cc", "dd", "ee", "fff"]
    index = IdIndex(stored(ids) if on_disk else ids)
    assert index.rows_of(["dd", "b", "zz", "ee", "a", "gggg", "fff"]).tolist() == [
        *(3, 1, ABSENT, 4, 0, ABSENT, 5)
    ]


def test_row_numbers_are_ids_too() -> None:
    index = IdIndex(RowNumbers(5))
    assert index.rows_of(["5", "1", "0", "6", "01"]).tolist() == [4, 0, ABSENT, ABSENT, ABSENT]


def by(id_column: str | None) -> DataSettings:
    source = CsvSource(kind="csv", path="rows.csv")
    return DataSettings(source=source, id_column=id_column, label_column="y")


def test_a_list_of_ids_is_joined_by_the_ids_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ids.parquet"
    cells = {
        "id": pa.array([17, 3, None, 3]),
        "float": pa.array([7.0, None, 1.0, 2.0]),
        "text": pa.array(["A ", None, "a", "B"]),
        "bytes": pa.array([b"A", b" ", b"b", b"A"]),
    }
    parquet.write_table(pa.table(cells), path)
    lower = (TextId(fold_case=True, whole_numbers=True),)
    for name, canonical, written in (
        ("id", ["17", "3", "3"], cells["id"].drop_null()),
        ("float", ["7", "1", "2"], cells["float"].drop_null()),
        ("text", ["a", "a", "b"], ["A ", "a", "B"]),
        ("bytes", ["a", "b", "a"], ["A", "b", "A"]),
    ):
        leave_out = by(name).model_copy(update={"unusable_ids": "leave_out"})
        found = read_id_list(path, leave_out, lower)
        assert found.ids == canonical
        assert found.written.equals(pa.table({"id": written}))
        with pytest.raises(DataError, match=r"no id in row \d"):
            read_id_list(path, by(name), lower)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("empty.txt", "\n\n", "there are no ids"),
        ("gap.txt", "a\n\nb\n", "no id in row 2"),
        ("gap.csv", "id\na\n''\n \nb\n", "no id in row 3"),
        ("other.csv", "key\na\n", "there is no column 'id'"),
    ],
)
def test_a_list_without_ids_is_refused(tmp_path: Path, name: str, content: str, why: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=why):
        read_id_list(path, by("id"))


def test_a_table_of_another_ending_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ending in"):
        source_of(tmp_path / "rows.xlsx")
    with pytest.raises(DataError, match="no such file"):
        read_id_list(tmp_path / "absent.txt", by("id"))
    with pytest.raises(DataError, match="row number per line"):
        read_id_list(tmp_path / "ids.csv", by(None))


def test_another_table_is_read_like_the_table_of_the_settings(tmp_path: Path) -> None:
    like = CsvSource(kind="csv", path="old.csv", delimiter=";")
    path = tmp_path / "a$b.csv"
    path.write_text("id;x\n")
    same = source_of(path, like)
    assert isinstance(same, CsvSource)
    assert same.delimiter == ";"
    assert same.resolve(Path("elsewhere")) == path
    assert isinstance(source_of(tmp_path / "new.parquet", like), ParquetSource)
    compressed = source_of(tmp_path / "new.csv.gz")
    assert isinstance(compressed, CsvSource)
    assert compressed.delimiter is None


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_ids_are_answered_at_no_more_than_the_rate() -> None:
    clock = Clock()
    throttle = Throttle(10.0, clock.now, clock.sleep)
    began = clock.now_s
    for _ in range(30):
        assert throttle.wait(5, lambda: True)
    # A second's worth may be answered at once.
    assert clock.now_s - began == pytest.approx(30 * 5 / 10 - 1.0)
    clock.now_s += 1000
    quiet = clock.now_s
    for _ in range(4):
        throttle.wait(5, lambda: True)
    assert clock.now_s - quiet == pytest.approx(4 * 5 / 10 - 1.0)


def test_nobody_is_waited_for_who_has_left() -> None:
    clock = Clock()
    throttle = Throttle(1.0, clock.now, clock.sleep)
    assert not throttle.wait(100, lambda: clock.now_s < 1005)
    assert clock.now_s < 1006


def test_requests_are_small_enough_for_the_rate() -> None:
    assert Throttle(None).most_ids(4096, 5) == 4096
    assert Throttle(100.0).most_ids(4096, 5) == 500
    assert Throttle(0.01).most_ids(4096, 5) == 1


def test_blocks_take_features_and_nothing_as_a_model_does() -> None:
    class Two(nn.Module):
        def forward(self, activation: torch.Tensor, own: Features | None) -> torch.Tensor:
            total = activation.sum(dim=1)
            return total if own is None or own.numeric is None else total + own.numeric[:, 0]

    rows = torch.arange(600.0).view(300, 2)
    own = Features(numeric=torch.ones(300, 1))
    assert torch.equal(predict_in_blocks(Two(), rows, None), rows.sum(dim=1))
    assert torch.equal(predict_in_blocks(Two(), rows, own), rows.sum(dim=1) + 1)
    assert len(predict_in_blocks(Two(), rows[:0], None)) == 0


@pytest.mark.parametrize("every", [1, 4, 100, 300])
def test_a_row_has_the_same_bits_where_places_of_a_block_differ(every: int) -> None:
    """This model does to the rows of a block what some libraries do on some processors."""

    class Placed(nn.Module):
        def forward(self, activation: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = activation.sum(dim=1)
            other = torch.arange(len(total)) % every > 0
            return torch.where(other, torch.nextafter(total, total + 1), total)

    rows = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    model = Placed()
    together = predict_in_blocks(model, rows)
    alone = torch.cat([predict_in_blocks(model, one) for one in torch.split(rows, 1)])
    assert torch.equal(together, alone)
    assert torch.equal(together[17:290], predict_in_blocks(model, rows[17:290]))
    assert torch.equal(alone, torch.cat([one.sum(dim=1) for one in torch.split(rows, 1)]))

"""A party's file of any kind becomes checked columns; bad files are explained."""

import csv
import gzip
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from splitveil.common.data import converted as converted_module
from splitveil.common.data import sources
from splitveil.common.data.csv_file import CsvFile, TextForm
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import Table, read_table
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.settings import validate

ROWS = 'id,y,x0,x1,city\n007,1,1.5,-2,Rome\n"a,b",0,2.5,3e1,\nZoë,1, 4 ,0,Oslo\n'
FEATURES = {"numeric": "x*", "categorical": "city"}
NAMED = {"id_column": "id", "label_column": "y"}


def data_settings(**values: Any) -> DataSettings:
    return validate(DataSettings, values, "settings")


def read_csv(folder: Path, text: str, name: str = "rows.csv", **values: Any) -> Table:
    (folder / name).write_text(text, encoding="utf-8")
    source = {"kind": "csv", "path": name, **values.pop("source", {})}
    return read_table(data_settings(source=source, **values), folder)


def categories(table: Table, name: str) -> list[str | None]:
    codes, texts = table.categorical[name]
    return [None if code < 0 else texts[int(code)].as_py() for code in codes]


def test_file_without_header_and_ids_is_numbered_from_one(tmp_path: Path) -> None:
    table = read_csv(
        tmp_path,
        "0\t1\t\t68fd1e64\n1\t\t-3\t\n",
        name="criteo.tsv",
        source={"column_names": ["label", "I1", "I2", "C1"]},
        label_column="label",
        features={"numeric": "I*", "categorical": "C*", "missing_numeric": "zero"},
    )
    assert list(table.ids) == ["1", "2"]
    assert table.numeric["I1"].tolist() == [1, 0]
    assert table.numeric["I2"].tolist() == [0, -3]
    assert categories(table, "C1") == ["68fd1e64", None]


Rows = list[tuple[str, ...]]


def in_memory(file: CsvFile, names: list[str], folder: Path) -> Rows:
    return list(zip(*(column.to_pylist() for column in file.read(names).values()), strict=True))


def converted(file: CsvFile, names: list[str], folder: Path) -> Rows:
    """Read the text as categories, which have no white space around them."""
    source = {"kind": "csv", "path": "unused", "cache_dir": "cache"}
    chosen = {"categorical": names, "missing_texts": []}
    (folder / "cache").mkdir()
    with mock.patch.object(converted_module, "sync"):
        converted_module.convert(
            data_settings(source=source, features=chosen), file, folder / "cache", lambda _: None
        )
    table = converted_module._open(folder / "cache")
    return list(zip(*(categories(table, name) for name in names), strict=True))


@settings(max_examples=400)
@given(
    text=st.text("\",;\tnr|aé\\' ", min_size=50, max_size=200),  # n, r: line breaks; |: ends a cell
    width=st.integers(1, 3),
    line_end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252"]),
    delimiter=st.sampled_from(",;\t"),
    more=st.integers(5, 100),
    ending=st.sampled_from(["csv", "csv.gz"]),
    num_parts=st.sampled_from([1, 1, 3]),
    marks=st.sampled_from([{}, {}, {"quotechar": "'"}, {"escapechar": "\\", "doublequote": False}]),
    read=st.sampled_from([in_memory, in_memory, converted]),
)
def test_rows_are_those_of_python_s_csv_wherever_a_block_ends(
    text: str,
    width: int,
    line_end: str,
    quoting: Any,
    encoding: str,
    delimiter: str,
    more: int,
    ending: str,
    num_parts: int,
    marks: dict[str, Any],
    read: Callable[[CsvFile, list[str], Path], Rows],
) -> None:
    cells = text.replace("n", "\n").replace("r", "\r\r\n").split("|")
    rows = list(itertools.zip_longest(*[iter(cells)] * width, fillvalue=""))
    names, longest, expected = list("abc")[:width], 0, Rows()
    with TemporaryDirectory() as made:
        folder = Path(made)
        for part in range(num_parts):
            some = rows[part * len(rows) // num_parts : (part + 1) * len(rows) // num_parts]
            written = io.StringIO()
            writer = csv.writer(
                written, lineterminator=line_end, quoting=quoting, delimiter=delimiter, **marks
            )
            longest = max(longest, *(writer.writerow(row) for row in [names, *some]))
            data = written.getvalue().encode(encoding)
            path = folder / f"part-{part}.{ending}"
            path.write_bytes(gzip.compress(data) if ending == "csv.gz" else data)
            found = csv.reader(
                io.StringIO(written.getvalue(), newline=""), delimiter=delimiter, **marks
            )
            expected += map(tuple, list(found)[1:])
        form = TextForm(encoding, marks.get("quotechar", '"'), marks.get("escapechar"))
        file = CsvFile(folder / "part-*", delimiter, None, form)
        file = file.in_blocks_of(longest + text.count("é") + more)
        if read is converted:
            expected = [tuple(cell.strip() for cell in row) for row in expected]
        assert read(file, names, folder) == expected


def test_columns_of_parquet_may_have_any_type(tmp_path: Path) -> None:
    uuid = UUID(int=7)
    json = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(["7", "8", "9"]))
    columns = {
        "id": pa.array([7, 2**63 + 1, 9], pa.uint64()),
        "y": pa.array([True, False, True]),
        "x0": pa.array([1, 2, 3], pa.int8()),
        "x1": pa.array(["1.5", "2", "-3"]).dictionary_encode(),
        "x2": pa.array(["1.5", "2", "-3"], pa.string_view()),
        "x3": json,
        "city": pa.array(["Rome", None, "Oslo"]).dictionary_encode(),
        "device": pa.array([uuid.bytes, None, uuid.bytes], pa.uuid()),
    }
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    source = {"kind": "parquet", "path": "rows.parquet"}
    features = {**FEATURES, "lists": "device"}
    table = read_table(data_settings(source=source, **NAMED, features=features), tmp_path)
    assert list(table.ids) == ["7", "9223372036854775809", "9"]
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]
    found = [column.tolist() for column in table.numeric.values()]
    assert found == [[1, 2, 3], [1.5, 2, -3], [1.5, 2, -3], [7, 8, 9]]
    assert categories(table, "city") == ["Rome", None, "Oslo"]
    assert table.lists["device"].categories.to_pylist() == [str(uuid)]


def test_scikit_learn_rows_differ_in_order_only() -> None:
    def read(seed: int) -> dict[str, tuple[float, ...]]:
        source = {"kind": "sklearn", "dataset": "breast_cancer", "shuffle_seed": seed}
        named = {"id_column": "id", "label_column": "malignant"}
        features = {"numeric": ["mean_*", "worst_*"]}
        table = read_table(data_settings(source=source, **named, features=features), Path())
        assert len(table.numeric) == 20
        assert table.labels is not None
        assert table.labels.sum() == 212
        cells = zip(table.labels.tolist(), table.numeric["mean_radius"].tolist(), strict=True)
        return dict(zip(table.ids, cells, strict=True))

    first, second = read(1), read(2)
    assert first == second
    assert list(first) != list(second)
    assert sorted(first) == [f"patient-{row:04d}" for row in range(569)]


def test_a_name_goes_before_a_pattern_and_a_pattern_before_the_star(tmp_path: Path) -> None:
    table = read_csv(
        tmp_path,
        "id,y,C1,C2,I1,when\n1,0,5,a,3,x\n2,1,6,b,4,y\n",
        **NAMED,
        features={"numeric": ["*", "C1"], "categorical": "C*", "exclude": "when"},
    )
    assert list(table.numeric) == ["C1", "I1"]
    assert list(table.categorical) == ["C2"]


def test_path_takes_an_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.csv").write_text(ROWS, encoding="utf-8")
    source = {"kind": "csv", "path": "${ROWS_FOLDER}/rows.csv"}
    settings = data_settings(source=source, **NAMED)
    monkeypatch.setenv("ROWS_FOLDER", str(tmp_path))
    assert len(read_table(settings, Path("/elsewhere"))) == 3
    monkeypatch.delenv("ROWS_FOLDER")
    with pytest.raises(SettingsError, match="set ROWS_FOLDER"):
        read_table(settings, tmp_path)


def bad_rows(*lines: str) -> str:
    return "id,y,x0,city\n" + "".join(f"{line}\n" for line in lines)


BAD_FILES = {
    "empty file": ("", ["empty"]),
    "header only": ("id,y,x0,city\n", ["no rows"]),
    "label outside 0 and 1": (
        bad_rows("1,0,1,a", "2,2,1,a", "3,1,1,a", "4,-1,1,a"),
        ["column 'y'", "0 or 1", "rows 2, 4 (2 in all)"],
    ),
    "label missing": (bad_rows("1,0,1,a", "2,,1,a", "3,1,1,a"), ["column 'y'", "row 2"]),
    "label is text": (
        bad_rows("1,yes,1,a", "2,no,1,a"),
        ["column 'y'", "positive_label", "rows 1, 2 (2 in all)"],
    ),
    "one class": (
        bad_rows("1,1,1,a", "2,1,1,a"),
        ["column 'y'", "all 2 labels are 1", "both classes"],
    ),
    "NaN in features": (
        bad_rows(*["1,0,,a"] * 4, "1,1,1,a", *["1,0,nan,a"] * 3),
        ["column 'x0'", "rows 1, 2, 3, 4, 6, ... (7 in all)", "missing_numeric"],
    ),
    "infinite features and a gap": (
        bad_rows("1,0,inf,a", "2,1,,a", "3,1,1e39,a"),
        ["column 'x0': infinite", "rows 1, 3 (2 in all)", "\n", "column 'x0': no number"],
    ),
    "text in a numeric column": (
        bad_rows("1,0,1,a", "2,1,1_000,a", "3,1,x,a", "4,1,+1.,a", "5,1,.5e-3,a"),
        ["column 'x0'", "expected numbers", "rows 2, 3 (2 in all)"],
    ),
    "ragged rows": (
        bad_rows("1,0,1,a", "2,1", "3,1,1,a,b", "4,1,1,a"),
        ["4 cells", "rows 2, 3 (2 in all)"],
    ),
    "misspelt": ("id,y,X0,city\n1,0,1,a\n", ["'x0'", "did you mean 'X0'"]),
    "column twice": ("y,y,x0,city,id\n0,0,1,a,1\n", ["2 columns 'y'"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_explained(tmp_path: Path, case: str) -> None:
    text, parts = BAD_FILES[case]
    with pytest.raises(DataError) as raised:
        read_csv(tmp_path, text, **NAMED, features={"numeric": "x0", "categorical": "city"})
    assert raised.value.exit_code == 3
    for part in ["rows.csv", *parts]:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("3,1,1", "expected 4 cells in every row, got another number in row 10"),
        (f'3,1,1,"{"secret " * 50}"', "row 10 is longer than 64 bytes, or a quotation mark in it"),
        ('3,1,1,"secret' + "\n4,1,1,a" * 50, "row 10 is longer than 64 bytes, or a quotation"),
    ],
)
def test_a_bad_row_after_quoted_line_breaks_is_named_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 64)
    text = bad_rows(*['1,0,1,"a\nb,\nc"'] * 9, line, "5,1,1,a")
    with pytest.raises(DataError, match=expected) as raised:
        read_csv(tmp_path, text, **NAMED, features={"numeric": "x0", "categorical": "city"})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "kind", "part"),
    [
        ("rows.csv", None, "csv", "no such file"),
        ("rows.parquet", None, "parquet", "no such file"),
        ("rows.csv.gz", b"not gzip at all", "csv", "cannot be read"),
        ("rows.csv.gz", gzip.compress(ROWS.encode() * 999)[:-9], "csv", "cannot be read"),
        ("rows.csv", b"id,y\n\xff\xfe,1\n", "csv", "UTF-8"),
        ("rows.csv", b"id,\xff\n1,1\n", "csv", "UTF-8"),
        ("rows.parquet", b"PAR1 no", "parquet", "cannot be read"),
    ],
)
def test_unreadable_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, kind: str, part: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    settings = data_settings(source={"kind": kind, "path": name}, **NAMED)
    with pytest.raises(DataError) as raised:
        read_table(settings, tmp_path)
    assert name in str(raised.value)
    assert part in str(raised.value)


IMAGES = {"kind": "images", "table": "t.csv", "file_column": "f", "size": ["4", "4"]}


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"features": {"numeric": ["x0", "y"]}}, "'y': a column is one of"),
        ({"features": {"numeric": "x*", "categorical": "*0"}}, "'x0': a column is one of"),
        ({"features": {}}, "name at least one of"),
        ({"features": {"numerik": "x0"}}, "did you mean 'numeric'"),
        ({"features": {"numeric": "x0", "missing_indicator": True}}, "missing_indicator"),
        ({"features": {"image": {}}}, "source of kind images, not csv"),
        ({"source": {"kind": "npz", "path": "x.npz"}}, "npz"),
        ({"label_column": None}, "name a label_column, features, or both"),
        ({"source": {"kind": "excel", "path": "x"}}, "excel"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, values: dict[str, Any], part: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_csv(tmp_path, ROWS, **{**NAMED, **values})
    assert part in str(raised.value)

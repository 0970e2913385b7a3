"""Text files as other programs write them are read right, or named in one line with the remedy.

``splitveil init``, and a party's ``check``, ``run``, ``align`` and ``predict``, read by one reader.
"""

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.settings import ActiveSettings
from splitveil.command.program import main as splitveil
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.source_settings import CsvSource
from splitveil.common.data.table_files import read_id_list, source_of
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData, read_ids_alone
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.id_rules import AS_WRITTEN
from splitveil.common.settings import validate
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Terms

NAMES = ["client", "churned", "age", "fee", "town"]
NAMED = {"id_column": "client", "label_column": "churned"}
ROWS = [
    [f"K{100 + i}", str(i % 2), str(30 + i), f"{i % 7 + 990}.{25 + i}", ("Köln", "Oslo")[i % 3 % 2]]
    for i in range(40)
]
IN_GERMANY = [[*row[:3], f"{row[3].replace('.', ',')}", row[4]] for row in ROWS]
WITH_THOUSANDS = [[*row[:3], f"1.{row[3].replace('.', ',')}", row[4]] for row in ROWS]
IN_CHINA = [[*row[:4], row[4].replace("Köln", "北京")] for row in ROWS]


def lines(
    rows: list[list[str]] = ROWS, delimiter: str = ",", end: str = "\n", names: list[str] = NAMES
) -> str:
    return "".join(delimiter.join(row) + end for row in [names, *rows])


def numbered(name: str, step: int = 1) -> str:
    return lines([[str(i * step), *row] for i, row in enumerate(ROWS)], names=[name, *NAMES])


ONE = "act.csv"
PARTS = {
    "act/_SUCCESS": b"",
    "act/part-00000.csv": lines(ROWS[:15]).encode(),
    "act/part-00001.csv": b"",
    "act/part-00002.csv.gz": gzip.compress(
        lines([row[::-1] for row in ROWS[15:]], names=NAMES[::-1]).encode()
    ),
}
PLAIN_PARTS = {f"act/part-{i}": lines(ROWS[9 * i : 40 * i + 9]).encode() for i in range(2)}
GERMAN = {"delimiter": ";", "decimal": ","}
SEVERAL_COMMAS = [*NAMES[:4], "town, in, any, country, or, none"]
TOWN_FIRST = [row[-1:] + row[:-1] for row in ROWS]
TWICE = [[*row, "1", "2"] for row in ROWS]

# name: the text, or files; settings of the source
READ: dict[str, tuple[bytes | dict[str, bytes], dict[str, Any]]] = {
    "UTF-16": (
        {"act.txt": lines(delimiter="\t").encode("utf-16")},
        {"path": "act.txt", "delimiter": "\t"},
    ),
    "UTF-32": (lines().encode("utf-32"), {}),
    "cp1252": (lines().encode("cp1252"), {"encoding": "cp1252"}),
    "GBK": (lines(IN_CHINA).encode("gbk"), {"encoding": "GBK"}),
    "a German spreadsheet": (lines(IN_GERMANY, ";", "\r\n").encode("utf-8-sig"), GERMAN),
    "points between thousands": (lines(WITH_THOUSANDS, ";").encode(), GERMAN),
    "sep=;": (b"\xef\xbb\xbfsep=;\r\n" + lines(delimiter=";").encode(), {}),
    "commas in names": (lines(delimiter=";", names=SEVERAL_COMMAS).encode(), {"delimiter": ";"}),
    "an unnamed index": (numbered("").encode(), {}),
    "a named index": (numbered("Unnamed: 0").encode(), {}),
    "an index of some rows": (numbered("Unnamed: 0.1", 7).encode(), {}),
    "two columns of one name": (lines(TWICE, names=[*NAMES, "x", "x"]).encode(), {}),
    "an empty first line": (b"\n" + lines().encode(), {}),
    "no ending": ({"act": lines().encode()}, {"path": "act"}),
    "parts without endings": (PLAIN_PARTS, {"path": "act"}),
    "PAR1 as in Parquet": (lines(TOWN_FIRST, names=["PAR1town", *NAMES[:4]]).encode(), {}),
    "a comma after every row": (lines(end=",\n").encode(), {}),
    "a folder": (PARTS, {"path": "act"}),
    "a pattern": (PARTS, {"path": "act/part-*"}),
}


@pytest.mark.parametrize("case", READ)
def test_what_other_programs_write_is_read(tmp_path: Path, case: str) -> None:
    text, given = READ[case]
    write(tmp_path, {ONE: text} if isinstance(text, bytes) else text)
    source = {"path": ONE, **given}
    wishes, terms = Wishes(label_column="churned"), Terms("active", tmp_path)
    encoding = {"encoding": source["encoding"]} if "encoding" in source else {}
    initialise(tmp_path / source["path"], wishes, terms, **encoding)
    written = load_party_settings(ActiveSettings, tmp_path / "active.yaml").data
    chosen = written.features
    assert chosen is not None
    assert (chosen.numeric, len(chosen.categorical)) == (("age", "fee"), 1)
    features = {"numeric": "*", "categorical": "*town*"}
    features |= {"exclude": "x"} if case == "two columns of one name" else {}
    by_hand = data_settings(source, features)
    cached = data_settings({**source, "cache_dir": "cache"}, features)
    thousand = "1" if case == "points between thousands" else ""
    for settings in (written, by_hand, cached):
        data = PartyData.load(settings, tmp_path)
        assert list(data.ids) == [row[0] for row in ROWS]
        assert data.table.labels is not None
        assert data.table.labels.tolist() == [i % 2 for i in range(40)]
        assert list(data.table.numeric) == ["age", "fee"] or case == "a folder"
        assert data.table.numeric["age"].tolist() == [30 + i for i in range(40)]
        assert data.table.numeric["fee"].tolist() == [float(thousand + row[3]) for row in ROWS]
        (towns,) = data.table.categorical.values()
        assert len(towns.categories) == 2
        assert towns.categories[0].as_py() in {"Köln", "北京"}
    alone = by_hand.model_copy(update={"features": None, "label_column": None})
    assert list(read_ids_alone(alone, tmp_path, None, AS_WRITTEN).ids) == list(data.ids)


GHOSTS = lines() + ",,,,\n" * 5
LONG = [["K1", "0", "1", "1", "x" * 10_000], *ROWS]
HEADLESS = lines(names=["K99", "1", "50", "21.25", "Oslo"])
SET = "set data.source.encoding (with splitveil init, --encoding) to the text's encoding, such as"
PART = b"client,churned,age\nK1,0,1\n"

# name: text, what init and a check say of it
BY_ITS_TEXT = {
    "cp1252": (lines().encode("cp1252"), f"not UTF-8 in row 1, column 5: {SET} cp1252"),
    "cp1252 after 8 KiB": (lines(LONG).encode("cp1252"), f"not UTF-8 in row 2, column 5: {SET}"),
    "cp1252 in the names": (
        lines(names=[*NAMES[:4], "Größe"]).encode("cp1252"),
        f"not UTF-8 in the line of column names, column 5: {SET} cp1252",
    ),
    "GBK": (lines(IN_CHINA).encode("gbk"), f"not UTF-8 in row 1, column 5: {SET} gbk"),
    "UTF-16 without a mark": (
        lines().encode("utf-16-le"),
        "looks like UTF-16: set data.source.encoding to utf-16-le",
    ),
    "lines of a title": (
        f"# export\n# of March\n{lines()}".encode(),
        "the column names seem to come later: delete the 2 lines above them",
    ),
    "a title with commas": (
        f"Report, March,,,\n{lines()}".encode(),
        "the column names seem to come later: delete the line above them",
    ),
    "a spreadsheet": (b"PK\x03\x04\0\0", "is no text but a spreadsheet or zip archive: save it"),
    "Parquet": (b"PAR1\x15\x04", "is no text but a Parquet file: let its name end in .parquet"),
    "gzip": (gzip.compress(b"a,b\n"), "is no text but compressed by gzip: let its name end in .gz"),
    "a title of one cell": (f"Export,,,,\n{lines()}".encode(), "delete the line above them"),
    "rows of nothing": (GHOSTS.encode(), "last 5 rows hold nothing but delimiters: delete what"),
    "no names": (HEADLESS.encode(), "looks like data: write a line of column names above it, or"),
}

# name: text, the settings of the source, what a check says
BY_ITS_SETTINGS: dict[str, tuple[bytes, dict[str, str], str]] = {
    "encoding": (lines().encode("cp1252"), {"encoding": "ascii"}, "the text is not ascii, as data"),
    "no encoding": (b"", {"encoding": "utf-9"}, "Python knows no encoding of texts 'utf-9'"),
    "delimiter": (
        lines(delimiter=";").encode(),
        {},
        "the cells look separated by ';': set data.source.delimiter",
    ),
    "decimal commas": (
        lines(IN_GERMANY, ";").encode(),
        {"delimiter": ";"},
        "(40 in all); with data.source.decimal: ',', these are numbers",
    ),
    "decimal points": (
        lines().encode(),
        {"decimal": ","},
        "(40 in all); with data.source.decimal: '.', these are numbers",
    ),
    "an address": (
        b"",
        {"path": "s3://bucket/act.csv"},
        "s3://bucket/act.csv: only a source of kind parquet may be an address (s3://, gs://, abfs",
    ),
    "a part": (b"", {"path": "act"}, "part-2.csv: there is no column 'fee'"),
}


@pytest.mark.parametrize("case", [*BY_ITS_TEXT, *BY_ITS_SETTINGS])
def test_what_cannot_be_read_is_named_with_the_remedy(tmp_path: Path, case: str) -> None:
    text, remedy = BY_ITS_TEXT.get(case, (b"", ""))
    source: dict[str, str] = {}
    if case in BY_ITS_SETTINGS:
        text, source, remedy = BY_ITS_SETTINGS[case]
    write(tmp_path, {ONE: text, "act/part-1.csv": lines().encode(), "act/part-2.csv": PART})
    if case in BY_ITS_TEXT:
        with pytest.raises((DataError, SettingsError), match=re.escape(remedy)):
            initialise(tmp_path / ONE, Wishes(), Terms("active", tmp_path))
    features = {"numeric": ["age", "fee"], "categorical": "*"}
    for more in ({}, {"cache_dir": "cache"}):
        with pytest.raises((DataError, SettingsError), match=re.escape(remedy)) as raised:
            PartyData.load(data_settings({"path": ONE, **source, **more}, features), tmp_path)
        assert "K10" not in str(raised.value)


def test_a_party_s_own_command_gives_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {ONE: lines(delimiter=";").encode()})
    for words, remedy in (
        (["init", "active", "s3://bucket/act.csv"], "s3://bucket/act.csv: expected a file of this"),
        (["init", "active", str(tmp_path / ONE), "--delimiter", ","], "look separated by ';'"),
    ):
        with pytest.raises(SystemExit):
            splitveil([*words, "--folder", str(tmp_path)])
        assert remedy in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ids.txt", '\ufeff"a"\r\n"b"\r\n'),
        ("ids.txt", ' "a"\n"b" \n\n'),
        ("ids.txt", " a\nb \n\n\n"),
        ("ids.csv", "client;note\na;1\nb;2\n"),
        ("ids.csv", "sep=;\nclient;note\na;1\nb;2\n"),
        ("ids.tsv", "client,note\na,1\nb,2\n"),
    ],
)
def test_a_list_of_ids_is_read_however_it_is_written(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    settings = data_settings({"path": "unused.csv"}, None)
    assert read_id_list(tmp_path / name, settings).ids == ["a", "b"]


def test_another_table_is_read_with_its_own_delimiter(tmp_path: Path) -> None:
    write(tmp_path, {"new.csv": lines(IN_GERMANY, ";").encode()})
    source = source_of(tmp_path / "new.csv", CsvSource(kind="csv", path="old.csv", decimal=","))
    settings = DataSettings(source=source, **NAMED, features={"numeric": ["fee"]})
    found = PartyData.load(settings, tmp_path).table.numeric["fee"]
    assert found.tolist() == [float(row[3]) for row in ROWS]


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def data_settings(source: dict[str, Any], features: Any) -> DataSettings:
    values = {"source": {"kind": "csv", **source}, **NAMED, "features": features}
    return validate(DataSettings, values, "settings")

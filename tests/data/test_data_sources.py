"""Rows that come from several files, from an object store or from a database equal those of a file.

The object store is moto's server for S3, in a thread of this process.
"""

import itertools
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adbc_driver_sqlite
import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, fs, parquet

from splitveil.common.data import sources
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.kinds import open_source
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.source_settings import ParquetSource
from splitveil.common.data.sources import unreadable_is_data_error
from splitveil.common.data.table import read_table
from splitveil.common.data.table_files import source_of
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.settings import validate

COUNT = 500
FEATURES = {"numeric": "n*", "categorical": "c*"}
KEYS = {"access_key": "key-7431", "secret_key": "secret-8842"}


def rows(count: int = COUNT) -> Any:
    generator = np.random.default_rng(5)
    return pa.table(
        {
            "id": [f"p{row * 7919 % 10007:05d}" for row in range(count)],
            "label": (generator.random(count) < 0.3).astype(np.int64),
            "n1": generator.normal(size=count),
            "n2": generator.integers(0, 9, count),
            "c1": [f"w{int(value)}" for value in generator.exponential(size=count) * 5],
        }
    )


def settings(source: dict[str, Any], **values: Any) -> DataSettings:
    own = {"id_column": "id", "label_column": "label", "features": FEATURES, **values}
    return validate(DataSettings, {"source": source, **own}, "data")


def write_parts(folder: Path, table: Any, count: int = 7) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ends = sorted({0, 3, len(table), *range(0, len(table), len(table) // count)})
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        parquet.write_table(table.slice(start, end - start), folder / f"part-{number:03d}.parquet")
    parquet.write_table(table.slice(0, 0), folder / "part-002-none.parquet")


def digest(source: dict[str, Any], folder: Path, **values: Any) -> str:
    """Return the digest of everything that a run reads: ids, labels, scalers, vocabularies."""
    data = PartyData.load(settings(source, **values), folder)
    encoder = data.fit(np.arange(0, len(data.ids), 2))
    assert encoder is not None
    encoded = encoder.transform(data.table, np.arange(len(data.ids)))
    assert encoded.numeric is not None
    assert encoded.categorical is not None
    tensors = (encoded.numeric.numpy().tobytes(), encoded.categorical.numpy().tobytes())
    return data.digest(encoder) + str(hash(tensors))


@pytest.fixture
def one_file(tmp_path: Path) -> str:
    """Write the table as a single file, and return the digest of what is read from it."""
    parquet.write_table(rows(), tmp_path / "rows.parquet")
    return digest({"kind": "parquet", "path": "rows.parquet"}, tmp_path)


# ---- several files ----


@pytest.mark.parametrize("path", ["parts", "parts/", "parts/part-*", "p*/part-???*.parquet", "**"])
@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_a_folder_or_pattern_equals_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_file: str, path: str, cache: dict[str, str]
) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 64)
    write_parts(tmp_path / "all" / "parts", rows())
    for name in ("_SUCCESS", ".part-000.parquet.crc"):
        (tmp_path / "all" / "parts" / name).write_text("no part")
    path = "all/**/*" if path == "**" else f"all/{path}"
    assert digest({"kind": "parquet", "path": path, **cache}, tmp_path) == one_file


def test_the_parts_follow_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b/1", "a/2", "a/10", "a-1/1"):
        path = tmp_path / "parts" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"id": [name], "n1": [1.0]}), path)
    source = {"kind": "parquet", "path": "parts"}
    table = read_table(settings(source, label_column=None, features={"numeric": "n1"}), tmp_path)
    assert list(table.ids) == ["a/10", "a/2", "a-1/1", "b/1"]


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_folders_of_partitions_are_columns_of_text(tmp_path: Path, cache: dict[str, str]) -> None:
    folders = ("zip=007/day=1", "zip=7/day=2", "zip=a%20b/day=__HIVE_DEFAULT_PARTITION__")
    for number, folder in enumerate(folders):
        path = tmp_path / "parts" / folder / "x.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pa.table({"id": [f"{number}", f"{number}b"]}), path)
    chosen = settings(
        {"kind": "parquet", "path": "parts", **cache},
        label_column=None,
        features={"categorical": "zip", "numeric": "day", "missing_numeric": "zero"},
    )
    table = PartyData.load(chosen, tmp_path).table
    column = table.categorical["zip"]
    texts = column.categories.take(pa.array(column.codes)).to_pylist()
    assert texts == ["007", "007", "7", "7", "a b", "a b"]
    assert table.numeric["day"].tolist() == [1, 1, 2, 2, 0, 0]


def test_a_path_of_a_command_line_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(DataError, match="expected a path in UTF-8"):
        source_of(Path("\udcff.parquet"))


def test_a_file_that_says_it_has_no_rows_is_read_to_its_end(tmp_path: Path) -> None:
    path, count = tmp_path / "rows.parquet", 70_001
    parquet.write_table(pa.table({"id": pa.array(range(count))}), path, row_group_size=40_000)
    said = b"\xe2\xc5\x08"  # this count, as Thrift writes it
    head, found, tail = path.read_bytes().rpartition(said)
    path.write_bytes(head + b"\x80\x80\x00" + tail)
    assert found
    assert parquet.read_metadata(path).num_rows == 0
    source = ParquetSource(kind="parquet", path=str(path))
    parts = list(open_source(source, tmp_path).parts(["id"]))
    assert sum(len(part.columns["id"]) for part in parts) == count
    assert parts[-1].done_fraction == 1


def test_a_part_without_any_value_has_the_type_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    empty, full = pa.array([None, None]), pa.array([2.5, 3.5])
    for number, column in enumerate((empty, full)):
        ids = [f"{number}", f"{number}b"]
        parquet.write_table(pa.table({"id": ids, "n1": column}), tmp_path / f"parts/{number}")
    for cache in ({}, {"cache_dir": "cache"}):
        chosen = settings(
            {"kind": "parquet", "path": "parts", **cache},
            label_column=None,
            features={"numeric": "n1", "missing_numeric": "zero"},
        )
        assert PartyData.load(chosen, tmp_path).table.numeric["n1"].tolist() == [0, 0, 2.5, 3.5]


def converted_folders(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").iterdir() if path.is_dir()}


@pytest.mark.parametrize("change", ["rewritten", "added", "removed", "renamed"])
def test_the_converted_columns_notice_a_change_of_any_part(tmp_path: Path, change: str) -> None:
    parts = tmp_path / "parts"
    write_parts(parts, rows())
    source = {"kind": "parquet", "path": "parts", "cache_dir": "cache"}
    before = digest(source, tmp_path)
    assert digest(source, tmp_path) == before
    (first,) = converted_folders(tmp_path)
    last = max(parts.iterdir())
    if change == "rewritten":
        found = last.stat()
        os.utime(last, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    elif change == "added":
        one = rows(1).set_column(0, "id", pa.array(["new"]))
        parquet.write_table(one, parts / "part-9.parquet")
    elif change == "removed":
        last.unlink()
    else:
        last.rename(parts / "a-first.parquet")
    after = digest(source, tmp_path)
    assert (after == before) == (change == "rewritten")
    assert len(converted_folders(tmp_path) - {first}) == 1


def rewrite(parts: Path, table: Any) -> None:
    parquet.write_table(table, parts / "part-001.parquet")


def emptied(parts: Path) -> None:
    for path in parts.iterdir():
        path.unlink()


BAD_FOLDERS: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "a column is missing": (
        "parts",
        lambda parts: rewrite(parts, rows(3).drop_columns(["n2"])),
        ["'n2' is missing in 1 of", "part-001.parquet"],
    ),
    "types differ": (
        "parts",
        lambda parts: rewrite(parts, rows(3).set_column(3, "n2", pa.array([1.5] * 3))),
        ["'n2' has several types: int64", "double", "part-001"],
    ),
    "an empty folder": ("parts", emptied, ["parts", "found none"]),
    "no folder": ("parts", shutil.rmtree, ["parts", "there is no such file"]),
    "no match": ("parts/*.pq", lambda parts: None, ["parts/*.pq", "no file matches"]),
    "another file": (
        "parts",
        lambda parts: (parts / "part-1.txt").write_text("secret text"),
        ["part-1.txt", "cannot be read"],
    ),
    "a pipe": ("parts", lambda parts: os.mkfifo(parts / "part-1"), ["part-1", "regular file"]),
    "folders that differ": (
        "parts",
        lambda parts: write_parts(parts / "year=1", rows(9)),
        ["NAME=VALUE", "'year'", "part-000.parquet"],
    ),
}


@pytest.mark.parametrize("what", BAD_FOLDERS)
@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_a_bad_folder_is_refused(tmp_path: Path, what: str, cache: dict[str, str]) -> None:
    path, spoil, expected = BAD_FOLDERS[what]
    write_parts(tmp_path / "parts", rows())
    spoil(tmp_path / "parts")
    with pytest.raises(DataError) as refused:
        PartyData.load(settings({"kind": "parquet", "path": path, **cache}), tmp_path)
    for text in expected:
        assert text in str(refused.value)
    assert "secret text" not in str(refused.value)


def test_a_column_that_is_not_used_may_differ(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", rows())
    table = rows(3).append_column("unused", pa.array([1, 2, 3]))
    parquet.write_table(table.slice(0, 0), tmp_path / "parts" / "part-9.parquet")
    assert len(PartyData.load(settings({"kind": "parquet", "path": "parts"}), tmp_path).ids) == 500


# ---- an object store ----


class Bucket:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        scheme, _, host = endpoint.partition("://")
        self.files = fs.S3FileSystem(
            scheme=scheme, endpoint_override=host, allow_bucket_creation=True, **KEYS
        )
        self.files.create_dir("bucket")

    def upload(self, folder: Path, name: str) -> None:
        fs.copy_files(str(folder), f"bucket/{name}", destination_filesystem=self.files)

    def source(self, path: str, **values: Any) -> dict[str, Any]:
        store = {"endpoint": self.endpoint}
        return {"kind": "parquet", "path": f"s3://{path}", "store": store, **values}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_key"])
    return Bucket(server)


def test_an_object_store_gives_the_same_bits_as_a_file(
    tmp_path: Path, bucket: Bucket, one_file: str
) -> None:
    write_parts(tmp_path / "parts", rows())
    bucket.upload(tmp_path / "parts", "same/parts")
    bucket.upload(tmp_path / "rows.parquet", "same/rows.parquet")
    for path in (
        "rows.parquet",
        "parts",
        "parts/part-*",
        "**/part-*",
        "p*/**",
        "**/parts/part-[0-9]*",
    ):
        assert digest(bucket.source(f"bucket/same/{path}"), tmp_path) == one_file
    cached = bucket.source("bucket/same/parts", cache_dir="cache")
    assert digest(cached, tmp_path) == one_file
    (before,) = converted_folders(tmp_path)
    bucket.files.delete_file("bucket/same/parts/part-000.parquet")
    assert digest(cached, tmp_path) != one_file
    assert len(converted_folders(tmp_path) - {before}) == 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("absent/rows", "NO_SUCH_BUCKET"),
        ("bucket/absent.parquet", "s3://bucket/absent.parquet"),
        ("bucket/absent/*.parquet", "s3://bucket/absent/"),
    ],
)
def test_a_bucket_that_cannot_be_read_is_refused(
    tmp_path: Path, bucket: Bucket, path: str, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        PartyData.load(settings(bucket.source(path)), tmp_path)


# ---- a database ----


def write_database(path: Path, table: Any) -> None:
    database: Any = duckdb.connect(path) if path.suffix == ".duckdb" else sqlite3.connect(path)
    database.execute("create table people (id text, label int, n1 double, n2 int, c1 text)")
    insert = "insert into people values (?, ?, ?, ?, ?)"
    database.executemany(insert, [tuple(row.values()) for row in table.to_pylist()])
    database.commit()
    database.close()


def query(driver: str = "sqlite", **values: Any) -> dict[str, Any]:
    own = {"uri": f"people.{driver}", "query": "select * from people"}
    return {"kind": "sql", "driver": driver, **own, **values}


@pytest.mark.parametrize("driver", ["sqlite", "duckdb"])
@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_a_query_gives_the_same_bits_as_a_file_and_notices_a_change(
    tmp_path: Path, one_file: str, driver: str, cache: dict[str, str]
) -> None:
    path = tmp_path / f"people.{driver}"
    with pytest.raises(DataError, match="the database cannot be read"):
        digest(query(driver, **cache), tmp_path)
    assert not path.exists()
    write_database(path, rows())
    assert digest(query(driver, **cache), tmp_path) == one_file
    path.unlink()
    write_database(path, rows(COUNT - 1))
    assert digest(query(driver, **cache), tmp_path) != one_file


def test_the_result_of_a_query_is_fixed_when_it_is_first_used(tmp_path: Path) -> None:
    write_database(tmp_path / "people.sqlite", rows())
    shuffled = query(query="select * from people order by random()")
    before = digest(shuffled, tmp_path)
    assert digest(shuffled, tmp_path) == before
    people = read_subjects(settings(shuffled, features=None), tmp_path, "c1")
    codes = read_table(settings(shuffled), tmp_path).categorical["c1"].codes
    assert len({*zip(people.tolist(), codes.tolist(), strict=True)}) == len({*people.tolist()})
    assert digest(shuffled | {"snapshot": "again"}, tmp_path) != before
    (first, second) = sorted((tmp_path / "snapshots").glob("query-*.parquet"))
    assert first.stat().st_mode & 0o077 == second.stat().st_mode & 0o077 == 0


FROM_FILES = (
    "select p.id, label, n1, n2, c1 from 'warehouse/*/*.parquet' p "
    "join read_csv('words.csv', all_varchar = true) using (id) order by place"
)


def test_duckdb_joins_a_folder_of_parquet_and_a_text_file(tmp_path: Path, one_file: str) -> None:
    table = rows().append_column("place", pa.array(range(COUNT)))
    parts = table.drop_columns(["c1"]).append_column("half", pa.array([1, 2] * (COUNT // 2)))
    parquet.write_to_dataset(parts, tmp_path / "warehouse", partition_cols=["half"])
    csv.write_csv(table.select(["id", "c1"]), tmp_path / "words.csv")
    source = query(driver="duckdb", uri=":memory:", query=FROM_FILES)
    assert digest(source, tmp_path) == one_file
    (tmp_path / "words.csv").unlink()  # a run that resumes needs the rows that it began with
    assert digest(source, tmp_path) == one_file
    with pytest.raises(DataError, match=r"No files found that match the pattern \"words.csv\""):
        digest(source | {"snapshot": "again"}, tmp_path)
    with pytest.raises(DataError, match="Install it first"):  # and nothing is downloaded
        digest(source | {"query": "select * from sqlite_scan('x', 'y')"}, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "select * from view_of_file",
        "select * from macro_of_file()",
        "select *, (select content from read_text('secret.csv')) from people",
        "select p.* from people p join 'secret.csv' on true",
    ],
)
def test_a_database_of_duckdb_reads_no_other_file(tmp_path: Path, text: str) -> None:
    """It may come from somebody else, as may its views, and any file would be a column."""
    (tmp_path / "secret.csv").write_text("secret-word\n")
    write_database(tmp_path / "people.duckdb", rows())
    database = duckdb.connect(tmp_path / "people.duckdb")
    reads = f"select *, content from people, read_text('{tmp_path / 'secret.csv'}')"  # noqa: S608
    database.execute(f"create view view_of_file as {reads}")
    database.execute(f"create macro macro_of_file() as table {reads}")
    database.close()
    with pytest.raises(DataError, match=r"a database in a file reads no other one") as refused:
        PartyData.load(settings(query("duckdb", query=text)), tmp_path)
    assert "secret" not in str(refused.value)


def test_a_driver_may_be_a_library_named_by_its_path(tmp_path: Path, one_file: str) -> None:
    write_database(tmp_path / "people.sqlite", rows())
    folder = Path(adbc_driver_sqlite.__file__).parent
    (tmp_path / "own").symlink_to(folder / "libadbc_driver_sqlite.so")
    source = query(driver="./own", uri=f"file:{tmp_path}/people.sqlite?mode=ro")
    assert digest(source, tmp_path) == one_file


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ("acme", ": pip install adbc-driver-acme, or name the path"),
        ("./absent.so", "$"),
        ("./people.sqlite", "$"),
    ],
)
def test_a_driver_that_is_none_is_refused(tmp_path: Path, driver: str, remedy: str) -> None:
    write_database(tmp_path / "people.sqlite", rows(3))
    expected = f"driver: {driver}: there is no such ADBC driver here{remedy}"
    with pytest.raises(SettingsError, match=expected):
        PartyData.load(settings(query(driver=driver)), tmp_path)


def test_times_of_a_query_become_parts(tmp_path: Path) -> None:
    write_database(tmp_path / "people.duckdb", rows())
    text = "select id, label, timestamp '2026-03-01 17:30' t, t::date d, '{}'::timestamptz z from"
    source = query("duckdb", query=text.format("2026-03-01 23:30-02") + " people")
    features = {"timestamps": ["t", "d", "z"], "timestamp_parts": ["day", "hour"]}
    numbers = read_table(settings(source, features=features), tmp_path).numeric
    parts = ("t.day", "t.hour", "d.day", "d.hour", "z.day", "z.hour")
    assert [set(numbers[part]) for part in parts] == [{1}, {17}, {1}, {0}, {2}, {1}]


def test_columns_of_one_name_are_refused_where_one_is_needed(tmp_path: Path) -> None:
    write_database(tmp_path / "people.sqlite", rows())
    twice = query(query="select *, n2 as other, n2 as other from people")
    assert len(PartyData.load(settings(twice), tmp_path).ids) == COUNT
    with pytest.raises(DataError, match="there are 2 columns 'other'"):
        PartyData.load(settings(twice, features={"numeric": "other"}), tmp_path)


OTHER_TYPE = "select id, label, n1, n2, c1 from people union all select 'x', {}, 1.0, 1, 'w' "
BAD_QUERIES = [
    ("sqlite", "select nope from people", "no such column: nope"),
    ("sqlite", "select from", "syntax error"),
    ("sqlite", "select * from peple", "no such table: peple"),
    ("sqlite", "with x as (select 1) delete from people", "failed while it ran"),
    ("sqlite", OTHER_TYPE.format("'secret-word'") + "from people", "CAST"),
    ("duckdb", "select nope from people", '"nope" not found in FROM clause!$'),
    ("duckdb", "select from", 'syntax error at or near "from"$'),
    ("duckdb", "select * from peple", "Table with name peple does not exist"),
    ("duckdb", "with x as (select 1) delete from people", "failed while it ran"),
    ("duckdb", "select (c1 || 'secret-word')::int from people", "rows were read"),
    ("duckdb", "select error('secret-word') from people", "rows were read"),
    ("duckdb", "select 1; copy people to 'copied.csv'", "expected one statement"),
    ("duckdb", "select * replace ([n1] as n1) from people", "expected numbers, not list<"),
    ("duckdb", "select interval 1 day", "type that Parquet lacks: change it with CAST"),
    ("duckdb", "select * from sqlite_scan('x', 'y')", "external extensions is disabled"),
    # What a header-less text file or a JSON object names by its values.
    ("duckdb", "select {'secret-word': n1}.n from people", 'key "n" in struct$'),
    ("duckdb", "select {'secret-word': n1} + 1 from people", "name and argument types '\\+$"),
    ("duckdb", "select 'secret-word'::enum('secret-word') + 1", "name and argument types '\\+$"),
    ("duckdb", "select columns('zz') from (select 1 as \"secret-word\")", 'match regex "zz"$'),
    ("duckdb", 'select * from people natural join (select 1 as "secret-word")', "-product.$"),
    ("duckdb", "select *, count(*) from people", 'column "..." must appear in the GROUP BY'),
]


@pytest.mark.parametrize(("driver", "text", "expected"), BAD_QUERIES)
def test_a_bad_query_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, text: str, expected: str
) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 64)
    monkeypatch.chdir(tmp_path)
    write_database(tmp_path / f"people.{driver}", rows())
    before = (tmp_path / f"people.{driver}").read_bytes()
    with pytest.raises(DataError, match=expected) as refused:
        PartyData.load(settings(query(driver, query=text)), tmp_path)
    assert "secret-word" not in str(refused.value)
    kept = {path.suffix for path in (tmp_path / "snapshots").iterdir()}
    assert kept == ({".lock", ".parquet"} if "list<" in expected else {".lock"})
    assert (tmp_path / f"people.{driver}").read_bytes() == before
    assert not (tmp_path / "copied.csv").exists()


UNREADABLE = "its address cannot be read"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("postgresql://me:word-3391@127.0.0.1:1/people\n", "Connection refused"),
        ("postgresql://me:word-3391@[::1/people", UNREADABLE),
        ("postgresql://me:p@word-3391@localhost:1/people", UNREADABLE),
        ("postgresql://me:word-3391/p@localhost/people", UNREADABLE),
        ("postgresql://localhost/people?sslmode=word-3391", UNREADABLE),
        ("host=localhost password=word word-3391", UNREADABLE),
    ],
)
def test_a_server_that_cannot_be_reached_is_named_without_its_password(
    tmp_path: Path, address: str, expected: str
) -> None:
    path = tmp_path / "uri"
    path.touch(0o600)
    path.write_text(address)
    source = query("postgresql", uri=None, uri_file="uri")
    with pytest.raises(DataError, match=expected) as refused:
        PartyData.load(settings(source), tmp_path)
    assert "3391" not in str(refused.value)
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        PartyData.load(settings(source), tmp_path)


NO_SELECT = "begins with SELECT or WITH"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"path": "ftp://host/x"}, "not ftp://"),
    ({"path": "s3://key:word-3391@bucket/x"}, "an address holds no credentials"),
    ({"path": "s3://key:word/3391@bucket/x"}, "an address holds no credentials"),
    ({"path": "rows.parquet", "store": {"account": "x"}}, "store is for addresses"),
    ({"path": "abfs://container/x"}, "store.account"),
    ({"path": "s3://b/x", "store": {"endpoint": "https://a:word-3391@host"}}, "store.endpoint"),
    ({"path": "s3://b/x", "store": {"secret_key": "x"}}, "unknown setting"),
    # A database that is open for reading takes statements that write another file.
    ({"query": "ATTACH 'new.db' AS x"}, NO_SELECT),
    ({"query": "-- select\n; ATTACH 'new.db' AS x"}, NO_SELECT),
    ({"query": "/* select */ vacuum into 'new.db'"}, NO_SELECT),
    ({"query": "/* one */ attach 'new.db' as x /* two */ select"}, NO_SELECT),
    ({"query": "pragma journal_mode = wal"}, NO_SELECT),
    ({"query": "selection"}, NO_SELECT),
    ({"uri": "postgresql://me:word-3391@host/people"}, "uri_file"),
    ({"uri": "postgresql://me:word/3391@host/people"}, "uri_file"),
    ({"uri": "postgresql://host/people?password=word-3391"}, "uri_file"),
    ({"uri": "postgresql://host/people?pass%77ord=word-3391"}, "uri_file"),
    ({"uri": "host=host dbname=people password=word-3391"}, "uri_file"),
    ({"uri": "host=host password = 'word-3391'"}, "uri_file"),
    ({"uri": "postgresql://host/people?sslcert=x&sslpassword=word-3391"}, "uri_file"),
    ({"uri": "postgresql://host/people?oauth_client_secret=word-3391"}, "uri_file"),
]
ACCEPTED = [
    {"query": "-- a note; with an end\n select * from people"},
    {"query": "/* from\n us */(SELECT * FROM people)"},
    {"query": "With p as (select * from people) select * from p"},
    {"query": "VALUES (1)"},
    {"uri": "postgresql://me@host:5432/people"},
    {"uri": "postgresql://me%40company@host:5432/people?sslmode=verify-full&passfile=pass"},
    {"uri": "host=host user=me sslkey=me.key"},
]


def source_with(values: dict[str, Any]) -> dict[str, Any]:
    if "path" in values:
        return {"kind": "parquet", **values}
    return query("snowflake" if "uri" in values else "sqlite", **values)


@pytest.mark.parametrize(("values", "expected"), REFUSED)
def test_an_address_or_query_that_may_not_be_is_refused_and_no_password_repeated(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingsError, match=expected) as refused:
        settings(source_with(values))
    assert "3391" not in str(refused.value)


@pytest.mark.parametrize("values", ACCEPTED)
def test_queries_and_addresses_may_be_written_in_several_ways(values: dict[str, Any]) -> None:
    settings(source_with(values))


POSTGRESQL = os.environ.get("SPLITVEIL_POSTGRESQL", "")
"""Address of a database in which tests may make tables."""


@pytest.mark.skipif(not POSTGRESQL, reason="SPLITVEIL_POSTGRESQL names no database")
def test_postgresql_gives_the_same_bits_as_a_file(tmp_path: Path, one_file: str) -> None:
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(POSTGRESQL) as database, database.cursor() as cursor:
        cursor.execute("drop table if exists splitveil_people")
        cursor.adbc_ingest("splitveil_people", rows(), mode="create")
        cursor.execute("alter table splitveil_people add u uuid default gen_random_uuid()")
        cursor.execute("alter table splitveil_people add amount numeric(9, 2) default 2.5")
        database.commit()
    path = tmp_path / "uri"
    path.touch(0o600)
    path.write_text(POSTGRESQL)
    source = query("postgresql", uri=None, uri_file="uri", query="select * from splitveil_people")
    assert digest(source, tmp_path) == one_file
    table = read_table(settings(source, id_column="u", features={"numeric": "amount"}), tmp_path)
    assert {len(one) for one in table.ids} == {36}
    assert set(table.numeric["amount"]) == {2.5}
    for text, expected in (
        ("select nope from splitveil_people", 'column "nope" does not exist'),
        ("select 1 / (n2 - n2) from splitveil_people", "rows were read"),
        ("select (c1 || 'secret-word')::int from splitveil_people", "rows were read"),
        ("with x as (select 1) delete from splitveil_people", "expected a SELECT"),
    ):
        with pytest.raises(DataError, match=expected) as refused:
            PartyData.load(settings(source | {"query": text}), tmp_path)
        assert "secret" not in str(refused.value)
    assert len(PartyData.load(settings(source | {"snapshot": "again"}), tmp_path).ids) == COUNT


# ---- both parties ----


def test_the_refusal_of_a_store_shows_no_address() -> None:
    with pytest.raises(DataError) as refused, unreadable_is_data_error("abfs://rows/part.parquet"):
        raise OSError("GET https://x.blob.core.windows.net/rows?sig=word-3391 failed: (403)")
    assert "GET its address failed: (403)" in str(refused.value)

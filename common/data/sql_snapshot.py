"""Runs a query once and keeps its result as a Parquet file, which every later command reads.

    <cache_dir>/query-<key>.parquet

The key is a digest of the query, the driver, the database's address, the text of ``snapshot`` and,
for SQLite and DuckDB, the size and modification time of the database file. The file gets its name
only after all of it is on disk.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from pyarrow import parquet

from splitveil.common.data import sources
from splitveil.common.data.source_settings import IN_MEMORY, SqlSource, expand_path
from splitveil.common.errors import DataError, SettingsError, StorageError
from splitveil.common.text.files import check_regular, only_one_process, read_secret, replacing_file
from splitveil.common.text.imports import extra_missing

_logger = logging.getLogger(__name__)

_JOURNALS = {"sqlite": "-wal", "duckdb": ".wal"}
"""The drivers of databases that are files, and the ending of the changes not yet in the file."""

_OF_THE_EXTRA = ("sqlite", "postgresql", "duckdb")

_QUOTED_STATES = {"postgresql": ("08", "28", "3D", "42")}
"""SQLSTATE classes whose messages quote an address, a user or the query, and never a value:
connection, authorisation, unknown database, and syntax or access."""

_ABOUT_QUERY = re.compile(
    r"\w+: (\[SQLite\] Failed to prepare|failed to open"
    r"|(Parser|Binder|Catalog|Extension Autoloading) Error"
    r"|IO Error: (No files|Cannot open|Could not set lock))"
)
"""Errors of SQLite and DuckDB before they read a row."""

_REPEATED = re.compile(
    r"\n\s*query: |\s+Query was: |\s+LINE \d+: |\s+(Left )?[Cc]andidate|\s+Did you mean"
    r"|['(]*\b(?:STRUCT|ENUM|UNION)\("
)
"""Where a driver begins to repeat the whole query, or names and types that may come from cells."""


def snapshot_of(settings: SqlSource, base_dir: Path) -> Path:
    """Return the Parquet file with the query's result; run the query if there is none yet."""
    address = settings.uri or ""
    if settings.uri_file is not None:
        secret = expand_path("uri_file", settings.uri_file, base_dir)
        address = read_secret(secret, "uri_file")
        if not address or "\n" in address:
            raise SettingsError(f"uri_file: {secret}: expected one line, the database's address")
    if settings.driver in _JOURNALS and address != IN_MEMORY:
        address = str(expand_path("uri", address, base_dir).absolute())
    key = [settings.driver, address, settings.query, settings.snapshot]
    if settings.driver == "duckdb":
        key.append(str(base_dir.absolute()))  # of the paths in the query
    digest = hashlib.sha256(json.dumps(key).encode())
    if settings.driver in _JOURNALS and address != IN_MEMORY:
        digest.update(json.dumps(_stamps(Path(address), _JOURNALS[settings.driver])).encode())
    folder = expand_path("cache_dir", settings.cache_dir or "snapshots", base_dir)
    path = folder / f"query-{digest.hexdigest()[:16]}.parquet"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_one_process(folder / f".{path.name}.lock"):
            if not path.is_file():
                _write(settings, address, base_dir, path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"{path}: the query's result cannot be kept: {reason}") from error
    return path


def _stamps(path: Path, journal_ending: str) -> list[list[int]]:
    """Return size and time of the database and of the changes that it has not yet taken in."""
    try:
        check_regular(path)
        found = [path.stat()]
    except OSError as error:
        raise DataError(f"{path}: the database cannot be read: {error.strerror}") from error
    journal = path.with_name(path.name + journal_ending)
    if journal.is_file() and journal.stat().st_size:
        found.append(journal.stat())
    return [[stat.st_size, stat.st_mtime_ns] for stat in found]


def _write(settings: SqlSource, address: str, base_dir: Path, path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # left by a process that was killed
        left.unlink()
    num_rows = 0
    try:
        with (
            _result(settings, address, base_dir) as batches,
            replacing_file(path) as file,  # the result is at most as public as the database
            parquet.ParquetWriter(file, batches.schema) as writer,
        ):
            for batch in _translated(batches):
                num_rows += len(batch)
                writer.write_batch(batch)
    except pa.ArrowNotImplementedError as error:
        # pyarrow's text names the type, and with it members that may come from cells.
        raise DataError(
            "data.source.query: a column has a type that Parquet lacks: change it with CAST"
        ) from error
    _logger.info("the query returned %s rows, kept in %s", f"{num_rows:,}", path)


@contextmanager
def _result(settings: SqlSource, address: str, base_dir: Path) -> Iterator[Any]:
    name = settings.driver
    try:
        # An extra, which a party with files need not install.
        from adbc_driver_manager import dbapi  # noqa: PLC0415
    except ImportError as error:
        raise extra_missing("data.source: kind sql", "sql") from error
    try:
        with (
            _connect(dbapi, settings, address, base_dir) as connection,
            connection.cursor() as cursor,
        ):
            if name == "sqlite":
                # The first batch fixes the types of the columns.
                rows = {"adbc.sqlite.query.batch_rows": sources.PART_ROWS}
                cursor.adbc_statement.set_options(**rows)
            cursor.execute(settings.query)
            batches = cursor.fetch_record_batch()
            if not len(batches.schema):
                raise DataError("data.source.query: expected a SELECT, got no column")
            yield batches
    except dbapi.Error as error:
        if "[Driver Manager]" in str(error):
            remedy = f": pip install adbc-driver-{name}, or name the path of its library"
            raise SettingsError(
                f"data.source.driver: {name}: there is no such ADBC driver here"
                f"{'' if '/' in name else remedy}"
            ) from error
        raise DataError(f"data.source.query: {name}: {_reason(settings, error)}") from error


def _connect(dbapi: Any, settings: SqlSource, address: str, base_dir: Path) -> Any:
    name = settings.driver
    if "/" in name:
        return dbapi.connect(expand_path("driver", name, base_dir).absolute(), address)
    try:
        package = import_module(f"adbc_driver_{name}.dbapi")
    except ImportError as error:
        if name in _OF_THE_EXTRA:
            raise extra_missing(f"data.source: kind sql with driver {name}", "sql") from error
        return dbapi.connect(name, address)
    if name == "duckdb":
        import duckdb  # noqa: PLC0415

        with suppress(duckdb.Error):  # which the database will say again
            if len(duckdb.extract_statements(settings.query)) > 1:
                raise DataError("data.source.query: expected one statement")
        options = {
            "path": address,
            "access_mode": "AUTOMATIC" if address == IN_MEMORY else "READ_ONLY",
            "file_search_path": str(base_dir.absolute()),
            "autoinstall_known_extensions": "false",  # no code comes from elsewhere unasked
            # A view or macro of a file from somebody else could read any file.
            "enable_external_access": "true" if address == IN_MEMORY else "false",
            "lock_configuration": "true",
        }
        library = import_module("adbc_driver_duckdb").driver_path()
        return dbapi.connect(library, entrypoint="duckdb_adbc_init", db_kwargs=options)
    return package.connect(f"file:{quote(address)}?mode=ro" if name == "sqlite" else address)


def _reason(settings: SqlSource, error: Any) -> str:
    """Describe an error without a word that may be a value of a row."""
    driver, state = settings.driver, error.sqlstate
    first = " ".join(_REPEATED.split(str(error), maxsplit=1)[0].split())
    if "Permission Error" in first:
        return (
            'a database in a file reads no other one, nor does a query of it: uri ":memory:" does'
        )
    if "Binder Error" in first:  # which quotes columns that a file's first row may have named
        query = settings.query.lower()
        first = re.sub(
            r'"(.*?)"', lambda one: one[0] if one[1].lower() in query else '"..."', first
        )
    if "[libpq] Failed to connect" in first:
        # It repeats an address that it cannot read, or a part of it, with the password.
        _, begin, answer = first.partition("connection to server")
        return begin + answer or "its address cannot be read, or names a host that is not known"
    shown = _QUOTED_STATES.get(driver, ("42",))
    if str(state).startswith(shown) or (driver in _JOURNALS and _ABOUT_QUERY.match(first)):
        return first
    code = f", SQLSTATE {state}" if state else ""
    return (
        f"the query failed while it ran ({type(error).__name__}, {error.status_code.name}{code}); "
        f"the database's own message may quote a value and is not shown"
    )


def _translated(batches: Any) -> Iterator[Any]:
    """Yield the batches; errors of Arrow while reading them are errors of the query."""
    try:
        yield from batches
    except (pa.ArrowException, OSError) as error:
        # The driver's own message may quote a value.
        raise DataError(
            f"data.source.query: the query failed while its rows were read "
            f"({type(error).__name__}): a value cannot be computed, or has another type than the "
            f"column's first ones, which CAST changes"
        ) from error

"""Runs a query once and keeps its result as a Parquet file, which every later command reads.

    <snapshot_dir>/query-<key>.parquet

The key is a digest of the query, the database's address, the text of ``snapshot`` and, for SQLite,
the size and modification time of the database file. The file gets its name only after all of it is
on disk.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from pyarrow import parquet

from splitveil.common.data import sources
from splitveil.common.data.source_settings import SqlSource, expand_path, read_secret
from splitveil.common.errors import DataError, SettingsError, StorageError
from splitveil.common.text.files import check_regular, only_one_process, sync
from splitveil.common.text.imports import extra_missing

_logger = logging.getLogger(__name__)

_QUOTED_STATES = ("08", "28", "3D", "42")
"""SQLSTATE classes whose messages quote an address, a user or the query, and never a value:
connection, authorisation, unknown database, and syntax or access."""


def snapshot_of(settings: SqlSource, base_dir: Path) -> Path:
    """Return the Parquet file with the query's result; run the query if there is none yet."""
    address = _address(settings, base_dir)
    key = hashlib.sha256(
        json.dumps([settings.driver, address, settings.query, settings.snapshot]).encode()
    )
    if settings.driver == "sqlite":
        key.update(json.dumps(_sqlite_stamps(Path(address))).encode())
    folder = expand_path("snapshot_dir", settings.snapshot_dir, base_dir)
    path = folder / f"query-{key.hexdigest()[:16]}.parquet"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_one_process(folder / f".{path.name}.lock"):
            if not path.is_file():
                _write(settings, address, path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"{path}: the query's result cannot be kept: {reason}") from error
    return path


def _address(settings: SqlSource, base_dir: Path) -> str:
    if settings.uri_file is not None:
        path = expand_path("uri_file", settings.uri_file, base_dir)
        address = read_secret(path, "uri_file")
        if not address or "\n" in address:
            raise SettingsError(f"uri_file: {path}: expected one line, the database's address")
    else:
        address = settings.uri or ""
    if settings.driver == "sqlite":
        return str(expand_path("uri", address, base_dir).absolute())
    return address


def _sqlite_stamps(path: Path) -> list[list[int]]:
    """Return size and time of the database and of the changes that it has not yet taken in."""
    try:
        check_regular(path)
        found = [path.stat()]
    except OSError as error:
        raise DataError(f"{path}: the database cannot be read: {error.strerror}") from error
    journal = path.with_name(f"{path.name}-wal")
    if journal.is_file() and journal.stat().st_size:
        found.append(journal.stat())
    return [[stat.st_size, stat.st_mtime_ns] for stat in found]


def _write(settings: SqlSource, address: str, path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # left by a process that was killed
        left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # The result is at most as public as the database.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        num_rows = 0
        with (
            _result(settings, address) as batches,
            parquet.ParquetWriter(temporary, _plain_schema(batches.schema)) as writer,
        ):
            for batch in _translated(batches):
                num_rows += len(batch)
                writer.write_batch(_plain(batch))
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    _logger.info("the query returned %d rows, kept in %s", num_rows, path)


@contextmanager
def _result(settings: SqlSource, address: str) -> Iterator[Any]:
    errors, connect = _driver(settings.driver)
    try:
        with connect(address) as connection, connection.cursor() as cursor:
            if settings.driver == "sqlite":
                # The types of the columns are those of the first batch.
                rows = {"adbc.sqlite.query.batch_rows": sources.PART_ROWS}
                cursor.adbc_statement.set_options(**rows)
            cursor.execute(settings.query)
            batches = cursor.fetch_record_batch()
            if not len(batches.schema):
                raise DataError("data.source.query: expected a SELECT, got no column")
            yield batches
    except errors as error:
        raise DataError(f"data.source.query: {settings.driver}: {_reason(error)}") from error


_QUERY = re.compile(r"\n\s*query: |\s+Query was: ")
"""Where a driver begins to repeat the whole query."""


def _driver(name: str) -> tuple[type[Exception], Any]:
    try:
        # An extra, which a party with files need not install.
        import adbc_driver_manager  # noqa: PLC0415

        match name:
            case "sqlite":
                from adbc_driver_sqlite import dbapi as sqlite  # noqa: PLC0415

                return adbc_driver_manager.Error, lambda path: sqlite.connect(
                    f"file:{quote(path)}?mode=ro"
                )
            case _:
                from adbc_driver_postgresql import dbapi as postgresql  # noqa: PLC0415

                return adbc_driver_manager.Error, postgresql.connect
    except ImportError as error:
        raise extra_missing(f"data.source: kind sql with driver {name}", "sql") from error


def _reason(error: Any) -> str:
    """Describe an error without a word that may be a value of a row."""
    state = error.sqlstate
    first = " ".join(_QUERY.split(str(error))[0].split())
    at_preparation = "Failed to prepare" in first or "failed to open" in first
    if "[libpq] Failed to connect" in first:
        # It repeats an address that it cannot read, or a part of it, with the password.
        _, begin, answer = first.partition("connection to server")
        return begin + answer or "its address cannot be read, or names a host that is not known"
    if at_preparation or str(state)[:2] in _QUOTED_STATES:
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


def _plain_schema(schema: Any) -> Any:
    return pa.schema([pa.field(name, _stored_type(schema.field(name))) for name in schema.names])


def _stored_type(field: Any) -> Any:
    """Return the type in which a driver hands over values that Arrow has no type for."""
    kind = field.type
    if isinstance(kind, pa.UuidType):
        return pa.string()  # as people and other files write it
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _plain(batch: Any) -> Any:
    columns = [_stored(column) for column in batch.columns]
    return pa.record_batch(columns, schema=_plain_schema(batch.schema))


def _stored(column: Any) -> Any:
    if isinstance(column.type, pa.UuidType):
        texts = (None if value is None else str(value) for value in column.to_pylist())
        return pa.array(texts, pa.string())
    return column.storage if isinstance(column, pa.ExtensionArray) else column

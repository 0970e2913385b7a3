"""Writes tables as Parquet or CSV files, for their owner only, whole or not at all."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.text.files import replacing_file

FORMATS = (".parquet", ".csv")


def check_output(output: Path, tables: Iterable[str | Path] = ()) -> None:
    """Check that a table can be written to a path, before anything is asked of the other party.

    ``tables`` are files that the command reads, which it must not replace.
    """
    if output.suffix.lower() not in FORMATS:
        raise SettingsError(f"--output: expected a file ending in {' or '.join(FORMATS)}")
    if not output.parent.is_dir():
        raise SettingsError(f"--output: there is no folder {output.parent}")
    if output.resolve() in {Path(table).resolve() for table in tables}:
        raise SettingsError(f"--output: {output} is a table that this command reads")


def writer_of(output: Path, file: Any, schema: pa.Schema) -> Any:
    if output.suffix.lower() == ".csv":
        return arrow_csv.CSVWriter(file, schema)
    return parquet.ParquetWriter(file, schema)


@contextmanager
def refusing_to_write(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise StorageError(f"{path}: cannot be written: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    with refusing_to_write(path), replacing_file(path) as file:
        yield file

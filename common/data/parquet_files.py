"""Reads one Parquet file, or many that are one table, in the order of their paths."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import parquet
from pydantic_core import from_json

from splitveil.common.data import sources
from splitveil.common.data.sources import ArrowColumn, Part, unreadable_is_data_error
from splitveil.common.data.table_paths import FoundFile, TablePath, find_files
from splitveil.common.errors import DataError

_FILES_AT_ONCE = 16
"""Files that are read at the same time, for stores that answer slowly."""
_NAMED = 3
"""Number of files that a message names."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


class _OneFile(NamedTuple):
    found: FoundFile
    schema: Any
    metadata: Any
    from_folders: Mapping[str, str | None]
    """The columns that the names of the folders make; None is their word for no value."""


class ParquetFiles:
    """The Parquet files at a path, as one table with typed columns."""

    def __init__(self, table_path: TablePath) -> None:
        self.name = table_path.name
        self._table_path = table_path

    def column_names(self) -> list[str]:
        """Return the columns in the order of the first file."""
        first = self._files[0]
        return [*first.schema.names, *first.from_folders]

    @property
    def index_columns(self) -> list[str]:
        """The columns that held the rows' labels in pandas, as it notes in the first file."""
        noted = (self._files[0].schema.metadata or {}).get(b"pandas", b"{}")
        try:
            return [one for one in from_json(noted)["index_columns"] if isinstance(one, str)]
        except (ValueError, LookupError, TypeError):
            return []

    @property
    def category_columns(self) -> list[str]:
        """The columns that were categories in pandas; Parquet itself keeps only text categories."""
        noted = (self._files[0].schema.metadata or {}).get(b"pandas", b"{}")
        try:
            columns = from_json(noted)["columns"]
            return [str(x["name"]) for x in columns if x["pandas_type"] == "categorical"]
        except (ValueError, LookupError, TypeError):
            return []

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        schema = self._common_schema(names)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            batches = pool.map(lambda file: [*self._batches(file, schema)], self._files)
            table = pa.concat_tables([schema.empty_table(), *chain.from_iterable(batches)])
        return {name: table.column(name) for name in names}

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        schema = self._common_schema(names)
        num_rows = sum(file.metadata.num_rows for file in self._files)
        done_rows, held = 0, schema.empty_table()
        for file in self._files:
            for batch in self._batches(file, schema):
                held = pa.concat_tables([held, batch]) if len(held) else batch
                while len(held) >= sources.PART_ROWS:
                    done_rows += sources.PART_ROWS
                    done = min(1.0, done_rows / max(1, num_rows))  # a file may say less than it has
                    yield _part(held.slice(0, sources.PART_ROWS), done)
                    held = held.slice(sources.PART_ROWS)
        if len(held):
            yield _part(held, 1.0)

    @cached_property
    def _files(self) -> list[_OneFile]:
        found = find_files(self._table_path)
        with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(found))) as pool:
            files = list(pool.map(self._open, found))
        first = files[0]
        for file in files:
            if list(file.from_folders) != list(first.from_folders):
                raise DataError(
                    f"{self.name}: expected folders NAME=VALUE with the same names for every "
                    f"file, got {_listed(first.from_folders)} for {first.found.name} and "
                    f"{_listed(file.from_folders)} for {file.found.name}"
                )
        return files

    def _open(self, found: FoundFile) -> _OneFile:
        with (
            unreadable_is_data_error(found.location),
            parquet.ParquetFile(found.path, filesystem=self._table_path.filesystem) as file,
        ):
            # Folders are named NAME=VALUE, as Hive writes them.
            pairs = [folder.split("=", 1) for folder in found.folders if "=" in folder]
            from_folders = {
                unquote(name, errors="strict"): None
                if value == _NO_VALUE
                else unquote(value, errors="strict")
                for name, value in pairs
            }
            return _OneFile(found, file.schema_arrow, file.metadata, from_folders)

    def _common_schema(self, names: Sequence[str]) -> Any:
        problems: list[str] = []
        fields = [self._field(name, problems) for name in dict.fromkeys(names)]
        if problems:
            raise DataError("\n".join(problems))
        return pa.schema(fields)

    def _field(self, name: str, problems: list[str]) -> Any:
        if name in self._files[0].from_folders:
            return pa.field(name, pa.string())
        lacking, known = [], []
        for file in self._files:
            if file.schema.get_field_index(name) < 0:  # absent, or there several times
                lacking.append(file.found.name)
            elif not pa.types.is_null(file.schema.field(name).type):
                known.append((_plain_type(file.schema.field(name).type), file.found.name))
        if lacking:
            named = ", ".join(lacking[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
            problems.append(
                f"{self.name}: column {name!r} is missing in {len(lacking)} of "
                f"{len(self._files)} files: {named}"
            )
        kind, first = known[0] if known else (pa.null(), "")
        for other, where in known:
            if other != kind:
                problems.append(
                    f"{self.name}: column {name!r} has several types: {kind} in {first}, "
                    f"{other} in {where}; write it with one type, or read it from one folder"
                )
                break
        return pa.field(name, kind)

    def _batches(self, file: _OneFile, schema: Any) -> Iterator[Any]:
        stored = [name for name in schema.names if name not in file.from_folders]
        with (
            unreadable_is_data_error(file.found.location),
            parquet.ParquetFile(
                file.found.path, filesystem=self._table_path.filesystem, metadata=file.metadata
            ) as opened,
        ):
            for batch in opened.iter_batches(sources.PART_ROWS, columns=stored):
                columns = [
                    pa.repeat(pa.scalar(file.from_folders[field.name], field.type), len(batch))
                    if field.name in file.from_folders
                    # A column of nothing but nulls may have no type.
                    else _plain(batch.column(field.name)).cast(field.type)
                    for field in schema
                ]
                table = pa.Table.from_arrays(columns, schema=schema)
                table.validate(full=True)  # texts that are not UTF-8 would be errors anywhere
                yield table


def _plain_type(kind: Any) -> Any:
    if isinstance(kind, pa.UuidType) or kind == pa.string_view():
        return pa.string()
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _plain(column: Any) -> Any:
    if isinstance(column.type, pa.UuidType):  # as people and other files write it
        return pa.array((str(one) if one else None for one in column.to_pylist()), pa.string())
    return column


def _part(table: Any, done_fraction: float) -> Part:
    return Part({name: table.column(name) for name in table.column_names}, None, done_fraction)


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"

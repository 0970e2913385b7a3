"""The interface of a source of rows, the files that a path names, and messages about them.

Files are found on this machine or in an object store, in a fixed order.
"""

import csv
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import fs

from splitveil.common.data.source_settings import CsvSource, ParquetSource, expand_variables
from splitveil.common.errors import DataError
from splitveil.common.text.files import check_regular, why_unreadable

PART_BYTES = 8 * 1024 * 1024
"""Size of a block of text; pyarrow reads up to 32 such blocks ahead."""

PART_ROWS = 64 * 1024

MAX_STORE_CHARACTERS = 300
"""Longest quotation of an object store in a message."""

ArrowColumn = Any
"""A pyarrow ChunkedArray; pyarrow ships no type annotations."""


_UNREADABLE = (
    OSError,
    EOFError,
    pa.ArrowException,
    csv.Error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""The errors that the libraries raise for damaged files."""


class Part(NamedTuple):
    """Some consecutive rows of a source."""

    columns: Mapping[str, ArrowColumn]
    image: NDArray[Any] | None  # as stored, (rows, ...)
    done_fraction: float  # fraction of the source that is done after this part


def joined(parts: Iterable[Part], names: Sequence[str], kind: Any = None) -> dict[str, ArrowColumn]:
    """Return the columns of all parts; if there may be none, the columns' type is needed."""
    columns = [part.columns for part in parts]
    chunks = {name: [chunk for part in columns for chunk in part[name].chunks] for name in names}
    return {name: pa.chunked_array(some, kind) for name, some in chunks.items()}


class RowSource(Protocol):
    """A source of rows that are read at once."""

    name: str
    """The name of the source in messages."""

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        ...

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns, all of the same length; nothing else is read."""
        ...


@dataclass
class ColumnsInMemory:
    """Columns in memory, all of the same length, as a source of rows."""

    name: str
    columns: Mapping[str, ArrowColumn]

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        return list(self.columns)

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns."""
        return {name: self.columns[name] for name in names}


class TableSource(RowSource, Protocol):
    """A source of rows that may also be read in parts."""

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the same rows with their images, in parts, so that memory can hold them."""
        ...


def list_rows(rows: Sequence[int] | NDArray[np.int64]) -> str:
    """List rows for messages: the first five numbers and the total count."""
    first = ", ".join(str(row) for row in rows[:5])
    if len(rows) == 1:
        return f"row {first}"
    return f"rows {first}{', ...' if len(rows) > 5 else ''} ({len(rows)} in all)"


@contextmanager
def unreadable_is_data_error(path: Path | str) -> Iterator[None]:
    """Raise DataError if a file cannot be read, without quoting any of its content.

    The path is a regular file, or the text that names a folder, a pattern or an address.
    """
    try:
        if isinstance(path, Path):
            check_regular(path)
        yield
    except FileNotFoundError as error:
        of_store = _store_reason(path, error)
        reason = of_store or why_unreadable(Path(path), FileNotFoundError())
        raise DataError(f"{path}: {reason}") from error
    except UnicodeError as error:
        what = "the text, or the name of a file or folder,"
        raise DataError(f"{path}: {what} is not UTF-8: change it") from error
    except MemoryError as error:  # also raised by pyarrow
        raise DataError(
            f"{path}: does not fit into memory; with data.source.cache_dir it is converted in parts"
        ) from error
    except _UNREADABLE as error:
        # The library's own message may quote a row.
        damaged = f"damaged, or not a file of this kind ({type(error).__name__})"
        reason = _store_reason(path, error) or getattr(error, "strerror", None) or damaged
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _store_reason(path: Path | str, error: BaseException) -> str | None:
    """Return what an object store says about a request, which never quotes a file's content."""
    if isinstance(path, Path) or not isinstance(error, OSError) or error.errno is not None:
        return None
    said = " ".join(str(error).split()).partition(" (Request ID")[0]
    # An address may hold the signature that gives access.
    said = re.sub(r"https?://[^\s']*", "its address", said)
    return said[:MAX_STORE_CHARACTERS] or None


CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
RETRY_TIME = timedelta(seconds=30)
"""Time limit for retries of requests to ``gs://``; the library's default is 15 minutes."""

_WILDCARD = re.compile(r"[*?\[]")


class FoundFile(NamedTuple):
    """A file, as it was when it was looked for."""

    path: str
    """In its file system."""

    name: str
    """In messages."""

    num_bytes: int
    modified_ns: int

    folders: tuple[str, ...]
    """The folders between the table's path and the file."""

    @property
    def location(self) -> Path | str:
        """The file on this machine, or its address."""
        return self.name if "://" in self.name else Path(self.name)


class TablePath(NamedTuple):
    """A file, a folder, or a pattern for files."""

    filesystem: Any
    """A pyarrow FileSystem."""

    path: str
    """In that file system."""

    prefix: str
    """Prefix of a path in messages: ``s3://`` and the like."""

    @property
    def name(self) -> str:
        """The path in messages."""
        return self.prefix + self.path


def table_path_of(settings: ParquetSource | CsvSource, base_dir: Path) -> TablePath:
    if isinstance(settings, CsvSource) or settings.scheme is None:
        return local_table_path(settings.resolve(base_dir))
    address = expand_variables("path", settings.path)
    path = address.partition("://")[2].rstrip("/")
    return TablePath(_open_store(settings, path.partition("/")[0]), path, f"{settings.scheme}://")


def local_table_path(path: Path) -> TablePath:
    return TablePath(fs.LocalFileSystem(), str(path), "")


def _open_store(settings: ParquetSource, bucket: str) -> Any:
    store = settings.store
    address = urlsplit(store.endpoint or "")
    host = address.netloc + address.path
    endpoint = {"scheme": address.scheme, "endpoint_override": host} if host else {}
    match settings.scheme:
        case "s3":
            named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            if named is None and not host:
                with suppress(OSError):  # listing the bucket will say why
                    named = str(fs.resolve_s3_region(bucket))
            return fs.S3FileSystem(
                region=named,
                connect_timeout=CONNECT_TIMEOUT_S,
                request_timeout=REQUEST_TIMEOUT_S,
                **endpoint,
            )
        case "gs":
            return fs.GcsFileSystem(retry_time_limit=RETRY_TIME, **endpoint)
        case _:
            authorities = {
                f"{service}_storage_{part}": value
                for service in ("blob", "dfs")
                for part, value in (("authority", address.netloc), ("scheme", address.scheme))
                if host
            }
            return fs.AzureFileSystem(store.account, **authorities)


def find_files(table_path: TablePath) -> list[FoundFile]:
    """Return the files at a path, in the order of their paths, compared segment by segment.

    DataError if there are none.
    """
    with unreadable_is_data_error(table_path.name):
        found = table_path.filesystem.get_file_info(table_path.path)
        if found.type == fs.FileType.Directory:
            files, root = _below(table_path, table_path.path), table_path.path
            expected = "expected files in this folder, found none"
        elif found.type != fs.FileType.NotFound:
            return [_found(table_path, found, table_path.path)]
        elif _WILDCARD.search(table_path.path):
            segments = table_path.path.split("/")
            first = next(i for i, segment in enumerate(segments) if _WILDCARD.search(segment))
            root = "/".join(segments[:first]) or "/"
            files, expected = _matching(table_path, root), "no file matches this pattern"
        else:
            if table_path.prefix:
                # Raises the reason.
                table_path.filesystem.get_file_info(fs.FileSelector(table_path.path))
            raise FileNotFoundError
        some = sorted(
            (_found(table_path, info, root) for info in files),
            key=lambda file: file.path.split("/"),
        )
    shown = [
        file
        for file in some
        if not any(part[0] in "._" for part in (*file.folders, file.path.rpartition("/")[2]))
    ]
    if not shown:
        raise DataError(f"{table_path.name}: {expected}")
    return shown


def _below(table_path: TablePath, folder: str) -> Iterator[Any]:
    infos = table_path.filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    return (info for info in infos if info.type != fs.FileType.Directory)


def _matching(table_path: TablePath, root: str) -> Iterator[Any]:
    pattern = table_path.path.removeprefix(root).lstrip("/")
    if not table_path.prefix:
        # Looks only into the folders that the pattern names.
        paths = [str(path) for path in Path(root).glob(pattern) if not path.is_dir()]
        return iter(table_path.filesystem.get_file_info(paths))
    inside, wanted = root.rstrip("/") + "/", pattern.split("/")
    return (
        info
        for info in _below(table_path, root)
        if _fits(info.path.removeprefix(inside).split("/"), wanted)
    )


def _fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    if not (path and pattern):
        return not path and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _fits(path, pattern[1:]) or _fits(path[1:], pattern)
    return fnmatchcase(path[0], pattern[0]) and _fits(path[1:], pattern[1:])


def _found(table_path: TablePath, info: Any, root: str) -> FoundFile:
    inside = info.path.removeprefix(root.rstrip("/") + "/") if info.path != root else ""
    folders = tuple(inside.split("/")[:-1])
    size, modified_ns = info.size or 0, info.mtime_ns or 0
    return FoundFile(info.path, table_path.prefix + info.path, size, modified_ns, folders)

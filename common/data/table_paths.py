"""Finds the files that a path names, on this machine or in an object store, in a fixed order."""

import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pyarrow import fs

from splitveil.common.data.source_settings import CsvSource, ParquetSource, expand_variables
from splitveil.common.data.sources import unreadable_is_data_error
from splitveil.common.errors import DataError

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
            return fs.S3FileSystem(
                region=_region(settings, bucket),
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


def _region(settings: ParquetSource, bucket: str) -> str | None:
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named is not None or settings.store.endpoint is not None:
        return named
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:
        return None  # listing the bucket will say why


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

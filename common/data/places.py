"""Finds the files that a path names, on this machine or in an object store, in a fixed order."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.utils import glob_translate
from pyarrow import fs

from splitveil.common.data.object_stores import open_store
from splitveil.common.data.source_settings import CsvSource, ParquetSource, expand_variables
from splitveil.common.data.sources import unreadable_is_data_error
from splitveil.common.errors import DataError

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
    """The folders between the place and the file."""

    @property
    def location(self) -> Path | str:
        """The file on this machine, or its address."""
        return self.name if "://" in self.name else Path(self.name)


class Place(NamedTuple):
    """A file, a folder, or a pattern for files."""

    filesystem: Any
    """A pyarrow FileSystem."""

    path: str
    """In that file system."""

    prefix: str
    """What messages write before a path: ``s3://`` and the like."""

    @property
    def name(self) -> str:
        """The place in messages."""
        return self.prefix + self.path


def place_of(settings: ParquetSource | CsvSource, base_dir: Path) -> Place:
    """Return the place that the settings name.

    Raises:
        SettingsError: a path names an environment variable that is not set, or the file with the
            credentials cannot be used.
    """
    if isinstance(settings, CsvSource) or settings.scheme is None:
        return place_on_this_machine(settings.resolve(base_dir))
    address = expand_variables("path", settings.path)
    path = address.partition("://")[2].rstrip("/")
    store = open_store(settings.scheme, settings.store, path.partition("/")[0], base_dir)
    return Place(store, path, f"{settings.scheme}://")


def place_on_this_machine(path: Path) -> Place:
    """Return a place on this machine."""
    return Place(fs.LocalFileSystem(), str(path), "")


def find_files(place: Place) -> list[FoundFile]:
    """Return the files at a place, in the order of their paths, compared segment by segment.

    Raises:
        DataError: there are none, or the place cannot be read.
    """
    with unreadable_is_data_error(place.name):
        found = place.filesystem.get_file_info(place.path)
        if found.type == fs.FileType.Directory:
            files, root = _below(place, place.path), place.path
            expected = "expected files in this folder, found none"
        elif found.type != fs.FileType.NotFound:
            return [_found(place, found, place.path)]
        elif _WILDCARD.search(place.path):
            root = _root_of(place.path)
            files, expected = _matching(place, root), "no file matches this pattern"
        else:
            if place.prefix:
                place.filesystem.get_file_info(fs.FileSelector(place.path))  # raises the reason
            raise FileNotFoundError
    some = sorted((_found(place, info, root) for info in files), key=_by_segments)
    shown = [file for file in some if not any(part[0] in "._" for part in _parts_below(file))]
    if not shown:
        raise DataError(f"{place.name}: {expected}")
    return shown


def _by_segments(file: FoundFile) -> list[str]:
    return file.path.split("/")


def _parts_below(file: FoundFile) -> Iterable[str]:
    return (*file.folders, file.path.rpartition("/")[2])


def _root_of(pattern: str) -> str:
    """Return the folder above the first segment that has a wildcard."""
    segments = pattern.split("/")
    first = next(i for i, segment in enumerate(segments) if _WILDCARD.search(segment))
    return "/".join(segments[:first]) or "/"


def _below(place: Place, folder: str) -> Iterator[Any]:
    infos = place.filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    return (info for info in infos if info.type != fs.FileType.Directory)


def _matching(place: Place, root: str) -> Iterator[Any]:
    pattern = place.path.removeprefix(root).lstrip("/")
    if not place.prefix:
        # Looks only into the folders that the pattern names.
        paths = [str(path) for path in Path(root).glob(pattern) if not path.is_dir()]
        return iter(place.filesystem.get_file_info(paths))
    matches = re.compile(glob_translate(pattern)).match
    inside = root.rstrip("/") + "/"
    return (info for info in _below(place, root) if matches(info.path.removeprefix(inside)))


def _found(place: Place, info: Any, root: str) -> FoundFile:
    inside = info.path.removeprefix(root.rstrip("/") + "/") if info.path != root else ""
    folders = tuple(inside.split("/")[:-1])
    size, modified_ns = info.size or 0, info.mtime_ns or 0
    return FoundFile(info.path, place.prefix + info.path, size, modified_ns, folders)

"""The interface of a source of rows, and the wording of messages about sources."""

import csv
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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

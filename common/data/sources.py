"""What a source of rows is, and how messages speak of one."""

import csv
import difflib
import lzma
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.errors import DataError
from splitveil.common.text.files import check_regular

PART_BYTES = 8 * 1024 * 1024
"""Of text; pyarrow reads up to 32 such blocks ahead."""

PART_ROWS = 64 * 1024

ArrowColumn = Any
"""A pyarrow ChunkedArray; pyarrow brings no types."""


_UNREADABLE = (
    OSError,
    EOFError,
    pa.ArrowException,
    csv.Error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What the libraries raise for damaged files."""


class Part(NamedTuple):
    """Some consecutive rows of a source."""

    columns: Mapping[str, ArrowColumn]
    image: NDArray[Any] | None  # as it is stored, (rows, ...)
    done_fraction: float  # of the source, with this part


class TableSource(Protocol):
    """One place that rows come from."""

    name: str
    """How messages call it."""

    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        ...

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        """Return the named columns, each of the same length; nothing else is read."""
        ...

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        """Yield the same rows some at a time, with their images: memory need not hold all."""
        ...


def suggest(name: str, known: Iterable[str]) -> str:
    """Name the most similar of the known names, for messages; empty where none is similar."""
    by_lower_case = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[close[0]]!r}?" if close else ""


def list_rows(rows: Sequence[int] | NDArray[np.int64], count: int | None = None) -> str:
    """Say which rows: the first five numbers and how many there are, for messages."""
    count = len(rows) if count is None else count
    first = ", ".join(str(row) for row in rows[:5])
    if count == 1:
        return f"row {first}"
    return f"rows {first}{', ...' if count > len(rows[:5]) else ''} ({count} in all)"


@contextmanager
def unreadable_is_data_error(path: Path) -> Iterator[None]:
    """Raise DataError, without a word of what stands in the file, where it cannot be read."""
    try:
        check_regular(path)
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the text is not UTF-8") from error
    except MemoryError as error:  # pyarrow's, too
        raise DataError(
            f"{path}: does not fit into memory; data.source.cache_dir converts it some rows at a "
            f"time"
        ) from error
    except _UNREADABLE as error:
        # The library's own text may quote a row.
        damaged = f"damaged, or not such a file ({type(error).__name__})"
        reason = getattr(error, "strerror", None) or damaged
        raise DataError(f"{path}: cannot be read: {reason}") from error

"""Leaves rows out of converted columns, in bounded memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KEPT_ROWS = "kept_rows.bin"
"""The rows of the original file that the converted columns hold, int64, if some were left out."""

_BY_ROW = ("labels.bin", "weights.bin", "splits.bin", "numeric.bin", "codes.bin", "image.bin")
_AT_ONCE = 64 * 1024


def keep_rows(folder: Path, num_rows: int, kept: NDArray[np.int64]) -> None:
    """Keep only some rows, ascending, of all files in a folder of converted columns."""
    for name in _BY_ROW:
        path = folder / name
        if path.is_file():
            size = path.stat().st_size // num_rows
            rows = np.memmap(path, np.uint8, "r", shape=(num_rows, size))
            _replace(path, (rows[kept[at : at + _AT_ONCE]] for at in _starts(kept)))
    _keep_ids(folder, num_rows, kept)
    kept.astype(np.int64).tofile(folder / KEPT_ROWS)


def _keep_ids(folder: Path, num_rows: int, kept: NDArray[np.int64]) -> None:
    ends = np.fromfile(folder / "id_ends.bin", np.int64, num_rows)
    starts = np.concatenate([[0], ends[:-1]])
    text = np.memmap(folder / "ids.bin", np.uint8, "r")

    def texts() -> Iterator[NDArray[np.uint8]]:
        for at in _starts(kept):
            rows = kept[at : at + _AT_ONCE]
            spans = zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)
            yield np.concatenate([text[start:end] for start, end in spans])

    _replace(folder / "ids.bin", texts())
    np.cumsum((ends - starts)[kept]).astype(np.int64).tofile(folder / "id_ends.bin")


def _starts(kept: NDArray[np.int64]) -> range:
    return range(0, len(kept), _AT_ONCE)


def _replace(path: Path, pieces: Iterator[NDArray[np.uint8]]) -> None:
    temporary = path.with_name(f"part-{path.name}")
    with temporary.open("wb") as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).data)
    temporary.replace(path)

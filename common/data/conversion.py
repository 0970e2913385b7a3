"""Writes a party's file as arrays that can be memory-mapped, in bounded memory.

The source is read once. Each category first gets a number within its part of the file. Its number
in the whole file is known only after the last part; a second pass over the numbers alone, column by
column, replaces the first numbers by the final ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import TableSource
from splitveil.common.data.stored_ids import ID_OFFSETS, IDS, GrowingArrays, StoredIds
from splitveil.common.data.table import Table, TableReader
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule
from splitveil.common.text.files import sync

MANIFEST = "manifest.json"

Progress = Callable[[float], None]
"""Called with the fraction of the work that is done."""

_FIRST_PASS = 0.9
"""Fraction of the total time that the first pass takes."""


def convert(
    settings: DataSettings,
    source: TableSource,
    folder: Path,
    progress: Progress,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> None:
    """Write the columns that the settings name into an empty folder.

    DataError counts the rows with a problem in the part of the file that holds the first of them.
    """
    with closing(GrowingArrays(folder)) as arrays:
        reader = TableReader(settings, source, split_column, id_rules, arrays)
        coded = reader.selection.coded
        with ExitStack() as open_texts:
            texts = [
                open_texts.enter_context(_new_texts(_part_texts(folder, j)))
                for j in range(len(coded))
            ]
            ends = [0]
            for part in source.parts(reader.selection.needed):
                table = reader.add(part.columns, part.image)
                ends.append(reader.num_rows)
                _append(arrays, texts, table)
                progress(_FIRST_PASS * part.done_fraction)
        is_labelled = settings.label_column is not None and reader.num_rows > 0
        labels = arrays.array("labels.bin", np.float32) if is_labelled else None
        found = reader.usable_ids(labels)
    _number_categories(
        folder, len(coded), ends, lambda share: progress(_FIRST_PASS + (1 - _FIRST_PASS) * share)
    )
    if found.kept is not None:
        keep_rows(folder, reader.num_rows, found.kept)
    image = table.image
    manifest = {
        "source": table.source,
        "rows": reader.num_rows if found.kept is None else len(found.kept),
        "numeric": list(table.numeric),
        "categorical": list(table.categorical),
        "lists": list(table.lists),
        "sequences": list(table.sequences),
        "timestamps": table.timestamps,
        "gaps": table.gaps,
        "image": None if image is None else {"shape": image.shape[1:], "dtype": image.dtype.name},
        "labels": settings.label_column is not None,
        "ids": settings.id_column is not None,
        "id_doubts": found.doubts,
        "id_report": asdict(found.report),
        "kept": found.kept is not None,
        "splits": split_column is not None,
        "weights": settings.weight_column is not None,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for path in folder.iterdir():
        sync(path)


def _append(arrays: GrowingArrays, texts: Sequence[Any], table: Table) -> None:
    numeric, coded = [*table.numeric.values()], [*table.coded.values()]
    for name, array in (
        ("labels.bin", table.labels),
        ("weights.bin", table.weights),
        ("splits.bin", table.splits),
        ("numeric.bin", np.column_stack(numeric).astype(np.float64) if numeric else None),
        ("codes.bin", np.column_stack([column.codes for column in coded]) if coded else None),
        ("image.bin", table.image),
    ):
        if array is not None:
            arrays.append(name, array)
    for writer, column in zip(texts, coded, strict=True):
        writer.write_batch(pa.record_batch([column.categories], schema=TEXT))


@contextmanager
def _new_texts(path: Path) -> Iterator[Any]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, TEXT) as writer:
        yield writer


def _number_categories(
    folder: Path, num_columns: int, ends: Sequence[int], progress: Progress
) -> None:
    if not num_columns:
        return
    numbers = []
    for j in range(num_columns):
        pa.default_memory_pool().release_unused()  # one column's memory at a time
        numbers.append(_join_texts(folder, j))
        progress(0.7 * (j + 1) / num_columns)
    stored = np.memmap(folder / "codes.bin", np.int32, "r+")
    codes = stored.reshape(-1, num_columns)
    for part, (start, end) in enumerate(pairwise(ends)):
        # One list for all columns. Code -1, no value, selects the entry before a column's own.
        of_part = [np.append(np.int32(-1), of_column[part]) for of_column in numbers]
        firsts = np.cumsum([1, *(len(of_column) for of_column in of_part[:-1])])
        codes[start:end] = np.concatenate(of_part)[codes[start:end] + firsts]
        progress(0.7 + 0.3 * end / ends[-1])
    stored.flush()
    for path in folder.glob("part-*"):
        path.unlink()


def _join_texts(folder: Path, j: int) -> Sequence[NDArray[np.int32]]:
    """Write one column's distinct texts; return their numbers, part by part, on disk."""
    with pa.memory_map(str(_part_texts(folder, j))) as stored:
        reader = pa.ipc.open_file(stored)
        parts = [reader.get_batch(i).column(0) for i in range(reader.num_record_batches)]
        joined = pa.chunked_array(
            [
                pa.DictionaryArray.from_arrays(
                    pa.array(np.arange(len(texts), dtype=np.int32)), texts
                )
                for texts in parts
            ]
        ).unify_dictionaries()
    with _new_texts(categories_path(folder, j)) as writer:
        writer.write_batch(pa.record_batch([joined.chunk(0).dictionary], schema=TEXT))
    path = folder / f"part-numbers-{j}"
    with path.open("wb") as file:
        for chunk in joined.chunks:
            file.write(np.ascontiguousarray(chunk.indices.to_numpy(), np.int32).data)
    ends = np.cumsum([0, *(len(texts) for texts in parts)])
    if not ends[-1]:
        return [np.empty(0, np.int32) for _ in parts]
    numbers = np.memmap(path, np.int32, "r")
    return [numbers[start:end] for start, end in pairwise(ends)]


def _part_texts(folder: Path, j: int) -> Path:
    return folder / f"part-texts-{j}"


TEXT = pa.schema([("text", pa.string())])


def categories_path(folder: Path, j: int) -> Path:
    return folder / f"categories-{j}.arrow"


KEPT_ROWS = "kept_rows.bin"
"""The rows of the original file that the converted columns hold, int64, if some were left out."""

_BY_ROW = ("labels.bin", "weights.bin", "splits.bin", "numeric.bin", "codes.bin", "image.bin")
_AT_ONCE = 64 * 1024


def keep_rows(folder: Path, num_rows: int, kept: NDArray[np.int64]) -> None:
    """Keep only some rows, ascending, of all files in a folder of converted columns."""
    some = np.array_split(kept, max(1, len(kept) // _AT_ONCE))
    for name in _BY_ROW:
        path = folder / name
        if path.is_file():
            size = path.stat().st_size // num_rows
            rows = np.memmap(path, np.uint8, "r", shape=(num_rows, size))
            _replace(path, (rows[part] for part in some))
    ids = StoredIds.open(folder, num_rows)
    offsets = np.cumsum(np.append(0, np.diff(ids.offsets)[kept]))
    _replace(folder / IDS, (ids.take(part).text for part in some))
    offsets.tofile(folder / ID_OFFSETS)
    kept.astype(np.int64).tofile(folder / KEPT_ROWS)


def _replace(path: Path, pieces: Iterator[NDArray[np.uint8]]) -> None:
    temporary = path.with_name(f"part-{path.name}")
    with temporary.open("wb") as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).data)
    temporary.replace(path)

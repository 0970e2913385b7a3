"""Opens a party's file as memory-mapped arrays, after converting it once in bounded memory.

    <cache_dir>/<file name>-<key>/
        manifest.json           number of rows, names of the columns, shape of the images
        numeric.bin             float64, (rows, numeric columns), NaN for a gap that is filled later
        codes.bin               int32, (rows, columns), -1 for a missing value: categorical columns,
                                columns of lists, columns of sequences
        categories-<j>.arrow    the distinct texts of one column, in the order of the codes
        labels.bin              float32, (rows,)
        weights.bin             float64, (rows,), if the settings name a column of weights
        splits.bin              int8, (rows,), if the contract splits by a column
        image.bin               uint8 or float32, (rows, channels, height, width)
        ids.bin, id_offsets.bin the canonical ids, UTF-8, and where each begins, and the end, int64
        kept_rows.bin           int64, (rows,), the rows of the file, if some were left out

All columns of a row are stored together, so that a batch in random order costs one look-up per row
instead of one per cell. The key is a digest of the file's path, size and modification time and of
the settings that decide what is read. The folder gets its name only after all of it is on disk, so
a folder with that name is always complete. Files left by a killed conversion are deleted by the
next one.

A conversion reads the source once. Each category first gets a number within its part of the file.
Its number in the whole file is known only after the last part; a second pass over the numbers
alone, column by column, replaces the first numbers by the final ones.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data import source_settings
from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.data.ids import IdReport
from splitveil.common.data.kinds import open_source
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import TableSource, find_files, table_path_of
from splitveil.common.data.sql_snapshot import snapshot_of
from splitveil.common.data.stored_ids import ID_OFFSETS, IDS, GrowingArrays, RowNumbers, StoredIds
from splitveil.common.data.table import Table, TableReader
from splitveil.common.errors import DataError, StorageError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule, rules_as_plain
from splitveil.common.settings import Mark, marked, without
from splitveil.common.text.files import only_one_process, sync

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
                open_texts.enter_context(_new_texts(folder / f"part-texts-{j}"))
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
    with pa.memory_map(str(folder / f"part-texts-{j}")) as stored:
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


TEXT = pa.schema([("text", pa.string())])


def categories_path(folder: Path, j: int) -> Path:
    return folder / f"categories-{j}.arrow"


KEPT_ROWS = "kept_rows.bin"
"""The rows of the original file that the converted columns hold, int64, if some were left out."""

_AT_ONCE = 64 * 1024


def keep_rows(folder: Path, num_rows: int, kept: NDArray[np.int64]) -> None:
    """Keep only some rows, ascending, of all files in a folder of converted columns."""
    some = np.array_split(kept, max(1, len(kept) // _AT_ONCE))
    for name in ("labels", "weights", "splits", "numeric", "codes", "image"):
        path = folder / f"{name}.bin"
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


VERSION = 2
"""Version of the format of these files and of the rules for reading cells."""


def open_converted(
    settings: DataSettings,
    base_dir: Path,
    progress: Progress,
    split_column: str | None = None,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> Table:
    """Open the converted columns that the settings name; convert the file first if necessary."""
    source: Any = settings.source
    cache_dir = source_settings.expand_path("cache_dir", source.cache_dir, base_dir)
    stamps = stamps_of(source, base_dir)
    name = getattr(source, "path", "query").rstrip("/").rpartition("/")[2]
    name = re.sub(r"[*?\[\]:${}]+", "_", name)
    plain = without(marked(DataSettings, Mark.UNCACHED), settings.model_dump(mode="json"))
    gaps = None if settings.features is None else settings.features.gaps
    rules = rules_as_plain(id_rules)
    text = json.dumps([VERSION, stamps, plain, gaps, split_column, rules], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = cache_dir / f"{name}-{key}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Two parties on one machine may need the same columns of the same file at the same time.
        with only_one_process(folder.with_name(f".{folder.name}.lock")):
            if not (folder / MANIFEST).is_file():
                _convert(settings, base_dir, folder, progress, split_column, id_rules)
                if stamps_of(source, base_dir) != stamps:
                    shutil.rmtree(folder)
                    raise DataError(f"{folder.name}: the file changed during its conversion")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StorageError(f"{folder}: cannot be used as a cache: {reason}") from error
    try:
        return _open(folder)
    except (OSError, ValueError, LookupError) as error:
        raise StorageError(
            f"{folder}: damaged ({type(error).__name__}); delete it to convert the file again"
        ) from error


def stamps_of(source: source_settings.Source, base_dir: Path) -> list[list[Any]]:
    """Return path, size and time of each file that a source consists of."""
    stamps: list[list[Any]] = []
    match source:
        case source_settings.ParquetSource() | source_settings.CsvSource():
            for file in find_files(table_path_of(source, base_dir)):
                place = file.location
                named = str(place.resolve()) if isinstance(place, Path) else place
                stamps.append([named, file.num_bytes, file.modified_ns])
            return stamps
        case source_settings.SqlSource():
            paths = [snapshot_of(source, base_dir)]
        case source_settings.FileSource():
            paths = source.files(base_dir)
        case _:
            paths = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        stamps.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stamps


def _convert(
    settings: DataSettings,
    base_dir: Path,
    folder: Path,
    progress: Progress,
    split_column: str | None,
    id_rules: Sequence[IdRule],
) -> None:
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # left by a process that was killed
        shutil.rmtree(left)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(0o700)  # the original file may be readable by its owner only
        source = open_source(settings.source, base_dir)
        convert(settings, source, temporary, progress, split_column, id_rules)
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _open(folder: Path) -> Table:
    found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    num_rows, numeric = found["rows"], found["numeric"]
    kinds = ("categorical", "lists", "sequences")
    coded = [name for kind in kinds for name in found[kind]]

    def mapped(name: str, dtype: str, *shape: int) -> NDArray[Any]:
        if 0 in shape:
            return np.empty((num_rows, *shape), dtype)
        return np.memmap(folder / name, dtype, "r", shape=(num_rows, *shape))

    numeric_rows = mapped("numeric.bin", "float64", len(numeric))
    code_rows = mapped("codes.bin", "int32", len(coded))
    columns = {}
    for j, name in enumerate(coded):
        texts = pa.ipc.open_file(pa.memory_map(str(categories_path(folder, j)))).get_batch(0)
        columns[name] = CategoricalColumn(code_rows[:, j], texts.column(0))
    image = found["image"]
    return Table(
        source=found["source"],
        ids=StoredIds.open(folder, num_rows) if found["ids"] else RowNumbers(num_rows),
        labels=mapped("labels.bin", "float32") if found["labels"] else None,
        weights=mapped("weights.bin", "float64") if found["weights"] else None,
        splits=mapped("splits.bin", "int8") if found["splits"] else None,
        numeric={name: numeric_rows[:, j] for j, name in enumerate(numeric)},
        image=None if image is None else mapped("image.bin", image["dtype"], *image["shape"]),
        **{kind: {name: columns[name] for name in found[kind]} for kind in kinds},
        gaps=found["gaps"],
        timestamps=tuple(found["timestamps"]),
        numeric_rows=numeric_rows,
        code_rows=code_rows,
        id_doubts=tuple(found["id_doubts"]),
        id_report=IdReport(**found["id_report"]),
        kept=mapped(KEPT_ROWS, "int64") if found["kept"] else None,
    )

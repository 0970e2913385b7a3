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
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data import source_settings
from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.data.conversion import KEPT_ROWS, MANIFEST, Progress, categories_path, convert
from splitveil.common.data.ids import IdReport
from splitveil.common.data.kinds import open_source
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sql_snapshot import snapshot_of
from splitveil.common.data.stored_ids import RowNumbers, StoredIds
from splitveil.common.data.table import Table
from splitveil.common.data.table_paths import FoundFile, find_files, table_path_of
from splitveil.common.errors import DataError, StorageError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule, rules_as_plain
from splitveil.common.text.files import only_one_process, sync

VERSION = 2
"""Version of the format of these files and of the rules by which cells are read."""

_FILE_SETTINGS = (
    *("cache_dir", "path", "table", "store"),
    *("driver", "uri", "uri_file", "query", "snapshot", "snapshot_dir"),
)
"""Settings of sources that decide only which files are read, of which the key has the stamps."""


_NOT_IN_NAMES = r"[*?\[\]:${}]+"


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
    key = _key(settings, stamps, split_column, id_rules)
    folder = cache_dir / f"{re.sub(_NOT_IN_NAMES, '_', name)}-{key}"
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


def _key(
    settings: DataSettings,
    stamps: list[list[Any]],
    split_column: str | None,
    id_rules: Sequence[IdRule],
) -> str:
    plain = settings.model_dump(
        mode="json",
        exclude={
            "source": set(_FILE_SETTINGS),
            "features": {
                **dict.fromkeys(("signed_log1p", "numeric_scaling", "missing_numeric"), True),
                **dict.fromkeys(("missing_indicator", "min_count", "max_list_categories"), True),
                "sequences": {"__all__": {"max_length", "tokenizer"}},  # num_tokens says which kind
            },
            "class_weights": True,
            "weights_are_label_free": True,
        },
    )
    gaps = None if settings.features is None else settings.features.gaps
    rules = rules_as_plain(id_rules)
    text = json.dumps([VERSION, stamps, plain, gaps, split_column, rules], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamps_of(source: source_settings.Source, base_dir: Path) -> list[list[Any]]:
    """Return path, size and time of each file that a source consists of."""
    match source:
        case source_settings.ParquetSource() | source_settings.CsvSource():
            found = find_files(table_path_of(source, base_dir))
            return [[_resolved(file), file.num_bytes, file.modified_ns] for file in found]
        case source_settings.SqlSource():
            paths = [snapshot_of(source, base_dir)]
        case source_settings.FileSource():
            paths = source.files(base_dir)
        case _:
            paths = []
    return [_stamp(path) for path in paths]


def _stamp(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return [str(path.resolve()), found.st_size, found.st_mtime_ns]


def _resolved(file: FoundFile) -> str:
    return str(file.location.resolve()) if isinstance(file.location, Path) else file.location


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
    columns = {
        name: CategoricalColumn(code_rows[:, j], _categories(folder, j))
        for j, name in enumerate(coded)
    }
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


def _categories(folder: Path, j: int) -> Any:
    return pa.ipc.open_file(pa.memory_map(str(categories_path(folder, j)))).get_batch(0).column(0)

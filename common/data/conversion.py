"""Writes a party's file as arrays that can be memory-mapped, in bounded memory.

The source is read once. Each category first gets a number within its part of the file. Its number
in the whole file is known only after the last part; a second pass over the numbers alone, column by
column, replaces the first numbers by the final ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.id_parts import IdParts
from splitveil.common.data.ids import IdReport, check_rules
from splitveil.common.data.label_columns import check_classes
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import Part, TableSource
from splitveil.common.data.stored_ids import StoredIds
from splitveil.common.data.table import (
    Selection,
    part_categories,
    part_image,
    part_labels,
    part_numeric,
    part_splits,
    part_weights,
    select_columns,
)
from splitveil.common.errors import DataError
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
    check_rules(settings, id_rules)
    selection = select_columns(settings, source, split_column)
    ids = IdParts(settings, source.name, CanonicalForm(id_rules))
    with _Writer(settings, source.name, selection, folder, split_column, ids) as writer:
        for part in source.parts(selection.needed):
            writer.add(part)
            progress(_FIRST_PASS * part.done_fraction)
        writer.finish(lambda share: progress(_FIRST_PASS + (1 - _FIRST_PASS) * share))


class _Writer:
    def __init__(
        self,
        settings: DataSettings,
        source: str,
        selection: Selection,
        folder: Path,
        split_column: str | None,
        ids: IdParts,
    ) -> None:
        self._settings = settings
        self._ids = ids
        self._split_column = split_column
        self._source = source
        self._selection = selection
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._open = ExitStack()
        self._image: dict[str, Any] | None = None
        self._part_rows: list[int] = []
        self._texts = [
            self._open.enter_context(
                pa.ipc.new_file(
                    self._open.enter_context(pa.OSFile(str(self._part_texts(j)), "wb")), TEXT
                )
            )
            for j in range(len(selection.coded))
        ]

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, part: Part) -> None:
        first_row = sum(self._part_rows) + 1
        labels = part_labels(self._settings, part.columns, self._source, first_row)
        if labels is not None:
            self._append("labels.bin", labels)
        weights = part_weights(self._settings, part.columns, self._source, first_row)
        if weights is not None:
            self._append("weights.bin", weights)
        splits = part_splits(self._split_column, part.columns, self._source, first_row)
        if splits is not None:
            self._append("splits.bin", splits)
        numeric = part_numeric(
            self._settings, self._selection, part.columns, self._source, first_row
        )
        if numeric:
            self._append("numeric.bin", np.column_stack(list(numeric.values())).astype(np.float64))
        self._add_categories(part, first_row)
        if part.image is not None:
            self._add_image(part.image, first_row)
        if self._settings.id_column is not None:
            self._add_ids(part, first_row, labels)
        lengths = [len(column) for column in part.columns.values()]
        self._part_rows.append(lengths[0] if part.image is None else len(part.image))

    def finish(self, progress: Progress) -> None:
        """Run the checks that need the whole file, number the categories, write the manifest."""
        num_rows = sum(self._part_rows)
        if not num_rows:
            raise DataError(f"{self._source}: there are no rows")
        self._open.close()
        label_column, id_column = self._settings.label_column, self._settings.id_column
        kept, report = None, IdReport(num_rows)
        if label_column is not None:
            labels = np.memmap(self._folder / "labels.bin", np.float32, "r")
            check_classes(self._settings, labels, self._source)
        if id_column is not None:
            kept, report = self._finish_ids(num_rows)
        self._number_categories(progress)
        if kept is not None:
            keep_rows(self._folder, num_rows, kept)
            num_rows = len(kept)
        manifest = {
            "source": self._source,
            "rows": num_rows,
            "numeric": self._selection.numeric,
            "categorical": self._selection.chosen.categorical,
            "lists": self._selection.chosen.lists,
            "timestamps": self._selection.chosen.timestamps,
            "gaps": self._settings.features.gaps if self._settings.features else "refused",
            "image": self._image,
            "labels": label_column is not None,
            "ids": id_column is not None,
            "id_doubts": self._ids.forms.doubts() if id_column is not None else [],
            "id_report": asdict(report),
            "kept": kept is not None,
            "splits": self._split_column is not None,
            "weights": self._settings.weight_column is not None,
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for path in self._folder.iterdir():
            sync(path)

    def _add_ids(self, part: Part, first_row: int, labels: NDArray[np.float32] | None) -> None:
        ids = self._ids.add(part.columns, first_row, labels)
        self._append("ids.bin", ids.text)
        self._append("id_ends.bin", ids.ends)
        self._append(_HASHES, ids.hashes)
        self._append(_RAW_HASHES, ids.raw_hashes)

    def _finish_ids(self, num_rows: int) -> tuple[NDArray[np.int64] | None, IdReport]:
        hashes, raw_hashes = (
            np.memmap(self._folder / name, np.int64, "r") for name in (_HASHES, _RAW_HASHES)
        )
        found = self._ids.finish(open_ids(self._folder, num_rows), hashes, raw_hashes)
        for name in (_HASHES, _RAW_HASHES):
            (self._folder / name).unlink()
        return found

    def _add_categories(self, part: Part, first_row: int) -> None:
        columns = part_categories(
            self._settings, self._selection, part.columns, self._source, first_row
        )
        if not columns:
            return
        self._append("codes.bin", np.column_stack([c.codes for c in columns.values()]))
        for texts, column in zip(self._texts, columns.values(), strict=True):
            texts.write_batch(pa.record_batch([column.categories], schema=TEXT))

    def _add_image(self, stored: NDArray[Any], first_row: int) -> None:
        features = self._settings.features
        if features is None or features.image is None:
            return
        image = part_image(stored, features.image, self._source, first_row)
        self._image = {"shape": list(image.shape[1:]), "dtype": image.dtype.name}
        self._append("image.bin", image)

    def _append(self, name: str, array: NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = self._open.enter_context((self._folder / name).open("wb"))
        self._files[name].write(np.ascontiguousarray(array).data)

    def _number_categories(self, progress: Progress) -> None:
        """Replace each number within a part of the file by the number within the whole file."""
        num_columns = len(self._selection.coded)
        if not num_columns:
            return
        numbers = []
        for j in range(num_columns):
            pa.default_memory_pool().release_unused()  # one column's memory at a time
            numbers.append(self._join_texts(j))
            progress(0.7 * (j + 1) / num_columns)
        stored = np.memmap(self._folder / "codes.bin", np.int32, "r+")
        codes = stored.reshape(-1, num_columns)
        ends = np.cumsum([0, *self._part_rows])
        for part, (start, end) in enumerate(pairwise(ends)):
            # One list for all columns. Code -1, no value, selects the entry before a column's own.
            of_part = [np.append(np.int32(-1), of_column[part]) for of_column in numbers]
            firsts = np.cumsum([1, *(len(of_column) for of_column in of_part[:-1])])
            codes[start:end] = np.concatenate(of_part)[codes[start:end] + firsts]
            progress(0.7 + 0.3 * end / ends[-1])
        stored.flush()
        for path in self._folder.glob("part-*"):
            path.unlink()

    def _join_texts(self, j: int) -> Sequence[NDArray[np.int32]]:
        """Write one column's distinct texts; return their numbers, part by part, on disk."""
        with pa.memory_map(str(self._part_texts(j))) as stored:
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
        with (
            pa.OSFile(str(categories_path(self._folder, j)), "wb") as file,
            pa.ipc.new_file(file, TEXT) as writer,
        ):
            writer.write_batch(pa.record_batch([joined.chunk(0).dictionary], schema=TEXT))
        path = self._folder / f"part-numbers-{j}"
        with path.open("wb") as file:
            for chunk in joined.chunks:
                file.write(np.ascontiguousarray(chunk.indices.to_numpy(), np.int32).data)
        ends = np.cumsum([0, *(len(texts) for texts in parts)])
        if not ends[-1]:
            return [np.empty(0, np.int32) for _ in parts]
        numbers = np.memmap(path, np.int32, "r")
        return [numbers[start:end] for start, end in pairwise(ends)]

    def _part_texts(self, j: int) -> Path:
        return self._folder / f"part-texts-{j}"


_HASHES = "part-id-hashes"
_RAW_HASHES = "part-raw-id-hashes"

TEXT = pa.schema([("text", pa.string())])


def categories_path(folder: Path, j: int) -> Path:
    return folder / f"categories-{j}.arrow"


def open_ids(folder: Path, num_rows: int) -> StoredIds:
    """Return the ids of a converted file.

    ValueError if its files are shorter than when they were written.
    """
    ends = np.memmap(folder / "id_ends.bin", np.int64, "r", shape=(num_rows,))
    text = np.memmap(folder / "ids.bin", np.uint8, "r", shape=(int(ends[-1]),))
    return StoredIds(text, ends)


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

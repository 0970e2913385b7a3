"""Columns of lists of categories, each cell as the text of a set of categories.

A set is written as its categories in the order of their text, with ``SEPARATOR`` between them, so
that equal sets are equal texts and the column is stored like any column of categories.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import CategoricalColumn, WrittenColumn, clean_text
from splitveil.common.data.sources import ArrowColumn
from splitveil.common.errors import DataError

SEPARATOR = "\x1f"
"""The unit separator of ASCII, which no category may hold."""


def read_lists(column: WrittenColumn, separator: str) -> CategoricalColumn:
    """Return a column's distinct sets, and the set of each row as an index; -1 for an empty one.

    Its cells are lists, or texts with ``separator`` between the categories.
    """
    cells = column.cells
    if isinstance(cells, pa.ChunkedArray):
        cells = cells.combine_chunks()
    if pa.types.is_dictionary(cells.type):
        cells = pc.cast(cells, cells.type.value_type)
    if _is_list(cells.type):
        rows = pc.list_parent_indices(cells).to_numpy()
        items = pc.list_flatten(cells)
    else:
        texts = clean_text(column._replace(cells=cells))
        split = pc.split_pattern(texts, separator)
        rows, items = pc.list_parent_indices(split).to_numpy(), pc.list_flatten(split)
    words = clean_text(column._replace(cells=items))
    is_there = pc.is_valid(words).to_numpy(zero_copy_only=False)
    if pc.any(pc.match_substring(words, SEPARATOR)).as_py():
        has_it = pc.fill_null(pc.match_substring(words, SEPARATOR), False)
        wrong = np.zeros(len(cells), np.bool_)
        wrong[rows[has_it.to_numpy(zero_copy_only=False)]] = True
        raise DataError(
            f"{column.where}: expected categories without the control character U+001F in "
            f"{column.list_rows(wrong)}"
        )
    return _as_sets(rows[is_there], words.filter(pa.array(is_there)), len(cells))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _as_sets(rows: NDArray[np.int64], words: ArrowColumn, num_rows: int) -> CategoricalColumn:
    encoded = pc.dictionary_encode(words)
    texts = encoded.dictionary.to_pylist()
    # Sorted by the words' text, each word once per row.
    rank = np.empty(len(texts), np.int64)
    rank[np.argsort(np.array(texts, dtype=object))] = np.arange(len(texts))
    in_order = sorted(texts)
    pairs = np.unique(
        np.column_stack([rows, rank[encoded.indices.to_numpy()]]).reshape(-1, 2), axis=0
    )
    counts = np.bincount(pairs[:, 0], minlength=num_rows)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    sorted_words = pa.array(in_order, pa.string()).take(pa.array(pairs[:, 1]))
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), sorted_words), SEPARATOR)
    joined = pc.if_else(pa.array(counts > 0), joined, pa.scalar(None, pa.string()))
    distinct = pc.dictionary_encode(joined)
    codes = pc.fill_null(distinct.indices, -1).to_numpy(zero_copy_only=False)
    return CategoricalColumn(np.asarray(codes, np.int32), distinct.dictionary)


class SetMembers:
    """Which of some categories each of a column's distinct sets has.

    All others are the last member.
    """

    def __init__(self, sets: ArrowColumn, categories: Sequence[str]) -> None:
        split = pc.split_pattern(sets, SEPARATOR)
        found = pc.index_in(
            pc.list_flatten(split), value_set=pa.array(list(categories), pa.string())
        )
        self._members = np.asarray(
            pc.fill_null(found, len(categories)).to_numpy(zero_copy_only=False), np.int64
        )
        lengths = pc.fill_null(pc.list_value_length(split), 0).to_numpy(zero_copy_only=False)
        # Code -1, an empty set, selects the last entry.
        self._lengths = np.append(lengths, 0).astype(np.int64)
        self._starts = np.append(np.cumsum(self._lengths[:-1]) - self._lengths[:-1], 0)
        self.width = len(categories) + 1

    def __call__(self, codes: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return 1 for each member of the rows' sets, else 0, (rows, categories + 1)."""
        lengths = self._lengths[codes]
        rows = np.repeat(np.arange(len(codes)), lengths)
        firsts = np.repeat(self._starts[codes] - np.cumsum(lengths) + lengths, lengths)
        result = np.zeros((len(codes), self.width), np.float32)
        result[rows, self._members[firsts + np.arange(len(rows))]] = 1.0
        return result


def count_members(sets: ArrowColumn, counts: NDArray[np.int64]) -> dict[str, int]:
    """Return how many rows have each category, from the number of rows with each set."""
    split = pc.split_pattern(sets, SEPARATOR)
    encoded = pc.dictionary_encode(pc.list_flatten(split))
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(split), 0).to_numpy(zero_copy_only=False)
    found = np.zeros(len(encoded.dictionary), np.int64)
    np.add.at(found, encoded.indices.to_numpy(), np.repeat(counts, lengths))
    return dict(zip(encoded.dictionary.to_pylist(), found.tolist(), strict=True))

"""Columns of lists, each cell as one text, so that they are stored like any column of categories.

A set is written as its categories in the order of their text, and a sequence as its tokens in their
own order, with ``SEPARATOR`` between them: equal sets, and equal sequences, are equal texts.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import (
    CategoricalColumn,
    WrittenColumn,
    clean_text,
    read_categories,
)
from splitveil.common.data.sources import ArrowColumn
from splitveil.common.errors import DataError

SEPARATOR = "\x1f"
"""The unit separator of ASCII, which no category may hold."""


def read_lists(column: WrittenColumn, separator: str) -> CategoricalColumn:
    """Return a column's distinct sets, and the set of each row as an index; -1 for an empty one.

    Its cells are lists, or texts with ``separator`` between the categories.
    """
    rows, words = _words(column, separator, column.missing_texts)
    is_there = pc.is_valid(words)
    rows, words = rows[is_there.to_numpy(zero_copy_only=False)], words.filter(is_there)
    has_it = pc.match_substring(words, SEPARATOR).to_numpy(zero_copy_only=False)
    _check_words(
        column, rows[has_it], "expected categories without the control character U+001F in"
    )
    encoded = pc.dictionary_encode(words)
    texts = encoded.dictionary.to_pylist()
    # Sorted by the words' text, each word once per row.
    rank = np.empty(len(texts), np.int64)
    rank[np.argsort(np.array(texts, dtype=object))] = np.arange(len(texts))
    pairs = np.unique(
        np.column_stack([rows, rank[encoded.indices.to_numpy()]]).reshape(-1, 2), axis=0
    )
    in_order = pa.array(sorted(texts), pa.string()).take(pa.array(pairs[:, 1]))
    return _joined(pairs[:, 0], in_order, len(column.cells))


def read_tokens(column: WrittenColumn, separator: str, num_tokens: int | None) -> CategoricalColumn:
    """Return a column's distinct sequences, as ``read_lists`` returns sets.

    They are whole numbers below ``num_tokens``, or texts if it is None.
    """
    if num_tokens is None:
        return read_categories(column)
    rows, words = _words(column, separator, ())  # a gap would move the tokens behind it
    is_number = pc.fill_null(pc.match_substring_regex(words, r"^\d{1,18}$"), False)
    numbers = pc.cast(pc.if_else(is_number, words, "-1"), pa.int64()).to_numpy()
    is_wrong = (numbers < 0) | (numbers >= num_tokens)
    _check_words(column, rows[is_wrong], f"expected whole numbers from 0 to {num_tokens - 1:,} in")
    return _joined(rows, words, len(column.cells))


def _words(
    column: WrittenColumn, separator: str, missing_texts: Sequence[str]
) -> tuple[NDArray[np.int64], ArrowColumn]:
    """Return all entries of all cells, null for those that are missing, and the row of each."""
    cells = column.cells
    if isinstance(cells, pa.ChunkedArray):
        cells = cells.combine_chunks()
    if pa.types.is_dictionary(cells.type):
        cells = pc.cast(cells, cells.type.value_type)
    if not is_list(cells.type):
        cells = pc.split_pattern(clean_text(column._replace(cells=cells)), separator)
    entries = column._replace(cells=pc.list_flatten(cells), missing_texts=missing_texts)
    return pc.list_parent_indices(cells).to_numpy(), clean_text(entries)


def is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _check_words(column: WrittenColumn, rows: NDArray[np.int64], expected: str) -> None:
    if len(rows):
        is_wrong = np.zeros(len(column.cells), np.bool_)
        is_wrong[rows] = True
        raise DataError(f"{column.where}: {expected} {column.list_rows(is_wrong)}")


def _joined(rows: NDArray[np.int64], words: ArrowColumn, num_rows: int) -> CategoricalColumn:
    counts = np.bincount(rows, minlength=num_rows)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), words), SEPARATOR)
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

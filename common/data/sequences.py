"""Columns of lists: sets of categories, and sequences of tokens.

Each cell is kept as one text, like any category: a set as its categories in the order of their
text, and a sequence as its tokens in their own order, with ``SEPARATOR`` between them. Equal sets,
and equal sequences, are equal texts. Tokens are whole numbers from the table, or a tokenizer's
output for a text.

A tokenizer is data: it comes from a JSON file, which the library ``tokenizers`` reads, and runs no
code of anybody else. Its rules can still make a text longer without end, search it for ever, or let
the library panic, so that their growth is bounded before a text is read, and the library's time.
"""

import base64
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

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
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.source_settings import expand_path
from splitveil.common.data.sources import ArrowColumn
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.settings import Section
from splitveil.common.text.files import read_or_refuse
from splitveil.common.text.imports import extra_missing, first_line

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


_SETTING = "data.features.sequences: tokenizer"
_MAX_TOKENIZER_BYTES = 2**27
"""Several times the size of tokenizers of many languages."""

_MAX_GROWTH = 4000
"""Multilingual tokenizers, which chain maps and normal forms, reach 1,500."""

_GROWTH = {
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 2,
    "BertNormalizer": 4,
    "ByteLevel": 2,
}
"""Factor by which steps not named in ``_growth`` lengthen a text in UTF-8 (Unicode, UAX 15)."""

_CHARACTERS_AT_ONCE = 2**14
_LIMIT_S, _CHARACTERS_PER_S = 60.0, 1000.0
"""Far less than any tokenizer takes, and far slower."""

_ResultT = TypeVar("_ResultT")


class TokenColumn(Section):
    """A column of sequences as a model takes it."""

    name: str
    max_length: int
    num_tokens: int
    """Tokens are 0 to ``num_tokens`` - 1."""

    tokenizer: str | None = None
    """The content of the tokenizer's file; None for a column of whole numbers."""


def tokenizer_files(features: FeatureSettings | None, base_dir: Path) -> dict[str, Path]:
    """Return the path of each tokenizer, by column."""
    return {
        name: expand_path(_SETTING, chosen.tokenizer, base_dir)
        for name, chosen in (features.sequences.items() if features else ())
        if chosen.tokenizer is not None
    }


def token_columns(features: FeatureSettings | None, base_dir: Path) -> tuple[TokenColumn, ...]:
    """Read all tokenizers, and return the columns in the order of the settings.

    SettingsError if a file cannot be read, or is of another kind.
    """
    texts, sizes = {}, {}
    for name, path in tokenizer_files(features, base_dir).items():
        texts[name] = read_or_refuse(path, _MAX_TOKENIZER_BYTES).decode(errors="replace")
        vocabulary = _tokenizer_of(texts[name], str(path)).get_vocab()
        if not vocabulary:
            raise SettingsError(f"{_SETTING}: {path}: expected a vocabulary, and it is empty")
        sizes[name] = 1 + max(vocabulary.values())
    return tuple(
        TokenColumn(
            name=name,
            max_length=chosen.max_length,
            num_tokens=chosen.num_tokens or sizes[name],
            tokenizer=texts.get(name),
        )
        for name, chosen in (features.sequences.items() if features else ())
    )


def _tokenizer_of(text: str, name: str) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise extra_missing(_SETTING, "text") from error
    try:
        tokenizer = _in_time(len(text), Tokenizer.from_str, text)
        parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
        growth = math.prod(_growth(json.loads(one.__getstate__())) for one in parts if one)
    except _LibraryError as error:
        raise SettingsError(
            f"{_SETTING}: {name}: expected a file of the library tokenizers, such as "
            f"tokenizer.json: {error}"
        ) from error
    if max(growth, tokenizer.num_special_tokens_to_add(False)) > _MAX_GROWTH:
        raise SettingsError(
            f"{_SETTING}: {name}: its rules can make a text more than {_MAX_GROWTH:,} times as long"
        )
    return tokenizer


def _growth(rule: Any) -> float:
    """Return how many times as long a normalizer or pre-tokenizer makes a text at most."""
    match rule:
        case {"type": "Sequence"}:
            return math.prod(map(_growth, rule.get("normalizers") or rule.get("pretokenizers")))
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return max(1.0, len(new.encode()) / len(old.encode()))
        case {"type": "Replace" | "Prepend"}:  # an expression may match nothing, everywhere
            return 1.0 + len((rule.get("content") or rule.get("prepend", "")).encode())
        case {"type": "Precompiled", "precompiled_charsmap": coded}:
            # The length of a search tree, the tree, and the texts that take the place of others.
            content = base64.b64decode(coded)
            texts = content[4 + int.from_bytes(content[:4], "little") :]
            return 1.0 + max(map(len, texts.split(b"\0")))
    return _GROWTH.get(rule["type"], 1)


class _LibraryError(Exception):
    """The library failed, or took too long."""


def _in_time(characters: int, call: Callable[[Any], _ResultT], given: object) -> _ResultT:
    """Return the library's result; _LibraryError if it fails in any way, or hangs.

    Its panics are no ``Exception``, and a thread that hangs ends with the process.
    """
    done = Future[_ResultT]()

    def run() -> None:
        try:
            done.set_result(call(given))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = done.exception(limit_s := _LIMIT_S + characters / _CHARACTERS_PER_S)
    except TimeoutError:
        raise _LibraryError(f"it takes longer than {limit_s:.0f} s") from None
    if error is not None:
        raise _LibraryError(first_line(error)) from error
    return done.result()


def _together(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts some at a time."""
    first = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= _CHARACTERS_AT_ONCE or end == len(texts):
            yield texts[first:end]
            first, size = end, 0


class TokenReader:
    """Turns cells of one column into padded tokens and lengths."""

    def __init__(self, column: TokenColumn, texts: Any, source: str) -> None:
        self._column, self._texts, self._source = column, texts, source
        self._tokenizer: Any = None
        if column.tokenizer is not None:
            self._tokenizer = _tokenizer_of(column.tokenizer, f"column {column.name!r}")
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(column.max_length)
            if getattr(self._tokenizer.model, "dropout", None):
                self._tokenizer.model.dropout = None  # the same tokens at each call

    def __call__(
        self, codes: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return tokens, (rows, max_length) with zeros behind, lengths, and which rows are cut."""
        distinct, places = np.unique(codes, return_inverse=True)
        is_there = distinct >= 0
        cells = self._tokens(self._texts.take(distinct[is_there]).to_pylist())
        tokens = np.zeros((len(distinct), self._column.max_length), np.int64)
        lengths = np.zeros(len(distinct), np.int64)
        is_cut = np.zeros(len(distinct), np.bool_)
        for place, (cell, is_cut[place]) in zip(np.flatnonzero(is_there), cells, strict=True):
            lengths[place] = len(cell)
            tokens[place, : len(cell)] = cell
        if tokens.max(initial=0) >= self._column.num_tokens:
            raise DataError(
                f"{self._source}: column {self._column.name!r}: expected tokens below "
                f"{self._column.num_tokens:,} as in the training, and there are larger ones"
            )
        return tokens[places], lengths[places], is_cut[places]

    def _tokens(self, texts: list[str]) -> list[tuple[list[int], bool]]:
        most = self._column.max_length
        if self._tokenizer is None:
            whole = (list(map(int, text.split(SEPARATOR))) for text in texts)
            return [(cell[:most], len(cell) > most) for cell in whole]
        cells = list[tuple[list[int], bool]]()
        for some in _together(texts):
            try:
                found = _in_time(sum(map(len, some)), self._tokenizer.encode_batch, some)
            except _LibraryError as error:  # its text may quote the cell
                raise DataError(
                    f"{self._source}: column {self._column.name!r}: its tokenizer cannot split a "
                    f"text, or takes longer than a minute"
                ) from error
            # Tokens that a tokenizer adds to every text are not cut off by itself.
            cells += [(one.ids[:most], bool(one.overflowing or one.ids[most:])) for one in found]
        return cells

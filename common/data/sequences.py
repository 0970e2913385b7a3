"""Sequences of tokens: whole numbers from the table, or a tokenizer's output for a text.

A tokenizer is data: it comes from a JSON file, which the library ``tokenizers`` reads, and runs no
code of anybody else. Its rules can still make a text longer without end, search it for ever, or let
the library panic, so that their growth is bounded before a text is read, and the library's time.
"""

import base64
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.category_lists import SEPARATOR
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.source_settings import expand_path
from splitveil.common.data.table import Table
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.settings import Section
from splitveil.common.text.files import read_or_refuse
from splitveil.common.text.imports import extra_missing, first_line

_logger = logging.getLogger(__name__)

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

MEASURED_ROWS = 2**12
"""Training rows whose sequences are compared with ``max_length``, if there are more."""


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


def say_cut(columns: Sequence[TokenColumn], table: Table, rows: NDArray[np.int64]) -> None:
    """Warn of columns with training rows longer than ``max_length``."""
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), MEASURED_ROWS)).astype(np.int64)]
    for column in columns:
        coded = table.sequences[column.name]
        _, _, is_cut = TokenReader(column, coded.categories, table.source)(coded.codes[some])
        if is_cut.any():
            _logger.warning(
                "%s: column %r: %d of %d sequences are longer than max_length, %d tokens, and "
                "their ends are cut off",
                table.source,
                column.name,
                is_cut.sum(),
                len(some),
                column.max_length,
            )

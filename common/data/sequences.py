"""Sequences of tokens: whole numbers as they are in the table, or those of a text's tokenizer.

A tokenizer is data: it comes from a JSON file, which the library ``tokenizers`` reads, and runs no
code of anybody else.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        try:
            sizes[name] = 1 + max(_tokenizer_of(texts[name]).get_vocab().values())
        except SettingsError:
            raise
        except Exception as error:  # the library raises no other class
            raise SettingsError(
                f"{_SETTING}: {path}: expected a file of the library tokenizers, such as "
                f"tokenizer.json, with a vocabulary: {first_line(error)}"
            ) from error
    return tuple(
        TokenColumn(
            name=name,
            max_length=chosen.max_length,
            num_tokens=chosen.num_tokens or sizes[name],
            tokenizer=texts.get(name),
        )
        for name, chosen in (features.sequences.items() if features else ())
    )


def _tokenizer_of(text: str) -> Any:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise extra_missing(_SETTING, "text") from error
    return Tokenizer.from_str(text)


class TokenReader:
    """Turns cells of one column into padded tokens and lengths."""

    def __init__(self, column: TokenColumn, texts: Any, source: str) -> None:
        self._column, self._texts, self._source = column, texts, source
        self._tokenizer: Any = None
        if column.tokenizer is not None:
            self._tokenizer = _tokenizer_of(column.tokenizer)
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
            cells = [list(map(int, text.split(SEPARATOR))) for text in texts]
            return [(cell[:most], len(cell) > most) for cell in cells]
        try:
            found = self._tokenizer.encode_batch(texts)
        except Exception as error:  # the library raises no other class
            raise DataError(
                f"{self._source}: column {self._column.name!r}: its tokenizer cannot split a text"
            ) from error
        # Tokens that a tokenizer adds to every text are not cut off by itself.
        return [(one.ids[:most], bool(one.overflowing or one.ids[most:])) for one in found]


def say_cut(columns: Sequence[TokenColumn], table: Table, rows: NDArray[np.int64]) -> None:
    """Warn of columns of which some of the training rows are longer than ``max_length``."""
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

"""Finds rows whose categories are not in the vocabulary of a trained model."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.category_lists import SEPARATOR
from splitveil.common.data.features import (
    UNKNOWN_SLOT,
    FeatureEncoder,
    Features,
    ListVocabulary,
    Vocabulary,
)
from splitveil.common.data.fitting import FIT_ROWS
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.table import Table

MANY = 20
"""Rows that do not all have a new category by chance."""
_COMPARED = 10_000
"""Unknown categories of a column that are compared with the known ones."""

_ALIKE = (
    "; some differ from known ones in upper and lower case alone, or as 1 and 1.0 do: were they "
    "written otherwise in the training?"
)


class Unknown(NamedTuple):
    """A column with rows that count as unknown."""

    sentence: str
    """Names the column and the number of rows, and no category."""
    is_whole: bool
    """Whether these are many, and all that have a value, and their categories not merely rare."""


def unknown_categories(
    encoder: FeatureEncoder, table: Table, settings: FeatureSettings | None
) -> Iterator[Unknown]:
    """Yield the columns of a table with rows whose category, or whole list, is unknown.

    Args:
        encoder: of the trained model.
        table: has the columns that the encoder was fitted on.
        settings: say whether the vocabularies leave out categories that are rare.
    """
    columns = {**table.categorical, **table.lists}
    counts = {name: np.zeros(len(c.categories) + 1, np.int64) for name, c in columns.items()}
    # In parts, so that a table on disk is read once, front to back.
    for start in range(0, len(table), FIT_ROWS):
        for name, column in columns.items():
            codes = column.codes[start : start + FIT_ROWS] + 1  # 0 is no value
            counts[name] += np.bincount(codes, minlength=len(counts[name]))
    vocabularies: tuple[Vocabulary | ListVocabulary, ...] = (*encoder.categorical, *encoder.lists)
    for vocabulary in vocabularies:
        name, num_rows = vocabulary.name, counts[vocabulary.name][1:]
        rows, is_alike = _unknown_rows(vocabulary, columns[name].categories, num_rows)
        is_exact = settings is not None and settings.min_count == 1
        if settings is not None and isinstance(vocabulary, ListVocabulary):
            is_exact &= len(vocabulary.categories) < settings.max_list_categories
        if rows:
            yield Unknown(
                f"{table.source}: column {name!r}: {rows:,} of {len(table):,} rows have categories "
                f"that no training row had{'' if is_exact else ', or too few'}, and count as "
                f"unknown{_ALIKE if is_alike else ''}",
                rows >= max(MANY, num_rows.sum())
                and len(vocabulary.categories) > 0
                and (is_exact or is_alike),
            )


def _unknown_rows(
    vocabulary: Vocabulary | ListVocabulary, texts: Any, num_rows: NDArray[np.int64]
) -> tuple[int, bool]:
    """Return the number of unknown rows, and whether categories are known in another form.

    ``num_rows`` has the number of rows with each of the column's distinct texts.
    """
    words, text_of = texts, np.arange(len(texts))
    if isinstance(vocabulary, ListVocabulary):
        split = pc.split_pattern(texts, SEPARATOR)
        words, text_of = pc.list_flatten(split), pc.list_parent_indices(split).to_numpy()
    known = pa.array(vocabulary.categories, pa.string())
    is_known = pc.is_in(words, value_set=known).to_numpy(zero_copy_only=False)
    rows = int(num_rows.sum() - num_rows[np.unique(text_of[is_known])].sum())
    if not rows:
        return 0, False
    forms = set(map(_less_its_form, vocabulary.categories))
    some = words.filter(pa.array(~is_known))[:_COMPARED].to_pylist()
    return rows, any(_less_its_form(text) in forms for text in some)


def _less_its_form(text: str) -> float | str:
    with suppress(ValueError):
        return float(text)
    return text.casefold()


def count_unknown(encoder: FeatureEncoder, features: Features) -> dict[str, int]:
    """Return the number of rows whose category, or whole list, is unknown, by column."""
    found = {}
    if features.categorical is not None:
        counts = (features.categorical == UNKNOWN_SLOT).sum(dim=0).tolist()
        found = {v.name: rows for v, rows in zip(encoder.categorical, counts, strict=True)}
    if features.numeric is not None:
        end = features.numeric.shape[1]
        for column in reversed(encoder.lists):
            members = features.numeric[:, end - len(column.categories) - 1 : end]
            end -= members.shape[1]
            # The last member stands for all categories that are not in the vocabulary.
            found[column.name] = int(((members[:, -1] == 1) & (members.sum(dim=1) == 1)).sum())
    return found

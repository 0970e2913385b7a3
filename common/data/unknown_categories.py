"""Finds rows whose categories are not in the vocabulary of a trained model."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.category_lists import SEPARATOR
from splitveil.common.data.features import FeatureEncoder, ListVocabulary, Vocabulary
from splitveil.common.data.fitting import FIT_ROWS
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.table import Table

MANY = 20  # rows that do not all have a new category by chance
_ALIKE = "; some differ from known ones as 1 from 1.0, or in case, and may be written otherwise"
_REMEDY = "; write them as in the training, or leave these cells empty to predict without them"


def unknown_categories(
    encoder: FeatureEncoder, table: Table, settings: FeatureSettings | None
) -> Iterator[tuple[str, bool]]:
    """Yield a sentence on each column with rows whose category, or whole list, is unknown.

    With it comes whether that is so in all of many rows with a value, and not for being rare.
    """
    vocabularies: tuple[Vocabulary | ListVocabulary, ...] = (*encoder.categorical, *encoder.lists)
    columns = {**table.categorical, **table.lists}
    judged = {v.name: _judged(v, columns[v.name].categories) for v in vocabularies}
    counts = dict.fromkeys(judged, 0)
    # In parts, so that a table on disk is read once, front to back.
    for start in range(0, len(table), FIT_ROWS):
        for name, (is_unknown, _) in judged.items():
            if is_unknown.any():
                counts[name] += int(is_unknown[columns[name].codes[start : start + FIT_ROWS]].sum())
    for vocabulary in vocabularies:
        (is_unknown, is_alike), rows = judged[vocabulary.name], counts[vocabulary.name]
        is_exact = settings is not None and settings.min_count == 1
        if settings is not None and isinstance(vocabulary, ListVocabulary):
            is_exact &= len(vocabulary.categories) < settings.max_list_categories
        is_all = bool(vocabulary.categories) and bool(is_unknown[:-1].all())
        is_whole = is_all and rows >= MANY and (is_exact or is_alike)
        sentence = (
            f"{table.source}: column {vocabulary.name!r}: {rows:,} of {len(table):,} rows have "
            f"categories that no training row had{'' if is_exact else ', or too few'}, and count "
            f"as unknown{_ALIKE if is_alike else ''}{_REMEDY if is_whole else ''}"
        )
        if rows:
            yield sentence, is_whole


def _judged(vocabulary: Vocabulary | ListVocabulary, texts: Any) -> tuple[NDArray[np.bool_], bool]:
    """Return whether texts are unknown, by code, and whether some are known in another form."""
    words, text_of = texts, np.arange(len(texts))
    if isinstance(vocabulary, ListVocabulary):
        split = pc.split_pattern(texts, SEPARATOR)
        words, text_of = pc.list_flatten(split), pc.list_parent_indices(split).to_numpy()
    known = pa.array(vocabulary.categories, pa.string())
    is_known = pc.is_in(words, value_set=known).to_numpy(zero_copy_only=False)
    is_unknown = np.append(np.ones(len(texts), np.bool_), False)  # code -1 is no value
    is_unknown[text_of[is_known]] = False
    some = words.filter(pa.array(~is_known))[:10_000].to_pylist()
    forms = set(map(_less_its_form, vocabulary.categories)) if some else set()
    return is_unknown, any(_less_its_form(text) in forms for text in some)


def _less_its_form(text: str) -> float | str:
    with suppress(ValueError):
        return float(text)
    return text.casefold()

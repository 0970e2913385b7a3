"""Counts the rows of a table that hold what no training row of a trained model had."""

import logging
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.category_lists import SEPARATOR
from splitveil.common.data.features import FeatureEncoder, Vocabulary
from splitveil.common.data.fitting import FIT_ROWS, compress
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.table import Table

MANY = 20  # rows that do not all have a new category by chance
_ALIKE = "; some differ from known ones as 1 from 1.0, or in case, and may be written otherwise"
_REMEDY = "; write them as in the training, or leave these cells empty to predict without them"
_FEW = 0.01  # share of rows that new numbers hardly exceed by chance
_NAMED = 10
_NUMBERS_AT_ONCE = 2**22


def unseen_numbers(
    encoder: FeatureEncoder, table: Table, settings: FeatureSettings | None
) -> Iterator[tuple[int, str]]:
    """Yield a sentence on new gaps, and one on numbers beyond the least and largest in training.

    With it comes how serious it is, as a level of logging; an error is to be refused.
    """
    scalers = [one for one in encoder.numeric if one.low is not None]
    lows = np.array([[one.low] for one in scalers], np.float64)
    highs = np.array([[one.high] for one in scalers], np.float64)
    may_lack = np.array([[one.had_gaps] for one in scalers], np.bool_)
    cells, rows = np.zeros((2, len(scalers)), np.int64), [0, 0]
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, len(scalers)))
    for start in range(0, len(table) if scalers else 0, at_once):
        numbers_of = table.numbers_at(np.arange(start, min(start + at_once, len(table))))
        found = np.stack([np.asarray(numbers_of(x.name), np.float64) for x in scalers])
        values = compress(found, signed_log1p=encoder.signed_log1p)
        outside = (values < lows) | (values > highs)
        for kind, is_it in enumerate((np.isnan(values) & ~may_lack, outside)):
            cells[kind] += is_it.sum(axis=1)
            rows[kind] += int(is_it.any(axis=0).sum())
    refuses = settings is not None and settings.new_gaps == "error"
    whats = (
        "a gap in columns of numbers that had none in training"
        + ("; data.features.new_gaps: error refuses them" if refuses else ", filled"),
        "numbers outside of what any training row had",
    )
    levels = (logging.ERROR if refuses else logging.WARNING, logging.WARNING)
    for counts, num_rows, what, level in zip(cells, rows, whats, levels, strict=True):
        if not num_rows:
            continue
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        named = [f"{scalers[j].name!r} ({counts[j]:,})" for j in order[:_NAMED]]
        is_usual = what == whats[1] and counts.max() < _FEW * len(table)
        sentence = (
            f"{table.source}: {num_rows:,} of {len(table):,} rows have {what}: "
            f"{', '.join(named)}{', ...' * (len(order) > _NAMED)}"
        )
        yield logging.INFO if is_usual else level, sentence


def unknown_categories(
    encoder: FeatureEncoder, table: Table, settings: FeatureSettings | None
) -> Iterator[tuple[int, str]]:
    """Yield a sentence on each column with rows whose category, or whole list, is unknown.

    With it comes a level of logging: an error if that is so in all of many rows with a value, and
    not for being rare, otherwise a warning.
    """
    vocabularies, columns = (*encoder.categorical, *encoder.lists), table.coded
    judged = {v.name: _judged(v, table) for v in vocabularies}
    counts = dict.fromkeys(judged, 0)
    # In parts, so that a table on disk is read once, front to back.
    for start in range(0, len(table), FIT_ROWS):
        for name, (is_unknown, _) in judged.items():
            if is_unknown.any():
                counts[name] += int(is_unknown[columns[name].codes[start : start + FIT_ROWS]].sum())
    for vocabulary in vocabularies:
        (is_unknown, is_alike), rows = judged[vocabulary.name], counts[vocabulary.name]
        is_exact = settings is not None and settings.min_count == 1
        if settings is not None and vocabulary.name in table.lists:
            is_exact &= len(vocabulary.categories) < settings.max_list_categories
        is_all = bool(vocabulary.categories) and bool(is_unknown[:-1].all())
        is_whole = is_all and rows >= MANY and (is_exact or is_alike)
        sentence = (
            f"{table.source}: column {vocabulary.name!r}: {rows:,} of {len(table):,} rows have "
            f"categories that no training row had{'' if is_exact else ', or too few'}, and count "
            f"as unknown{_ALIKE if is_alike else ''}{_REMEDY if is_whole else ''}"
        )
        if rows:
            yield logging.ERROR if is_whole else logging.WARNING, sentence


def _judged(vocabulary: Vocabulary, table: Table) -> tuple[NDArray[np.bool_], bool]:
    """Return whether texts are unknown, by code, and whether some are known in another form."""
    texts = words = table.coded[vocabulary.name].categories
    text_of = np.arange(len(texts))
    if vocabulary.name in table.lists:
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

"""Reads labels: of two classes, of several classes, and numbers within bounds; NaN without a label.

Row numbers in messages count from 1, without the header line. No message has the label of a row;
one about a ``positive_label`` that no row has names the column's values.
"""

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import WrittenColumn, clean_text, read_numbers
from splitveil.common.data.settings import DataSettings, LabelRange, class_key
from splitveil.common.data.sources import ArrowColumn, RowSource
from splitveil.common.errors import DataError
from splitveil.common.text.wording import suggest

_NAMED_VALUES = 10

_logger = logging.getLogger(__name__)


def label_texts(column: WrittenColumn) -> ArrowColumn:
    """Return labels as texts, null where there is none; a number may be stored in any type."""
    cells = column.cells
    if pa.types.is_floating(cells.type):
        cells = pc.if_else(pc.is_nan(cells), pa.scalar(None, cells.type), cells)
        column = column._replace(cells=pc.cast(cells, pa.string()))
    return clean_text(column)


def places_of(texts: ArrowColumn, names: Sequence[str]) -> ArrowColumn:
    """Return the place of each text in ``names``, null where it has none; see ``class_key``."""
    place = {class_key(name): number for number, name in enumerate(names)}
    distinct = pc.unique(texts).drop_null()
    places = pa.array([place.get(class_key(text)) for text in distinct.to_pylist()], pa.int32())
    return pc.take(places, pc.index_in(texts, value_set=distinct))


def others_in_words(texts: int, rows: int) -> str:
    """Say how many texts, in how many rows, ``positive_label`` makes 0."""
    if texts == 1:
        return f"1 other text ({rows:,} rows) stands for 0"
    return f"WARNING: {texts} other texts ({rows:,} rows) all stand for 0"


def count_others(settings: DataSettings, source: RowSource) -> str:
    """Say how many labels of a whole table ``positive_label`` makes 0; nothing without it."""
    if not settings.positive_label:
        return ""
    texts = _written_labels(settings, source)
    others = texts.filter(pc.is_null(places_of(texts, settings.positive_labels))).drop_null()
    distinct = set(map(class_key, others.unique().to_pylist()))
    return f"; {others_in_words(len(distinct), len(others))}"


def _written_labels(settings: DataSettings, source: RowSource) -> ArrowColumn:
    name = str(settings.label_column)
    return label_texts(WrittenColumn(source.read([name])[name], name, settings.missing_texts(name)))


def read_labels(column: WrittenColumn, settings: DataSettings) -> NDArray[np.float32]:
    """Return labels as numbers: 0 and 1, class indices, or shares of the range."""
    if settings.classes is not None:
        are_numbers = isinstance(settings.classes, int)
        return _read_classes(column, settings.class_names, are_numbers=are_numbers)
    if settings.label_range is not None:
        return _read_shares(column, settings.label_range)
    if positive := settings.positive_labels:
        texts = label_texts(column)
        labels = pc.is_valid(places_of(texts, positive)).to_numpy().astype(np.float32)
        return np.where(pc.is_null(texts).to_numpy(), np.float32(np.nan), labels)
    labels, is_wrong = read_numbers(column)
    is_wrong |= ~np.isnan(labels) & ~np.isin(labels, (0.0, 1.0))
    column.check(is_wrong, "0 or 1 (data.positive_label names the text that stands for 1)")
    return labels.astype(np.float32)


def _read_classes(
    column: WrittenColumn, names: Sequence[str], *, are_numbers: bool
) -> NDArray[np.float32]:
    """Return each row's class index: the position of its class in ``names``, or the number itself.

    DataError says how many labels are unknown and where, never which.
    """
    if are_numbers:
        class_indices, is_wrong = read_numbers(column)
        is_wrong |= ~np.isnan(class_indices) & ~np.isin(class_indices, np.arange(len(names)))
        values = pa.chunked_array([pa.array(class_indices)])
        expected = f"a whole number from 0 to {len(names) - 1}"
    else:
        values = label_texts(column)
        found = places_of(values, names)
        is_wrong = pc.and_(pc.is_null(found), pc.is_valid(values)).to_numpy()
        class_indices = pc.cast(found, pa.float64()).to_numpy()
        expected = f"one of the {len(names)} classes in data.classes"
    if is_wrong.any():
        unknown = pc.count_distinct(pc.filter(values, pa.array(is_wrong)), mode="all").as_py()
        raise DataError(
            f"{column.where}: expected {expected} in {column.list_rows(is_wrong)}; found {unknown} "
            f"distinct value{'s' * (unknown != 1)} there"
        )
    return class_indices.astype(np.float32)


def _read_shares(column: WrittenColumn, within: LabelRange) -> NDArray[np.float32]:
    """Return labels that are numbers as shares of their range.

    DataError says how many lie outside and where, never which.
    """
    values, is_unreadable = read_numbers(column)
    column.check(is_unreadable, f"a number from {within.in_words} (data.label_range)")
    is_outside = (values < within.low) | (values > within.high)
    if is_outside.any():
        if within.outside == "refused":
            raise DataError(
                f"{column.where}: expected numbers from {within.in_words} (data.label_range), and "
                f"found others in {column.list_rows(is_outside)}; with "
                f"data.label_range.outside: clipped, they count as the nearer bound"
            )
        _logger.warning(
            "%s: %d of %d labels lie outside %s (data.label_range) and count as the nearer bound",
            column.where,
            int(is_outside.sum()),
            len(values),
            within.in_words,
        )
    return within.shares(values)


def check_classes(settings: DataSettings, labels: NDArray[np.float32], source: RowSource) -> None:
    """Check that a whole file has rows of every class, or numbers that differ."""
    where = f"{source.name}: column {settings.label_column!r}"
    if settings.unlabelled_rows != "error":
        labels = labels[~np.isnan(labels)]
        if not len(labels):
            raise DataError(f"{where}: no row has a label")
    if settings.classes is not None and settings.label_range is None:
        rows = np.bincount(labels.astype(np.int64), minlength=len(settings.class_names))
        absent = [name for name, n in zip(settings.class_names, rows, strict=True) if not n]
        if absent:
            raise DataError(
                f"{where}: no row has class {', '.join(map(repr, absent))}: expected every class "
                f"of data.classes"
            )
    elif labels.min() == labels.max() and settings.label_range is not None:
        raise DataError(
            f"{where}: expected labels that differ, but all {len(labels)} are the same number"
        )
    elif settings.positive_label and not labels.any():
        texts = _written_labels(settings, source).drop_null().unique()
        found = f"{len(texts):,} other values"
        if len(texts) <= _NAMED_VALUES:  # more are no labels, and none of them is quoted
            names = sorted(texts.to_pylist())
            found = ", ".join(map(repr, names)) + suggest(settings.positive_labels[0], names)
        raise DataError(
            f"{where}: no row has {' or '.join(map(repr, settings.positive_labels))} "
            f"(data.positive_label), but {found}"
        )
    elif labels.min() == labels.max():
        raise DataError(
            f"{where}: all {len(labels)} labels are {labels[0]:.0f}: expected both classes"
        )

"""Reads labels: of two classes, of several classes, and numbers within bounds.

Row numbers in messages count from 1, without the header line; no value of a label is in a message.
"""

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.columns import WrittenColumn, clean_text, read_numbers
from splitveil.common.data.label_range import LabelRange
from splitveil.common.errors import DataError

_logger = logging.getLogger(__name__)


def read_labels(column: WrittenColumn, positive_label: str | None) -> NDArray[np.float32]:
    """Return the labels as 0 and 1.

    Args:
        column: the labels.
        positive_label: the text that stands for 1.

    Raises:
        DataError: a label is missing or is neither 0 nor 1.
    """
    if positive_label is None:
        labels = read_numbers(column).values
        is_wrong = ~np.isin(labels, (0.0, 1.0))
        expected = "0 or 1 (data.positive_label names the text that stands for 1)"
    else:
        text = clean_text(column)
        labels = pc.fill_null(pc.equal(text, positive_label), False).to_numpy().astype(np.float64)
        is_wrong = pc.is_null(text).to_numpy()
        expected = "a label"
    if is_wrong.any():
        raise DataError(f"{column.where}: expected {expected} in {column.list_rows(is_wrong)}")
    return labels.astype(np.float32)


def read_classes(
    column: WrittenColumn, names: Sequence[str], *, are_numbers: bool
) -> NDArray[np.float32]:
    """Return each row's class index: the position of its class in ``names``.

    Args:
        column: the labels.
        names: the classes.
        are_numbers: whether the column holds the class indices themselves, as numbers.

    Raises:
        DataError: a label is missing or unknown; the message says how many there are and where,
            never which.
    """
    if are_numbers:
        class_indices = read_numbers(column).values
        is_wrong = ~np.isin(class_indices, np.arange(len(names)))
        values = pa.chunked_array([pa.array(class_indices)])
        expected = f"a whole number from 0 to {len(names) - 1}"
    else:
        values = clean_text(column)
        found = pc.index_in(values, value_set=pa.array(names, pa.string()))
        is_wrong = pc.is_null(found).to_numpy()
        class_indices = pc.fill_null(found, 0).to_numpy()
        expected = f"one of the {len(names)} classes in data.classes"
    if is_wrong.any():
        unknown = pc.count_distinct(pc.filter(values, pa.array(is_wrong)), mode="all").as_py()
        raise DataError(
            f"{column.where}: expected {expected} in {column.list_rows(is_wrong)}; found {unknown} "
            f"distinct value{'s' * (unknown != 1)} there"
        )
    return class_indices.astype(np.float32)


def read_number_labels(column: WrittenColumn, within: LabelRange) -> NDArray[np.float32]:
    """Return labels that are numbers as shares of their range.

    Args:
        column: the labels.
        within: their bounds, and what to do with a label outside.

    Raises:
        DataError: a label is missing, is not a number, or lies outside bounds that may not be
            exceeded; the message says how many there are and where, never which.
    """
    values = read_numbers(column).values
    is_missing = np.isnan(values)
    if is_missing.any():
        raise DataError(
            f"{column.where}: expected a number from {within.in_words} (data.label_range) in "
            f"{column.list_rows(is_missing)}"
        )
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


def check_not_constant(labels: NDArray[np.float32], where: str) -> None:
    """Check that labels that are numbers are not all the same.

    Raises:
        DataError: they are, or there is only one.
    """
    if labels.min() == labels.max():
        raise DataError(
            f"{where}: expected labels that differ, but all {len(labels)} are the same number"
        )


def check_all_classes(labels: NDArray[np.float32], names: Sequence[str], where: str) -> None:
    """Check that every class has rows.

    Raises:
        DataError: a class has no row.
    """
    present = np.bincount(labels.astype(np.int64), minlength=len(names)) > 0
    absent = [name for name, is_there in zip(names, present, strict=True) if not is_there]
    if absent:
        raise DataError(
            f"{where}: no row has class {', '.join(map(repr, absent))}: expected every class of "
            f"data.classes"
        )


def check_both_classes(labels: NDArray[np.float32], where: str) -> None:
    """Check that both classes have rows.

    Raises:
        DataError: all rows are of one class.
    """
    if labels.min() == labels.max():
        raise DataError(
            f"{where}: all {len(labels)} labels are {labels[0]:.0f}: expected both classes"
        )

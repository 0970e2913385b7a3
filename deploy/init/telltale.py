"""Finds columns that give the label away almost by themselves, whichever class they reveal."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.label_columns import places_of
from splitveil.common.data.settings import MAX_CLASSES
from splitveil.deploy.init.columns import Column, as_text, without_gaps
from splitveil.deploy.init.labels import Label

TELLTALE_AUC = 0.995  # AUC of a single column, from which it counts as another form of the label
_ENOUGH_ROWS = 5  # of a class, and of all others, below which columns separate them by chance


def gives_label_away(cells: Any, column: Column, classes: NDArray[np.int64]) -> bool:
    """Say whether a column's values or gaps tell a class of enough rows from all others."""
    text = as_text(cells)
    if text is None or column.kind in {"empty", "other"}:
        return False
    filled = without_gaps(text, column.gaps)
    has_value = pc.is_valid(filled).to_numpy(zero_copy_only=False)
    found = [has_value.astype(np.int64)]
    if column.kind in {"whole", "number"} and not column.looks_like_codes:
        numbers = pc.cast(filled, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if _separates(np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0), classes):
            return True
    if column.distinct <= min(MAX_CLASSES, column.present // _ENOUGH_ROWS):
        codes = pc.dictionary_encode(filled.combine_chunks()).indices
        found.append(pc.fill_null(codes, column.distinct).to_numpy(zero_copy_only=False))
    return any(_determine(codes, classes) for codes in found)


def _separates(numbers: NDArray[np.float64], classes: NDArray[np.int64]) -> bool:
    """Say whether the order of numbers tells a class from all others."""
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    rows = np.bincount(classes)
    pairs = rows * (len(classes) - rows)
    higher = np.bincount(classes, weights=ranks) - rows * (rows + 1) / 2
    return _is_telltale(higher / np.maximum(pairs, 1), rows)


def _determine(codes: NDArray[np.int64], classes: NDArray[np.int64]) -> bool:
    """Say whether codes tell a class from all others."""
    width, num_classes = int(codes.max()) + 1, int(classes.max()) + 1
    cells = np.bincount(classes * width + codes, minlength=num_classes * width)
    own = cells.reshape(num_classes, width)
    of_code, rows = own.sum(axis=0), own.sum(axis=1)
    others = of_code - own
    order = np.argsort(own / np.maximum(of_code, 1), axis=1)
    own, others = (np.take_along_axis(one, order, axis=1) for one in (own, others))
    pairs = rows * (len(classes) - rows)
    higher = (own * (np.cumsum(others, axis=1) - others / 2)).sum(axis=1)
    return _is_telltale(higher / np.maximum(pairs, 1), rows)


def _is_telltale(aucs: NDArray[np.float64], rows: NDArray[np.int64]) -> bool:
    is_enough = np.minimum(rows, rows.sum() - rows) >= _ENOUGH_ROWS
    return bool((np.maximum(aucs, 1 - aucs)[is_enough] >= TELLTALE_AUC).any())


def classes_of_rows(text: Any, label: Label) -> NDArray[np.int64]:
    """Return each row's class; of numbers, whether it is above the median."""
    if label.within is not None:
        numbers = pc.cast(text, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return np.asarray(numbers > np.median(numbers), np.int64)
    if label.classes is None:
        is_positive = pc.is_valid(places_of(text, label.positive or ("1",)))
        return np.asarray(is_positive.to_numpy(), np.int64)
    names = (
        [*map(str, range(label.num_classes))] if isinstance(label.classes, int) else label.classes
    )
    return np.asarray(places_of(text, names).to_numpy(), np.int64)

"""Judges whole numbers by their distribution: quantities, codes, or identifiers."""

import numpy as np
from numpy.typing import NDArray

_MOST_CODES = 1000
LEAST_REPEATS = 20
_SPARSE = 0.5
_TAIL = 0.05  # share of the rows at either end whose numbers do not say how dense they are
_EVEN = 0.35  # mean place in their range; from it on, numbers do not thin out upwards
_APART = 0.7  # median logarithm of the ratio of two neighbours' rows; unrelated from it on
_LEAST_COINCIDENCES = 20


def codes_or_quantities(
    numbers: NDArray[np.float64], counts: NDArray[np.int64], *, is_padded: bool
) -> tuple[str, tuple[str, str]]:
    """Say why whole numbers are codes, empty if they are quantities, and what is in doubt.

    Quantities use most of the numbers where most rows are, or are most often at the smallest, as
    counts are, and neighbours among them are used similarly often. What is used again and again
    may be either; codes then leave most numbers out, and lie evenly in their range.
    """
    if len(numbers) < 3 or numbers.min() < 0:
        return "", ("", "")
    if is_padded:
        return "digits of one width, some of which begin with 0", ("", "")
    order = np.argsort(numbers)
    numbers, counts = numbers[order], counts[order]
    steps = np.diff(numbers)
    unit = float(np.gcd.reduce(steps[steps < 2**53].astype(np.int64))) or 1.0
    share = (np.cumsum(counts) - counts / 2) / counts.sum()
    is_usual = (share >= _TAIL) & (share <= 1 - _TAIL)
    is_usual |= np.count_nonzero(is_usual) < 3
    usual, logs = numbers[is_usual], np.log(counts[is_usual])
    repeats = counts.sum() / len(numbers)
    if len(numbers) < 5 or repeats < 2 or counts[0] == counts.max():
        return "", ("", "")
    is_sparse = len(usual) < _SPARSE * (np.ptp(usual) / unit + 1)
    # Of independent frequencies, two in three are higher or lower than both neighbours.
    turns = np.count_nonzero(np.diff(np.sign(np.diff(counts))))
    is_rough = 2 * turns >= len(numbers) - 2
    is_often = repeats >= LEAST_REPEATS
    if not is_sparse and not (is_rough and is_often and np.median(np.abs(np.diff(logs))) >= _APART):
        return "", ("", "")
    is_even = np.mean((numbers - numbers[0]) / np.ptp(numbers)) >= _EVEN
    if is_sparse and is_rough and is_even and is_often and len(numbers) <= _MOST_CODES:
        why = "few of the numbers in their range are used, again and again"
        return why, ("whole numbers that may be quantities, read as categories", "--numeric")
    return "", ("whole numbers that may be codes, read as numbers", "--categorical")


def why_identifiers(numbers: NDArray[np.float64], counts: NDArray[np.int64]) -> str:
    """Say that values repeat far less often than any values that are drawn independently.

    Of n rows whose values lie among w whole numbers, n^2 / 2w pairs at least are expected to be
    equal, and where P pairs are, 2 P^2 / 3n triples at least (by Jensen's and Lyapunov's
    inequalities; even frequencies have the fewest).
    """
    rows = float(counts.sum())
    pairs = float((counts * (counts - 1.0)).sum() / 2)
    triples = float((counts * (counts - 1.0) * (counts - 2.0)).sum() / 6)
    least = 0.0
    if len(numbers) > 2 and (numbers == np.floor(numbers)).all():
        least = rows * (rows - 1) / 2 / (np.ptp(numbers) + 1)
    if least >= _LEAST_COINCIDENCES and pairs <= least / 4:
        return "whole numbers that repeat far less often than by chance"
    least = 2 * pairs**2 / (3 * rows) if rows else 0.0
    if least >= _LEAST_COINCIDENCES and triples <= least / 2:
        return f"values that each stand in no more than {counts.max()} rows"
    return ""

"""Compares the test AUCs of several runs: with an interval where they share their test rows.

Each run's AUC is a mean over pairs of rows, and so is nearly a sum of one term per row (E. R.
DeLong et al., Biometrics 44, 1988: the structural components). The AUCs of two runs on the same
rows vary together; the variance of their difference is that of the differences of the terms. With
more than two classes the AUC is the mean over the classes, each against the rest, and so are the
terms.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.active_party.training.held_out import StoredPredictions

Z_95 = 1.959963984540054
"""Quantile of the normal distribution for an interval of 95 %."""

_Numbers = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    value: float
    low: float
    high: float

    def in_words(self, *, signed: bool = False) -> str:
        """Write the figure and its interval."""
        sign = "+" if signed else ""
        return f"{self.value:{sign}.4f} ({self.low:{sign}.4f} to {self.high:{sign}.4f})"


class Comparison(NamedTuple):
    """One run against the first of a comparison."""

    difference: Estimate | None
    """Of the test AUCs; None where the runs do not share their test rows."""
    sharing: str
    """A sentence about what the two runs share."""


def auc_estimate(predictions: StoredPredictions) -> Estimate | None:
    """Return the AUC of a run's predictions; None if no class has both members and others."""
    terms = auc_terms(predictions.logits, predictions.labels)
    return None if terms is None else _within_range(_estimate(*terms))


def compare(first: StoredPredictions | None, other: StoredPredictions | None) -> Comparison:
    """Compare the test AUC of a run with that of another."""
    if first is None or other is None:
        return Comparison(None, "The test predictions of one of the two runs were not kept.")
    if not np.array_equal(first.ids, other.ids):
        common = len(np.intersect1d(_keys(first.ids), _keys(other.ids)))
        return Comparison(
            None,
            f"The test rows differ: {common:,} are common to both, of {len(first.ids):,} and "
            f"{len(other.ids):,}. The difference of the test AUCs may be due to the rows.",
        )
    if not np.array_equal(first.labels, other.labels):
        return Comparison(None, "The same test rows have other labels in the two runs.")
    trained = "the same" if first.training_rows == other.training_rows else "other"
    sharing = f"The same {len(first.ids):,} test rows, and {trained} training rows."
    terms = [auc_terms(one.logits, one.labels) for one in (first, other)]
    if terms[0] is None or terms[1] is None:
        return Comparison(None, sharing)
    (auc, own), (others_auc, others) = terms[0], terms[1]
    return Comparison(_estimate(others_auc - auc, others - own), sharing)


def auc_terms(logits: _Numbers, labels: npt.NDArray[np.int64]) -> tuple[float, _Numbers] | None:
    """Return an AUC and one term per row; the sum of their squares is the variance of the AUC.

    None if no class has at least two members and two others. Shapes: ``logits`` (rows,) or (rows,
    classes), ``labels`` (rows,).
    """
    scores = logits[:, None] if logits.ndim == 1 else _shares(logits)
    classes = [1] if logits.ndim == 1 else range(scores.shape[1])
    found = [
        _terms_of_class(scores[:, column], labels == label)
        for column, label in enumerate(classes)
        if min((labels == label).sum(), (labels != label).sum()) > 1
    ]
    if not found:
        return None
    return float(np.mean([auc for auc, _ in found])), np.mean([terms for _, terms in found], axis=0)


def _terms_of_class(scores: _Numbers, members: npt.NDArray[np.bool_]) -> tuple[float, _Numbers]:
    ranks = _average_ranks(scores)
    won = np.empty_like(ranks)
    """Share of the other group that a row is ranked on the right side of."""
    num_members, num_others = int(members.sum()), int((~members).sum())
    won[members] = (ranks[members] - _average_ranks(scores[members])) / num_others
    won[~members] = 1 - (ranks[~members] - _average_ranks(scores[~members])) / num_members
    auc = float(won[members].mean())
    size = np.where(members, num_members, num_others)
    return auc, (won - auc) / np.sqrt(size * (size - 1.0))


# SciPy has both functions. Importing it takes half a second of CPU time and 50 MiB of memory.


def _average_ranks(values: _Numbers) -> _Numbers:
    """Return the ranks from 1, their mean among equal values; NaN if there is one."""
    if np.isnan(values).any():
        return np.full(len(values), np.nan)
    ordered = np.sort(values)
    below, not_above = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (below + not_above + 1) / 2


def _shares(logits: _Numbers) -> _Numbers:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: _Numbers = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _estimate(value: float, terms: _Numbers) -> Estimate:
    half = Z_95 * math.sqrt(float(terms @ terms))
    return Estimate(value, value - half, value + half)


def _within_range(found: Estimate) -> Estimate:
    return Estimate(found.value, max(found.low, 0.0), min(found.high, 1.0))


def _keys(ids: npt.NDArray[np.void]) -> Sequence[bytes]:
    return [bytes(one) for one in ids]

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
from scipy.special import softmax
from scipy.stats import rankdata

from splitveil.active_party.report.figures import figure
from splitveil.active_party.report.run_files import RunFiles
from splitveil.active_party.training.evaluation import StoredPredictions, read_predictions

Z_95 = 1.959963984540054  # quantile of the normal distribution for an interval of 95 %

_CLOSE = 1e-4  # difference of an AUC from the recorded one that rounding may make

_Numbers = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    value: float
    low: float
    high: float

    def in_words(self, digits: int = 4, *, signed: bool = False) -> str:
        form = f"{'+' if signed else ''}.{digits}f"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


class PairedComparison(NamedTuple):
    """One run against the first of a comparison."""

    difference: Estimate | None
    """Of the test AUCs; None where the runs do not share their test rows."""
    sharing: str  # a sentence about what the two runs share


def auc_estimate(predictions: StoredPredictions) -> Estimate | None:
    """Return the AUC of a run's predictions; None if no class has both members and others."""
    terms = auc_terms(predictions.logits, predictions.labels)
    if terms is None:
        return None
    found = _estimate(*terms)
    return Estimate(found.value, max(found.low, 0.0), min(found.high, 1.0))


def compare(first: StoredPredictions | None, other: StoredPredictions | None) -> PairedComparison:
    """Compare the test AUC of a run with that of another."""
    if first is None or other is None:
        return PairedComparison(None, "The test predictions of one of the two runs were not kept.")
    if not np.array_equal(first.ids, other.ids):
        common = len(set(map(bytes, first.ids)) & set(map(bytes, other.ids)))
        return PairedComparison(
            None,
            f"The test rows differ: {common:,} are common to both, of {len(first.ids):,} and "
            f"{len(other.ids):,}. The difference of the test AUCs may be due to the rows.",
        )
    if not np.array_equal(first.labels, other.labels):
        return PairedComparison(None, "The same test rows have other labels in the two runs.")
    trained = "the same" if first.training_rows == other.training_rows else "other"
    sharing = f"The same {len(first.ids):,} test rows, and {trained} training rows."
    terms = [auc_terms(one.logits, one.labels) for one in (first, other)]
    if terms[0] is None or terms[1] is None:
        return PairedComparison(None, sharing)
    (auc, own), (others_auc, others) = terms[0], terms[1]
    return PairedComparison(_estimate(others_auc - auc, others - own), sharing)


def auc_terms(logits: _Numbers, labels: npt.NDArray[np.int64]) -> tuple[float, _Numbers] | None:
    """Return an AUC and one term per row; the sum of their squares is the variance of the AUC.

    None if no class has at least two members and two others. Shapes: ``logits`` (rows,) or (rows,
    classes), ``labels`` (rows,).
    """
    scores = logits[:, None] if logits.ndim == 1 else softmax(logits, axis=1)
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
    ranks = rankdata(scores)
    won = np.empty_like(ranks)
    """Share of the other group that a row is ranked on the right side of."""
    num_members, num_others = int(members.sum()), int((~members).sum())
    won[members] = (ranks[members] - rankdata(scores[members])) / num_others
    won[~members] = 1 - (ranks[~members] - rankdata(scores[~members])) / num_members
    auc = float(won[members].mean())
    size = np.where(members, num_members, num_others)
    return auc, (won - auc) / np.sqrt(size * (size - 1.0))


def _estimate(value: float, terms: _Numbers) -> Estimate:
    half = Z_95 * math.sqrt(float(terms @ terms))
    return Estimate(value, value - half, value + half)


def estimate_of(recorded: float, predictions: StoredPredictions | None) -> Estimate | None:
    """Return the recorded AUC of a run with its interval; None where that is not known."""
    found = None if predictions is None else auc_estimate(predictions)
    return None if found is None or abs(found.value - recorded) > _CLOSE else found


class ComparedTests(NamedTuple):
    aucs: list[str]  # each run's, with its 95 % interval where its predictions were kept
    differences: list[str]
    """Each run's less the first run's, with its paired interval where they share test rows."""
    sharing: str  # a sentence about what the runs share with the first one


def compare_tests(runs: Sequence[RunFiles]) -> ComparedTests:
    models = [run.active.summary.of_active.model for run in runs]
    predictions = [
        read_predictions(run.active.folder) if model.test_number is None else None
        for run, model in zip(runs, models, strict=True)
    ]
    found = [compare(predictions[0], one) for one in predictions[1:]]
    differences = [
        "not comparable" if one.difference is None else one.difference.in_words(signed=True)
        for one in found
    ]
    return ComparedTests(
        [_auc(model.test_auc, one) for model, one in zip(models, predictions, strict=True)],
        ["(the first run)", *differences],
        _sharing(found),
    )


def _auc(recorded: float | None, predictions: StoredPredictions | None) -> str:
    found = None if recorded is None else estimate_of(recorded, predictions)
    return figure(recorded, 4) if found is None else found.in_words()


def _sharing(found: Sequence[PairedComparison]) -> str:
    said = [one.sharing[0].lower() + one.sharing[1:] for one in found]
    if len(set(said)) == 1:
        return f"Every run has, compared with the first one: {said[0]}"
    each = (f"run {number}: {sentence}" for number, sentence in enumerate(said, start=2))
    return f"Compared with the first run, {' '.join(each)}"

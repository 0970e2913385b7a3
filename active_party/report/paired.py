"""Compares the test AUCs of several runs: with an interval where they share their test rows.

Each run's AUC is a mean over pairs of rows, and so is nearly a sum of one term per row (E. R.
DeLong et al., Biometrics 44, 1988: the structural components). The AUCs of two runs on the same
rows vary together; the variance of their difference is that of the differences of the terms. With
more than two classes the AUC is the mean over the classes, each against the rest, and so are the
terms.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from scipy.stats import rankdata

from splitveil.active_party.report.figures import ABSENT, figure
from splitveil.active_party.report.run_files import RunFiles
from splitveil.active_party.training.evaluation import StoredPredictions, read_predictions

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


def _within_range(found: Estimate) -> Estimate:
    return Estimate(found.value, max(found.low, 0.0), min(found.high, 1.0))


def _keys(ids: npt.NDArray[np.void]) -> Sequence[bytes]:
    return [bytes(one) for one in ids]


_CLOSE = 1e-4
"""Difference of an AUC from the recorded one that rounding may make."""


class ComparedTests(NamedTuple):
    """The test AUCs of several runs."""

    aucs: tuple[str, ...]
    """Each run's, with its 95 % interval where its predictions were kept."""
    alone: tuple[str, ...]
    """Each run's active party alone; dashes where no such model was trained."""
    differences: tuple[str, ...]
    """Each run's less the first run's, with its paired interval where they share test rows."""
    sharing: str
    """A sentence about what the runs share with the first one."""


def compare_tests(runs: Sequence[RunFiles]) -> ComparedTests:
    predictions = [
        None
        if run.active.summary.of_active.model.test_number is not None
        else read_predictions(run.active.folder)
        for run in runs
    ]
    aucs = tuple(map(_auc, runs, predictions))
    models = [run.active.summary.of_active.model for run in runs]
    found = [compare(predictions[0], one) for one in predictions[1:]]
    differences = tuple(_in_words(one.difference) for one in found)
    return ComparedTests(
        aucs,
        tuple(figure(model.test_auc_alone, 4) for model in models),
        ("(the first run)", *differences),
        _sharing(found),
    )


def rows_of_tests(compared: ComparedTests) -> Iterator[tuple[str, list[str]]]:
    yield "test AUC (95 % interval)", list(compared.aucs)
    yield "test AUC less that of the first run (paired 95 % interval)", list(compared.differences)
    if any(cell != ABSENT for cell in compared.alone):
        yield "test AUC of the active party alone", list(compared.alone)


def _auc(run: RunFiles, predictions: StoredPredictions | None) -> str:
    recorded = run.active.summary.of_active.model.test_auc
    found = None if predictions is None else auc_estimate(predictions)
    if recorded is None or found is None or abs(found.value - recorded) > _CLOSE:
        return figure(recorded, 4)
    return found.in_words()


def _in_words(found: Estimate | None) -> str:
    return "not comparable" if found is None else found.in_words(signed=True)


def _sharing(found: Sequence[Comparison]) -> str:
    said = list(dict.fromkeys(one.sharing for one in found))
    if len(said) == 1:
        return f"Every run has, compared with the first one: {_lowered(said[0])}"
    each = (f"run {number}: {_lowered(one.sharing)}" for number, one in enumerate(found, start=2))
    return f"Compared with the first run, {' '.join(each)}"


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]

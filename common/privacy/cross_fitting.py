"""Predictions of labels and scores by models that have not seen them: what features tell.

    labels    ridge logistic regression on functions of the features that follow any shape
              (`splitveil.common.privacy.row_functions`), fitted to all folds but one and asked
              about that one; a last logistic regression calibrates the log-odds
    scores    ridge regression on the same functions; scores of the same rows share the sums

Every row's prediction comes from models that never saw the row's label or score; calibration fits
a handful of numbers to all rows. On features without information the predictions are the classes'
shares. 30,000 rows of 50 features take half a second of CPU time for both.

A logistic regression starts at the least squares and takes steps with one matrix, the bound on the
second derivative of its loss around that start (Jaakkola and Jordan, "Bayesian parameter estimation
via variational methods", Statistics and Computing 2000). So a step is two products with the
functions.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.folded_rows import FoldedRows, Ridge, Weights, solved
from splitveil.common.privacy.pair_aucs import ClassIndices, Floats
from splitveil.common.privacy.row_functions import functions_of

FOLDS = 5
_RIDGE = Ridge(1.0, 30.0, 100.0)
"""Of log-odds."""
_RIDGES_OF_SCORES = tuple(
    Ridge(1.0, single, several) for single, several in ((10.0, 1e5), (30.0, 100.0), (1e3, 1e4))
)
"""Of scores with variance 1: those that leave least are taken, because features may tell everything
of a score, or nothing."""
_STEPS = 3
_BENDS = 2
"""Of the curve that turns log-odds into calibrated ones."""
_SMALLEST = 1e-6
"""Predictions stay this far from 0 and 1, so that their logarithms are finite."""

_SEED = 0
"""The folds are the same for the same rows, whatever the labels' order says otherwise."""


class TooFewRows(ValueError):
    """A class has fewer than two rows: no model can be asked about the one that it has not seen."""


class FeatureModels:
    """Models of some rows' features, each asked about the rows that it has not seen.

    Args:
        rows: by fold.
        order: index of each of them among the rows, (rows,).
    """

    def __init__(self, rows: FoldedRows, order: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        self._order = order
        self._factors: dict[bytes, list[list[Any]]] = {}
        """Mask of rows -> what solves their regressions, for each penalty."""

    @classmethod
    def of(cls, features: npt.NDArray[Any], strata: ClassIndices | None = None) -> Self:
        """Return the models of features.

        Args:
            features: (rows, features), finite.
            strata: classes of which every fold gets its share, (rows,); by default, one.
        """
        folds = _dealt_by_class(np.zeros(len(features)) if strata is None else strata)
        order = np.argsort(folds, kind="stable")
        return cls(FoldedRows(functions_of(features[order]), np.bincount(folds).tolist()), order)

    def with_features(self, features: npt.NDArray[Any]) -> "FeatureModels":
        """Return models that know more, in the same folds.

        Args:
            features: further ones, (rows, features), finite.
        """
        functions = functions_of(features[self._order], together=False)
        return FeatureModels(FoldedRows(functions, self._rows.sizes, self._rows), self._order)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self._order)

    def predictions(self, labels: ClassIndices, num_classes: int = 2) -> Floats:
        """Predict each row's class by models that have not seen its label.

        Args:
            labels: class indices, (rows,). A class without any row gets probability 0 everywhere.
            num_classes: number of classes.

        Returns:
            Probabilities, (rows, classes), each row's sum 1.

        Raises:
            TooFewRows: there are not two classes with at least two rows each, or one has one row.
        """
        present, indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if len(present) < 2 or counts.min() < 2:
            raise TooFewRows(f"expected two rows of each class, got {counts.tolist()}")
        targets = (1,) if len(present) == 2 else range(len(present))
        by_fold = indices[self._order]
        log_odds = [_log_odds(self._rows, by_fold == target) for target in targets]
        predictions = np.zeros((len(labels), num_classes))
        found = _calibrated(np.column_stack(log_odds), by_fold)
        predictions[np.ix_(self._order, present)] = found
        return predictions

    def explained(self, scores: Floats, scored: npt.NDArray[np.int64] | None = None) -> Floats:
        """Predict a score by regressions that have not seen the row's score.

        Args:
            scores: (scored,), finite.
            scored: indices of the rows that have a score, ascending, (scored,); all by default.

        Returns:
            (scored,).
        """
        is_scored = np.ones(self.num_rows, dtype=np.bool_)
        if scored is not None:
            is_scored[:] = False
            is_scored[scored] = True
        centre, spread = float(scores.mean()), float(scores.std()) or 1.0
        targets = np.zeros(self.num_rows, dtype=np.float32)
        targets[is_scored] = (scores - centre) / spread
        targets, chosen = targets[self._order], is_scored[self._order]
        moments = self._rows.moments(targets)
        weights = np.stack([solved(factors, moments) for factors in self._factors_of(chosen)])
        found = self._rows.asked(weights)
        left = np.square(targets - found)[:, chosen].sum(axis=1)
        explained: Floats = np.empty(self.num_rows)
        explained[self._order] = centre + spread * found[left.argmin()]
        return explained[is_scored]

    def _factors_of(self, chosen: npt.NDArray[np.bool_]) -> list[list[Any]]:
        key = chosen.tobytes()
        if key not in self._factors:
            grams = self._rows.grams_of(chosen)
            self._factors[key] = [self._rows.factors(grams, one) for one in _RIDGES_OF_SCORES]
        return self._factors[key]


def cross_fitted_predictions(
    features: npt.NDArray[Any], labels: ClassIndices, num_classes: int = 2
) -> Floats:
    """Predict each row's class, as `FeatureModels` does.

    Raises:
        TooFewRows: there are not two classes with at least two rows each, or one has one row.
        ValueError: the shapes differ.
    """
    if len(features) != len(labels) or features.ndim != 2:
        raise ValueError(f"expected features of {len(labels)} rows, got {features.shape}")
    return FeatureModels.of(features, labels).predictions(labels, num_classes)


def _dealt_by_class(indices: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the fold of each row: every fold has its share of each class."""
    generator = np.random.default_rng(_SEED)
    shuffled = generator.permutation(len(indices))
    by_class = shuffled[np.argsort(indices[shuffled], kind="stable")]
    folds = np.empty(len(indices), dtype=np.int64)
    folds[by_class] = np.arange(len(indices)) % FOLDS
    return folds


def _log_odds(rows: FoldedRows, positive: npt.NDArray[np.bool_]) -> Floats:
    """Return each row's log-odds by the logistic regression of the other folds.

    Args:
        rows: by fold.
        positive: which of them are, (rows,).
    """
    labels = positive.astype(np.float32)
    share = float(labels.mean())
    variance = share * (1 - share)
    linear = rows.factors(rows.grams, Ridge(*(one / variance for one in _RIDGE)))
    weights = solved(linear, rows.moments(labels - np.float32(share))) / np.float32(variance)
    weights[:, 0] += np.log(share) - np.log1p(-share)
    curved = rows.factors(rows.weighted_grams(_curvature(rows.asked(weights))), _RIDGE)
    for _ in range(_STEPS):
        weights += solved(curved, _slopes(rows, labels, weights))
    found: Floats = rows.asked(weights).astype(np.float64)
    return found


def _curvature(log_odds: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the loss's second derivative, halfway to the bound on it up to these log-odds."""
    size = np.maximum(np.abs(log_odds), np.float32(1e-3))
    half = np.tanh(size / 2)
    between: npt.NDArray[np.float32] = (half / (2 * size) + (1 - half * half) / 4) / 2
    return between


def _slopes(rows: FoldedRows, labels: npt.NDArray[np.float32], weights: Weights) -> Weights:
    """Return the log-likelihood's derivative for each fold's model, less that of the penalty."""

    def of_fold(part: slice) -> Weights:
        values = rows.values[:, part]
        rest = labels[part] - (np.tanh(weights @ values / 2) + 1) / 2
        rest[rows.parts.index(part)] = 0  # the fold's own model does not see it
        return np.asarray(rest @ values.T, dtype=np.float32)

    slopes: Weights = rows.sums(of_fold).sum(axis=0) - rows.penalty(_RIDGE) * weights
    return slopes


@contextmanager
def _unconverged_is_good_enough() -> Iterator[None]:
    """Keep quiet about steps that are left over."""
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _calibrated(log_odds: Floats, indices: ClassIndices) -> Floats:
    """Return probabilities, (rows, classes)."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    shares = np.arange(1, _BENDS + 1) / (_BENDS + 1)
    bent = [np.maximum(log_odds - at, 0) for at in np.quantile(log_odds, shares, axis=0)]
    values = np.column_stack([log_odds, *bent])
    with _unconverged_is_good_enough():
        model = LogisticRegression(max_iter=200).fit(values, indices)
    found = model.predict_proba(values).clip(_SMALLEST, 1 - _SMALLEST)
    predictions: Floats = found / found.sum(axis=1, keepdims=True)
    return predictions

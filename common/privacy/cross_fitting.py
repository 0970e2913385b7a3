"""Predictions of labels by models that have not seen them: what features tell, and no attack.

    base models   logistic regression, and histogram gradient boosting of 50 trees (Friedman 2001),
                  each fitted to all folds but one and asked about that one
    together      a logistic regression on the base models' log-probabilities, which weighs and
                  calibrates them (stacking: Wolpert, "Stacked generalization", 1992)

Every row's prediction comes from base models that never saw the row's label; the last step fits a
handful of numbers to all rows. On features without information the predictions are the classes'
shares. 30,000 rows of 50 features take about three seconds of CPU time; the folds are fitted side
by side.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.pair_aucs import ClassIndices, Floats

ResultT = TypeVar("ResultT")

LIBRARIES = (
    "sklearn.ensemble",
    "sklearn.exceptions",
    "sklearn.linear_model",
    "sklearn.model_selection",
    "scipy.stats",
)
"""What is imported when it is first used, which takes a second: only a run that is measured should
pay it."""

FOLDS = 5
SCORE_FOLDS = 3
_TREES = 50
_TREES_OF_SCORES = 20
_LEAVES = 15
_BINS = 63
"""Of a feature's values; more of them take longer and tell no more."""
_SMALLEST = 1e-6
"""Predictions stay this far from 0 and 1, so that their logarithms are finite."""

_SEED = 0
"""The folds are the same for the same rows, whatever the labels' order says otherwise."""


class TooFewRows(ValueError):
    """A class has fewer than two rows: no model can be asked about the one that it has not seen."""


def cross_fitted_predictions(
    features: npt.NDArray[Any], labels: ClassIndices, num_classes: int = 2
) -> Floats:
    """Predict each row's class by models that have not seen its label.

    Args:
        features: (rows, features), finite.
        labels: class indices, (rows,). A class without any row gets probability 0 everywhere.
        num_classes: number of classes.

    Returns:
        Probabilities, (rows, classes), each row's sum 1.

    Raises:
        TooFewRows: there are not two classes with at least two rows each, or one has one row.
        ValueError: the shapes differ.
    """
    if len(features) != len(labels) or features.ndim != 2:
        raise ValueError(f"expected features of {len(labels)} rows, got {features.shape}")
    present, indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(present) < 2 or counts.min() < 2:
        raise TooFewRows(f"expected two rows of each class, got {counts.tolist()}")
    found = _stacked(_out_of_fold(_standardised(features), indices, int(counts.min())), indices)
    predictions = np.zeros((len(labels), num_classes))
    predictions[:, present] = found
    return predictions


class CrossFittedRegressions:
    """Regressions of scores of the same rows on the same features: what they share is done once.

    Args:
        features: (rows, features), finite, at least ``SCORE_FOLDS`` rows.
    """

    def __init__(self, features: npt.NDArray[Any]) -> None:
        self._values = np.column_stack([_standardised(features), np.ones(len(features))])
        fold = np.random.default_rng(_SEED).permutation(len(features)) % SCORE_FOLDS
        self._folds = [np.flatnonzero(fold == number) for number in range(SCORE_FOLDS)]
        self._grams = [part.T @ part for part in map(self._values.__getitem__, self._folds)]

    def explained(self, scores: Floats, *, by_trees: bool = False) -> Floats:
        """Predict a score by regressions that have not seen the row's score.

        Args:
            scores: (rows,), finite.
            by_trees: whether gradient boosting adds what a ridge regression leaves.

        Returns:
            (rows,).
        """
        moments = [self._values[rows].T @ scores[rows] for rows in self._folds]

        def of_fold(number: int) -> Floats:
            others = [other for other in range(SCORE_FOLDS) if other != number]
            gram = sum((self._grams[other] for other in others), np.eye(self._values.shape[1]))
            weights = np.linalg.solve(gram, sum(moments[other] for other in others))
            asked = self._values[self._folds[number]]
            found: Floats = asked @ weights
            if by_trees:
                rows = np.sort(np.concatenate([self._folds[other] for other in others]))
                seen = self._values[rows]
                found += _boosted(seen, scores[rows] - seen @ weights, asked)
            return found

        explained = np.empty(len(scores))
        for rows, found in zip(self._folds, _each(of_fold, range(SCORE_FOLDS)), strict=True):
            explained[rows] = found
        return explained


def explained_by(features: npt.NDArray[Any], scores: Floats, *, by_trees: bool = False) -> Floats:
    """Predict one score from features, as `CrossFittedRegressions` does."""
    return CrossFittedRegressions(features).explained(scores, by_trees=by_trees)


def _each(of_fold: Callable[[int], ResultT], folds: Iterable[int]) -> list[ResultT]:
    """Fit the models of several folds, on the cores that a party may use once it has trained."""
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), FOLDS)) as executor:
        return list(executor.map(of_fold, folds))


def _boosted(seen: Floats, rest: Floats, asked: Floats) -> Floats:
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415

    trees = HistGradientBoostingRegressor(
        max_iter=_TREES_OF_SCORES,
        learning_rate=0.2,
        max_leaf_nodes=_LEAVES,
        max_bins=_BINS,
        early_stopping=False,
        random_state=_SEED,
    )
    found: Floats = trees.fit(seen, rest).predict(asked)
    return found


def _standardised(features: npt.NDArray[Any]) -> Floats:
    values = features.astype(np.float64)
    values -= values.mean(axis=0)
    spread = values.std(axis=0)
    scaled: Floats = values / np.where(spread > 0, spread, 1.0)
    return scaled


def _out_of_fold(features: Floats, indices: ClassIndices, fewest: int) -> Floats:
    """Return both base models' log-probabilities side by side, (rows, 2 classes)."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.model_selection import StratifiedKFold  # noqa: PLC0415

    num_classes = int(indices.max()) + 1
    found = np.empty((len(features), 2 * num_classes))
    folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=_SEED)
    parts = list(folds.split(features, indices))

    def of_fold(number: int) -> None:
        seen, asked = parts[number]
        linear = LogisticRegression(max_iter=100, tol=1e-3)
        trees = HistGradientBoostingClassifier(
            max_iter=_TREES,
            max_leaf_nodes=_LEAVES,
            max_bins=_BINS,
            early_stopping=False,
            random_state=_SEED,
        )
        for index, model in enumerate((linear, trees)):
            columns = slice(index * num_classes, (index + 1) * num_classes)
            model.fit(features[seen], indices[seen])
            found[asked, columns] = model.predict_proba(features[asked])

    with _unconverged_is_good_enough():
        _each(of_fold, range(len(parts)))
    logarithms: Floats = np.log(found.clip(_SMALLEST, 1.0))
    return logarithms


@contextmanager
def _unconverged_is_good_enough() -> Iterator[None]:
    """Keep quiet about steps that are left over: the next model weighs and calibrates this one."""
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _stacked(logarithms: Floats, indices: ClassIndices) -> Floats:
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    with _unconverged_is_good_enough():
        model = LogisticRegression(max_iter=200).fit(logarithms, indices)
    found = model.predict_proba(logarithms).clip(_SMALLEST, 1 - _SMALLEST)
    predictions: Floats = found / found.sum(axis=1, keepdims=True)
    return predictions

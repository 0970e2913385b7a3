"""Predictions of labels by models that have not seen them: what features tell, and no attack.

    base models   logistic regression, and histogram gradient boosting of 50 trees (Friedman 2001),
                  each fitted to all folds but one and asked about that one
    together      a logistic regression on the base models' log-probabilities, which weighs and
                  calibrates them (stacking: Wolpert, "Stacked generalization", 1992)

Every row's prediction comes from base models that never saw the row's label; the last step fits a
handful of numbers to all rows. On features without information the predictions are the classes'
shares. 30,000 rows of 50 features take about three seconds on one core.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.pair_aucs import ClassIndices, Floats

FOLDS = 5
SCORE_FOLDS = 3
_TREES = 50
_TREES_OF_SCORES = 20
_LEAVES = 15
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


def explained_by(features: npt.NDArray[Any], scores: Floats, *, by_trees: bool = False) -> Floats:
    """Predict a score from features, by regressions that have not seen the row's score.

    Args:
        features: (rows, features), finite, at least ``SCORE_FOLDS`` rows.
        scores: (rows,), finite.
        by_trees: whether gradient boosting adds what a ridge regression leaves.

    Returns:
        (rows,).
    """
    values = np.column_stack([_standardised(features), np.ones(len(features))])
    fold = np.random.default_rng(_SEED).permutation(len(values)) % SCORE_FOLDS
    explained = np.empty(len(scores))
    for number in range(SCORE_FOLDS):
        asked = fold == number
        seen = values[~asked]
        gram = seen.T @ seen
        gram.flat[:: len(gram) + 1] += 1.0
        weights = np.linalg.solve(gram, seen.T @ scores[~asked])
        explained[asked] = values[asked] @ weights
        if by_trees:
            explained[asked] += _boosted(seen, scores[~asked] - seen @ weights, values[asked])
    return explained


def _boosted(seen: Floats, rest: Floats, asked: Floats) -> Floats:
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415

    trees = HistGradientBoostingRegressor(
        max_iter=_TREES_OF_SCORES,
        learning_rate=0.2,
        max_leaf_nodes=_LEAVES,
        max_bins=63,
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
    # Importing them takes a second, which only a run that is measured should pay.
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.model_selection import StratifiedKFold  # noqa: PLC0415

    num_classes = int(indices.max()) + 1
    found = np.empty((len(features), 2 * num_classes))
    folds = StratifiedKFold(min(FOLDS, fewest), shuffle=True, random_state=_SEED)
    for seen, asked in folds.split(features, indices):
        linear = LogisticRegression(max_iter=100, tol=1e-3)
        trees = HistGradientBoostingClassifier(
            max_iter=_TREES, max_leaf_nodes=_LEAVES, early_stopping=False, random_state=_SEED
        )
        for number, model in enumerate((linear, trees)):
            with _unconverged_is_good_enough():
                model.fit(features[seen], indices[seen])
            columns = slice(number * num_classes, (number + 1) * num_classes)
            found[asked, columns] = model.predict_proba(features[asked])
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

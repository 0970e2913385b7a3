"""Predicts labels and scores from features by models that have not seen them.

    labels    logistic regression on functions of the features that follow any shape, and gradient
              boosting, fitted to all folds but one and asked about that one; a last logistic
              regression weighs and calibrates both (stacking, Wolpert 1992)
    scores    ridge regression on the same functions; scores of the same rows share the sums

Every row's prediction comes from models that never saw the row's label or score; calibration fits
a handful of numbers to all rows. Neither kind of model follows every shape: where trees predict
labels better than functions, or the other way round, the difference shows in their AUCs.

The functions of a feature are a line, the normal quantile of its rank, bends of that, and for a
feature with few values whether it has a certain one. More functions are the positive parts of
random combinations of two or three ranks: what features reveal only together (Rahimi and Recht,
"Weighted sums of random kitchen sinks", 2008). They do not depend on labels, so that the same ones
serve every fold and every score.
"""

import warnings
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.leakage import ClassIndices, Floats

FOLDS = 5
WIDTH = 256  # functions, if there are few features

_Values = npt.NDArray[np.float32]

_LINES, _SINGLE, _SEVERAL = range(3)
_RIDGE = (1.0, 30.0, 100.0)  # penalties of lines, of other functions of one feature, of several
_RIDGES_OF_SCORES = ((1.0, 10.0, 1e5), (1.0, 30.0, 100.0), (1.0, 1e3, 1e4))
"""Of scores with variance 1: those that leave least are taken, because features may reveal
everything of a score, or nothing."""
_SHARE_OF_SINGLE = 0.75
_MOST_BENDS = 7
_MOST_VALUES = 24  # most different values that count as categories
_FEWEST_OF_VALUE = 5  # fewest rows of a value to learn anything about it
_LOOKED_AT = 4_096  # rows whose quantiles and values stand for all rows'
_FARTHEST = 5.0
_BENDS_OF_ODDS = 2  # of the curve that turns log-odds into calibrated ones
_SMALLEST = 1e-6  # predictions stay this far from 0 and 1, so that their logarithms are finite
_SEED = 0
_TREES: dict[str, Any] = {
    "learning_rate": 0.2,
    "max_iter": 50,
    "max_leaf_nodes": 15,
    "max_bins": 63,
    "early_stopping": False,
    "random_state": _SEED,
}
_MOST_FITTED = 10_000  # rows that trees are fitted to: more take time, and teach them little


class Predictions(NamedTuple):
    """The probability of each class, (rows, classes), by models that have not seen the label."""

    probabilities: Floats
    by_functions: Floats  # by one kind of model alone
    by_trees: Floats


class TooFewRows(ValueError):
    """A class has fewer than two rows: no model could predict a row that it has not seen."""


class FeatureModels:
    """Models of some rows' features; each predicts only rows that it has not seen."""

    def __init__(
        self,
        features: npt.NDArray[Any],
        functions: _Values,
        kinds: npt.NDArray[np.int64],
        folds: npt.NDArray[np.int64],
    ) -> None:
        self._features, self._functions, self._kinds = features, functions, kinds
        self._folds = folds
        self._solvers: dict[bytes, list[list[_Values]]] = {}
        """Rows -> fold -> Cholesky factors of the other folds' regressions, one per penalty."""

    @classmethod
    def of(cls, features: npt.NDArray[Any], strata: ClassIndices | None = None) -> Self:
        """Return the models of finite features, (rows, features).

        Every fold gets its share of each stratum.
        """
        shuffled = np.random.default_rng(_SEED).permutation(len(features))
        if strata is not None:
            shuffled = shuffled[np.argsort(strata[shuffled], kind="stable")]
        folds = np.empty(len(features), dtype=np.int64)
        folds[shuffled] = np.arange(len(features)) % FOLDS
        return cls(features, *_functions_of(features), folds)

    def with_features(self, features: npt.NDArray[Any]) -> "FeatureModels":
        """Return models that know further features, (rows, features), in the same folds."""
        functions, kinds = _functions_of(features, together=False)
        return FeatureModels(
            np.column_stack([self._features, features]),
            np.column_stack([self._functions, functions]),
            np.concatenate([self._kinds, kinds]),
            self._folds,
        )

    @property
    def num_rows(self) -> int:
        return len(self._folds)

    def predictions(self, labels: ClassIndices, num_classes: int = 2) -> Predictions:
        """Predict each row's class by models that have not seen its label; 0 for a class without.

        Raises TooFewRows unless there are two classes, and two rows of each.
        """
        # Importing it takes time that only a run that is measured should pay.
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
        from sklearn.model_selection import PredefinedSplit, cross_val_predict  # noqa: PLC0415

        present, indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if len(present) < 2 or counts.min() < 2:
            raise TooFewRows(f"expected two rows of each class, got {counts.tolist()}")
        # A penalty of its own for each function is a unit of its own.
        scaled = self._functions / np.sqrt(self._penalties(_RIDGE))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # steps that are left over
            by_functions = cross_val_predict(
                LogisticRegression(tol=1e-3, max_iter=60),
                scaled,
                indices,
                cv=PredefinedSplit(self._folds),
                method="decision_function",
            ).reshape(len(labels), -1)
            by_trees = self._odds_by_trees(indices, len(present))
            found = np.zeros((3, len(labels), num_classes))
            both = np.column_stack([by_functions, by_trees])
            for number, log_odds in enumerate((both, by_functions, by_trees)):
                found[number][:, present] = _calibrated(log_odds, indices)
        return Predictions(*found)

    def _odds_by_trees(self, indices: ClassIndices, num_classes: int) -> Floats:
        """Return the log-odds of class 1 of two, (rows, 1), or of each class."""
        from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415

        odds = np.empty((len(indices), num_classes if num_classes > 2 else 1))
        order = np.random.default_rng(_SEED).permutation(len(indices))
        for fold in range(FOLDS):
            others, asked = order[self._folds[order] != fold], self._folds == fold
            # Among fewer rows, a rare class could be missing.
            of_each_class = others[np.unique(indices[others], return_index=True)[1]]
            fitted = np.union1d(others[:_MOST_FITTED], of_each_class)
            trees = HistGradientBoostingClassifier(**_TREES)
            trees.fit(self._features[fitted], indices[fitted])
            odds[asked] = trees.decision_function(self._features[asked]).reshape(asked.sum(), -1)
        return odds

    def explained(self, scores: Floats, scored: npt.NDArray[np.int64] | None = None) -> Floats:
        """Predict the scores of some rows, ascending, by regressions that have not seen them."""
        from scipy.linalg import cho_solve  # noqa: PLC0415

        rows = np.arange(self.num_rows) if scored is None else scored
        values = np.column_stack([np.ones(len(rows), np.float32), self._functions[rows]])
        parts = [self._folds[rows] == fold for fold in range(FOLDS)]
        if rows.tobytes() not in self._solvers:
            self._solvers[rows.tobytes()] = self._solvers_of([values[part] for part in parts])
        solvers = self._solvers[rows.tobytes()]
        centre, spread = float(scores.mean()), float(scores.std()) or 1.0
        targets = ((scores - centre) / spread).astype(np.float32)
        moments = np.stack([values[part].T @ targets[part] for part in parts])
        predicted = np.empty((len(_RIDGES_OF_SCORES), len(targets)))
        for fold, part in enumerate(parts):
            moment = moments.sum(axis=0) - moments[fold]
            for number, factor in enumerate(solvers[fold]):
                weights = cho_solve((factor, True), moment, check_finite=False)
                predicted[number, part] = values[part] @ weights
        best = predicted[np.square(targets - predicted).sum(axis=1).argmin()]
        explained: Floats = centre + spread * best
        return explained

    def _solvers_of(self, parts: list[_Values]) -> list[list[_Values]]:
        from scipy.linalg import cholesky  # noqa: PLC0415

        grams = np.stack([values.T @ values for values in parts])
        penalties = [
            np.diag(np.append(np.float32(1e-3), self._penalties(ridge)))
            for ridge in _RIDGES_OF_SCORES
        ]
        others = [grams.sum(axis=0) - gram for gram in grams]
        return [
            [cholesky(gram + one, lower=True, check_finite=False) for one in penalties]
            for gram in others
        ]

    def _penalties(self, ridge: tuple[float, float, float]) -> _Values:
        penalties: _Values = np.array(ridge, np.float32)[self._kinds]
        return penalties


def _functions_of(
    features: npt.NDArray[Any], *, together: bool = True
) -> tuple[_Values, npt.NDArray[np.int64]]:
    """Return functions of mean 0 and variance 1, (rows, functions), ``WIDTH`` if ``together``."""
    from sklearn.preprocessing import OneHotEncoder, QuantileTransformer  # noqa: PLC0415

    features = features[:, features.min(axis=0) < features.max(axis=0)]
    features = (features / np.abs(features).max(axis=0)).astype(np.float32)
    num_rows, num_features = features.shape
    if not num_features:
        return np.zeros((num_rows, 1), np.float32), np.array([_LINES])
    generator = np.random.default_rng(_SEED)
    looked_at = generator.permutation(num_rows)[:_LOOKED_AT]
    few = np.array([len(np.unique(one[looked_at])) <= _MOST_VALUES for one in features.T])
    ranks = QuantileTransformer(
        n_quantiles=min(64, num_rows),
        output_distribution="normal",
        subsample=_LOOKED_AT,
        random_state=_SEED,
    ).fit_transform(features)
    single, inputs = [ranks], [ranks]
    num_left = int(_SHARE_OF_SINGLE * WIDTH) - 2 * num_features
    bends = min(_MOST_BENDS, num_left // num_features)
    if bends > 0 and not few.all():
        shares = np.arange(1, bends + 1) / (bends + 1)
        bent_at = np.quantile(ranks[looked_at][:, ~few], shares, axis=0)
        single += [np.maximum(ranks[:, ~few] - at, 0) for at in bent_at.astype(np.float32)]
    if few.any():
        encoder = OneHotEncoder(
            min_frequency=_FEWEST_OF_VALUE,
            max_categories=_MOST_VALUES,
            sparse_output=False,
            dtype=np.float32,
        )
        values = encoder.fit_transform(features[:, few])
        single.append(values)
        inputs.append(2 * values)
    lines = np.clip(_standardised(features), -_FARTHEST, _FARTHEST)
    functions = [lines, _standardised(np.column_stack(single))]
    kinds = [_LINES, _SINGLE]
    if together:
        number = max(WIDTH - sum(one.shape[1] for one in functions), WIDTH // 4)
        joined = np.column_stack(inputs)
        weights = generator.normal(size=(joined.shape[1], number))
        order = generator.random(weights.shape).argsort(axis=0).argsort(axis=0)
        weights[order >= generator.integers(2, 4, size=number)] = 0
        combined = _standardised(joined @ weights.astype(np.float32))
        combined += generator.normal(size=number)
        functions.append(_standardised(np.maximum(combined, 0)))
        kinds.append(_SEVERAL)
    sizes = [one.shape[1] for one in functions]
    return np.column_stack(functions), np.repeat(kinds, sizes)


def _standardised(values: npt.NDArray[Any]) -> _Values:
    centred = values - values.mean(axis=0, dtype=np.float64)
    spread = centred.std(axis=0)
    standardised: _Values = (centred / np.where(spread > 1e-6, spread, 1.0)).astype(np.float32)
    return standardised


def _calibrated(log_odds: Floats, indices: ClassIndices) -> Floats:
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    shares = np.arange(1, _BENDS_OF_ODDS + 1) / (_BENDS_OF_ODDS + 1)
    bent = [np.maximum(log_odds - at, 0) for at in np.quantile(log_odds, shares, axis=0)]
    values = np.column_stack([log_odds, *bent])
    model = LogisticRegression(max_iter=200).fit(values, indices)
    clipped = model.predict_proba(values).clip(_SMALLEST, 1 - _SMALLEST)
    predictions: Floats = clipped / clipped.sum(axis=1, keepdims=True)
    return predictions

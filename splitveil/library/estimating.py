"""``SplitClassifier``: an estimator of scikit-learn's kind, over ``simulate`` and ``predict``."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from splitveil.library.own_data import as_table
from splitveil.library.predicting import predict
from splitveil.library.simulating import simulate


class SplitClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifies rows whose columns are divided between two organisations.

    Row n of all tables is the same example; the active table is None where the label owner has
    labels alone. ``classes_`` are the labels, sorted, and ``run_`` is the run. Parameters are those
    of ``simulate``, and ``random_state`` is its seed.
    """

    def __init__(self, *, defense: Any = None, settings: Any = None, random_state: int = 0) -> None:
        self.defense, self.settings, self.random_state = defense, settings, random_state

    def fit(self, active: Any, passive: Any, y: ArrayLike) -> Self:
        self.classes_, numbers = np.unique(np.asarray(y), return_inverse=True)
        own = {} if active is None else _columns(active, "active")
        label = "y" + max(["", *own], key=len)  # longer than the others
        tables = {"active": {**own, label: numbers}, "passive": _columns(passive, "passive")}
        chosen = {"defense": self.defense, "settings": self.settings}
        given: dict[str, Any] = tables | chosen | {"label": label, "seeds": [self.random_state]}
        (self.run_,) = simulate(**given)
        return self

    def predict_proba(self, active: Any, passive: Any) -> NDArray[np.float64]:
        """Return each row's probability of each class, (rows, classes)."""
        check_is_fitted(self)
        given = {"passive": passive} | ({} if active is None else {"active": active})
        found = predict(self.run_, tables={one: _columns(x, one) for one, x in given.items()})
        if len(self.classes_) == 2:
            positive = np.asarray(found["probability"], np.float64)
            return np.column_stack([1 - positive, positive])
        names = [f"probability_{n}" for n in range(len(self.classes_))]
        return np.column_stack([np.asarray(found[name], np.float64) for name in names])

    def predict(self, active: Any, passive: Any) -> NDArray[Any]:
        likeliest = self.predict_proba(active, passive).argmax(axis=1)
        return np.asarray(self.classes_[likeliest])


def _columns(given: Any, name: str) -> dict[str, Any]:
    # A part of a data frame has the row labels of the whole one.
    table = as_table(given.reset_index(drop=True) if hasattr(given, "reset_index") else given, name)
    return dict(zip(table.column_names, table.columns, strict=True))

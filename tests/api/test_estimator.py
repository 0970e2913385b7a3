"""``SplitClassifier``: two tables and labels, by scikit-learn's methods."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import (
    check_get_params_invariance,
    check_no_attributes_set_in_init,
    check_parameters_default_constructible,
    check_set_params,
)

from splitveil import SplitClassifier

QUICK = {"contract.epochs": 12, "active.refit": None, "active.leak_monitor": None}
QUICK |= {"active.torch_threads": 1, "passive.torch_threads": 1}


def test_it_is_an_estimator_as_scikit_learn_checks_it() -> None:
    name, one = "SplitClassifier", SplitClassifier(random_state=1)
    check_parameters_default_constructible(name, one)
    check_no_attributes_set_in_init(name, one)
    check_get_params_invariance(name, one)
    check_set_params(name, one)
    with pytest.raises(NotFittedError):
        one.predict([[1.0]], [[1.0]])


def test_it_learns_from_both_tables_and_returns_the_labels_as_given() -> None:
    draw = np.random.default_rng(0)
    # Parts of data frames have the row labels of the whole ones.
    active = pd.DataFrame(draw.normal(size=(400, 2)), columns=["y", "b"])
    passive = pd.DataFrame(draw.normal(size=(400, 3)))
    y = np.array(["a", "b", "c"])[np.searchsorted([-1, 1], active["y"] + 2 * passive[1])]
    model = SplitClassifier(settings=QUICK).fit(active[100:], passive[100:], y[100:])
    found = model.predict_proba(active[:100], passive[:100])
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert found.shape == (100, 3)
    assert found.sum(axis=1) == pytest.approx(np.ones(100), abs=1e-5)
    assert (model.predict(active[:100], passive[:100]) == y[:100]).mean() > 0.7


def test_a_label_owner_may_have_labels_alone() -> None:
    theirs = np.random.default_rng(0).normal(size=(400, 3))
    y = theirs[:, 0] > 0
    model = SplitClassifier(settings=QUICK).fit(None, theirs, y)
    assert (model.predict(None, theirs) == y).mean() > 0.8

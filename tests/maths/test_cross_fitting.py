"""Predictions of labels by models that have not seen them."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from splitveil.common.privacy.cross_fitting import (
    TooFewRows,
    cross_fitted_predictions,
    explained_by,
)


def test_a_row_does_not_tell_its_own_label() -> None:
    """With more features than a class has rows, a model that sees the labels tells them all."""
    generator = np.random.default_rng(1)
    features, labels = generator.normal(size=(300, 200)), np.arange(300) % 2
    found = cross_fitted_predictions(features, labels)[:, 1]
    assert roc_auc_score(labels, found) < 0.6
    seen = LogisticRegression(max_iter=1000).fit(features, labels)
    assert roc_auc_score(labels, seen.predict_proba(features)[:, 1]) > 0.95


def test_what_features_tell_is_told_whatever_its_form() -> None:
    """A product of two features escapes a linear model: its predictions are those of the shares."""
    generator = np.random.default_rng(2)
    features = generator.normal(size=(6_000, 4))
    truth = 1 / (1 + np.exp(-(3 * features[:, 0] * features[:, 1] - 1)))
    labels = (generator.random(6_000) < truth).astype(np.int64)
    found = cross_fitted_predictions(features, labels)
    assert found.sum(axis=1) == pytest.approx(1.0)
    best, shares = log_loss(labels, truth), log_loss(labels, np.full(6_000, labels.mean()))
    assert log_loss(labels, found) < best + 0.15 * (shares - best)
    assert found[:, 1].mean() == pytest.approx(labels.mean(), abs=0.002)


def test_an_absent_class_is_never_predicted() -> None:
    generator = np.random.default_rng(3)
    labels = generator.choice([0, 2, 3], 300)
    features = generator.normal(size=(300, 2)) + 3 * labels[:, None]
    found = cross_fitted_predictions(features, labels, num_classes=4)
    assert (found[:, 1] == 0).all()
    assert (found.argmax(axis=1) == labels).mean() > 0.9


def test_constant_features_tell_the_shares() -> None:
    labels = (np.arange(500) % 5 == 0).astype(np.int64)
    found = cross_fitted_predictions(np.ones((500, 3)), labels)[:, 1]
    assert found == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 0, 0, 1]])
def test_a_class_of_one_row_cannot_be_predicted(labels: list[int]) -> None:
    with pytest.raises(TooFewRows):
        cross_fitted_predictions(np.zeros((4, 1)), np.array(labels))


def test_features_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="expected features of 4 rows"):
        cross_fitted_predictions(np.zeros((3, 1)), np.array([0, 1, 0, 1]))


def test_what_features_explain_of_a_score_leaves_its_noise() -> None:
    """Trees explain what a linear model cannot, and neither explains noise."""
    generator = np.random.default_rng(4)
    features = generator.normal(size=(6_000, 3))
    shape, noise = np.abs(features[:, 0]) * 3, generator.normal(size=6_000)
    left = [
        (shape + noise - explained_by(features, shape + noise, by_trees=by_trees)).var()
        for by_trees in (False, True)
    ]
    assert left[0] > 3
    assert left[1] < 1.3
    assert (noise - explained_by(features, noise, by_trees=True)).var() > 0.97 * noise.var()

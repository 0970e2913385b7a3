"""Predictions of labels by models that have not seen them."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from splitveil.common.privacy.cross_fitting import FeatureModels, TooFewRows


def test_a_row_does_not_reveal_its_own_label() -> None:
    """With more features than a class has rows, a model that sees the labels knows them all."""
    generator = np.random.default_rng(1)
    features, labels = generator.normal(size=(300, 200)), np.arange(300) % 2
    found = FeatureModels.of(features, labels).predictions(labels).probabilities[:, 1]
    assert roc_auc_score(labels, found) < 0.6
    seen = LogisticRegression(max_iter=1000).fit(features, labels)
    assert roc_auc_score(labels, seen.predict_proba(features)[:, 1]) > 0.95


def test_what_features_reveal_is_predicted_whatever_its_form() -> None:
    """A product of two features escapes a linear model: its predictions are those of the shares."""
    generator = np.random.default_rng(2)
    features = generator.normal(size=(6_000, 4))
    truth = 1 / (1 + np.exp(-(3 * features[:, 0] * features[:, 1] - 1)))
    labels = (generator.random(6_000) < truth).astype(np.int64)
    found = FeatureModels.of(features, labels).predictions(labels).probabilities
    assert found.sum(axis=1) == pytest.approx(1.0)
    best, shares = log_loss(labels, truth), log_loss(labels, np.full(6_000, labels.mean()))
    assert log_loss(labels, found) < best + 0.15 * (shares - best)
    assert found[:, 1].mean() == pytest.approx(labels.mean(), abs=0.002)


def test_an_absent_class_is_never_predicted() -> None:
    generator = np.random.default_rng(3)
    labels = generator.choice([0, 2, 3], 300)
    features = generator.normal(size=(300, 2)) + 3 * labels[:, None]
    predicted = FeatureModels.of(features, labels).predictions(labels, num_classes=4)
    for found in predicted:
        assert (found[:, 1] == 0).all()
        assert (found.argmax(axis=1) == labels).mean() > 0.9


def test_constant_features_reveal_the_shares() -> None:
    labels = (np.arange(500) % 5 == 0).astype(np.int64)
    found = FeatureModels.of(np.ones((500, 3)), labels).predictions(labels)
    assert found.probabilities[:, 1] == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 0, 0, 1]])
def test_a_class_of_one_row_cannot_be_predicted(labels: list[int]) -> None:
    with pytest.raises(TooFewRows):
        FeatureModels.of(np.zeros((4, 1))).predictions(np.array(labels))


def test_what_features_explain_of_a_score_leaves_its_noise() -> None:
    """Bends explain what a line cannot, and nothing explains noise."""
    generator = np.random.default_rng(4)
    features = generator.normal(size=(6_000, 3))
    shape, noise = np.abs(features[:, 0]) * 3, generator.normal(size=6_000)
    by_lines = LinearRegression().fit(features, shape + noise).predict(features)
    assert (shape + noise - by_lines).var() > 3
    models = FeatureModels.of(features)
    assert (shape + noise - models.explained(shape + noise)).var() < 1.1
    assert (noise - models.explained(noise)).var() == pytest.approx(noise.var(), rel=0.03)


def test_no_model_sees_the_label_or_score_that_it_is_asked_about() -> None:
    """One row's label or score changed: its own prediction stays, but for the calibration."""
    generator = np.random.default_rng(6)
    features = generator.normal(size=(2_000, 3))
    scores = features[:, 0] + generator.normal(size=2_000)
    changed = scores.copy()
    changed[7] += 100
    models = FeatureModels.of(features)
    before, after = models.explained(scores), models.explained(changed)
    moved = abs(after - before)
    assert moved[7] < 0.02 * moved.max()
    labels = (features[:, 0] + generator.normal(size=2_000) > 0).astype(np.int64)
    other = labels.copy()
    other[7] = 1 - labels[7]
    known = FeatureModels.of(features, labels)
    before, after = (known.predictions(one).probabilities for one in (labels, other))
    moved = abs(after - before)[:, 1]
    assert moved[7] < 0.1 * moved.max()


def test_what_one_kind_of_model_misses_the_other_learns() -> None:
    """A fine chequerboard escapes smooth functions, a plane through ten features escapes trees."""
    generator = np.random.default_rng(7)
    fine = generator.uniform(-1, 1, (3_000, 2))
    squares = (np.sin(6 * fine[:, 0]) * np.sin(6 * fine[:, 1]) > 0).astype(np.int64)
    wide = generator.normal(size=(1_000, 10))
    side = (wide.sum(axis=1) > 0).astype(np.int64)
    for features, labels, is_for_trees in ((fine, squares, True), (wide, side, False)):
        found = FeatureModels.of(features, labels).predictions(labels)
        both, functions, trees = (roc_auc_score(labels, one[:, 1]) for one in found)
        assert (trees > functions + 0.03) is is_for_trees
        assert (functions > trees + 0.03) is not is_for_trees
        assert both > max(functions, trees) - 0.005

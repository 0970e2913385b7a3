"""The lower bound on epsilon: never above the truth, not far below it, and zero for nothing."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from splitveil.common.privacy.cross_fitting import FeatureModels
from splitveil.common.privacy.figures import EpsilonBound
from splitveil.common.privacy.leakage import Floats
from splitveil.common.privacy.observational_audit import (
    ScoredRows,
    choosing_half,
    epsilon_lower_bound,
    is_offered,
    observe_epsilon,
    p_value,
    quick_lower_bound,
)

SEEDS = 20
TOLERATED = 3
"""Seeds of 20 in which a 95 % bound may fail: 4 or more happen with a probability of 1.6 %."""


class Table:
    """Rows whose feature predicts their labels with known probabilities."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.features = self.generator.normal(size=(count, 2))
        self.predictions = 1 / (1 + np.exp(1 - 1.5 * self.features[:, 0]))
        self.labels = self.generator.random(count) < self.predictions

    def randomized_response(self, epsilon: float) -> Floats:
        flipped = self.generator.random(len(self.labels)) < 1 / (1 + math.exp(epsilon))
        return (self.labels ^ flipped).astype(np.float64)

    def scored(self, scores: Floats) -> ScoredRows:
        return ScoredRows(np.arange(len(scores)), scores, self.labels, self.predictions)

    def audit(self, **attacks: Floats) -> EpsilonBound:
        found = observe_epsilon(
            FeatureModels.of(self.features),
            {name: self.scored(scores) for name, scores in attacks.items()},
        )
        assert found is not None
        return found


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_the_bound_is_below_the_epsilon_of_randomized_response(epsilon: float) -> None:
    """And above half of it on average, with 2,000 rows; less noise, of twice epsilon, passes it."""
    bounds, with_less_noise = [], []
    for seed in range(SEEDS):
        table = Table(2_000, seed)
        bounds.append(table.audit(scores=table.randomized_response(epsilon)).epsilon)
        louder = table.audit(scores=table.randomized_response(2 * epsilon))
        with_less_noise.append(louder.epsilon)
    assert sum(bound > epsilon for bound in bounds) <= TOLERATED
    assert np.mean(bounds) > 0.5 * epsilon
    assert sum(bound > epsilon for bound in with_less_noise) > TOLERATED


def test_many_rows_leave_little_between_the_bound_and_the_truth() -> None:
    table = Table(60_000, seed=1)
    assert 0.85 < table.audit(scores=table.randomized_response(1.0)).epsilon < 1.0


def test_trying_many_attacks_makes_no_bound() -> None:
    """Ten scores of noise: the best of them is tested on rows that did not choose it."""
    failures = 0
    for seed in range(SEEDS):
        table = Table(500, seed)
        tried = {f"noise{number}": table.generator.normal(size=500) for number in range(10)}
        failures += table.audit(**tried).epsilon > 0
    assert failures <= TOLERATED


def test_features_alone_make_no_bound() -> None:
    """The score is the true probability, with noise; offers that ignore it would count it."""
    failures = uneven = 0
    for seed in range(SEEDS):
        table = Table(4_000, seed)
        scores = table.predictions + 0.1 * table.generator.normal(size=4_000)
        failures += table.audit(scores=scores).epsilon > 0
        even = np.full(4_000, table.labels.mean())
        wrong = ScoredRows(np.arange(4_000), scores, table.labels, even)
        found = observe_epsilon(
            FeatureModels.of(table.generator.normal(size=(4_000, 1))), {"scores": wrong}
        )
        assert found is not None
        uneven += found.epsilon > 0
    assert failures <= TOLERATED
    assert uneven == SEEDS


def test_predictions_that_are_fitted_make_little_of_one() -> None:
    """Nearly: a score may know better how features predict labels than 4,000 rows teach anybody.

    The bound from it stays below .2, where rows that are offered without predictions make it .8.
    """
    for seed in range(5):
        generator = np.random.default_rng(seed)
        features = generator.normal(size=(4_000, 3))
        truth = 1 / (1 + np.exp(1 - features[:, 0] * features[:, 1] - features[:, 2]))
        labels = generator.random(4_000) < truth
        classes = labels.astype(np.int64)
        predictions = FeatureModels.of(features, classes).predictions(classes).probabilities[:, 1]
        scores = np.log(truth / (1 - truth)) + 2 * generator.normal(size=4_000)
        scored = ScoredRows(np.arange(4_000), scores, labels, predictions)
        found = observe_epsilon(FeatureModels.of(features), {"scores": scored})
        assert found is not None
        assert found.epsilon < 0.2
        shares = scored._replace(predictions=np.full(4_000, labels.mean()))
        found = observe_epsilon(FeatureModels.of(np.zeros((4_000, 1))), {"scores": shares})
        assert found is not None
        assert found.epsilon > 0.8


def test_a_gradient_without_a_defense_excludes_every_reasonable_epsilon() -> None:
    table = Table(20_000, seed=3)
    found = table.audit(gradient=table.predictions - table.labels, noise=table.features[:, 1])
    assert found.attack == "gradient"
    assert found.correct == found.guesses
    assert found.epsilon > 5


def test_the_sign_of_a_score_does_not_matter() -> None:
    table = Table(4_000, seed=4)
    scores = table.randomized_response(2.0)
    assert table.audit(a=-scores).epsilon == pytest.approx(table.audit(a=scores).epsilon, rel=0.1)


def test_few_rows_test_nothing() -> None:
    table = Table(60, seed=5)
    models = FeatureModels.of(table.features)
    assert observe_epsilon(models, {"a": table.scored(table.features[:, 0])}) is None


def test_an_offered_row_is_a_fair_coin_given_its_features() -> None:
    """In ten ranges of the prediction, on both halves; the rows not offered are not."""
    table = Table(200_000, seed=6)
    offered = is_offered(table.predictions, table.labels, table.generator.random(200_000))
    for half in (choosing_half(200_000), ~choosing_half(200_000)):
        for limit in np.linspace(0.05, 0.9, 10):
            chosen = half & offered & (abs(table.predictions - limit) < 0.05)
            error = abs(table.labels[chosen].mean() - 0.5)
            assert error < 4 * 0.5 / chosen.sum() ** 0.5
    assert abs(table.labels[~offered].mean() - 0.5) > 0.1


@pytest.mark.parametrize(("guesses", "correct", "pairs"), [(50, 40, 200), (7, 7, 7), (9, 0, 10)])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_p_value_is_that_of_the_paper(
    guesses: int, correct: int, pairs: int, delta: float
) -> None:
    """Theorem 5.2 of Steinke, Nasr and Jagielski 2023, summed term by term."""
    accuracy = math.exp(0.7) / (1 + math.exp(0.7))
    chance = sum(binom.pmf(right, guesses, accuracy) for right in range(correct, guesses + 1))
    alpha = max(
        (
            sum(binom.pmf(right, guesses, accuracy) for right in range(correct - i, correct)) / i
            for i in range(1, correct + 1)
        ),
        default=0.0,
    )
    expected = min(1.0, chance + 2 * pairs * delta * alpha)
    assert p_value(guesses, correct, pairs, 0.7, delta) == pytest.approx(expected)


def test_the_bound_is_the_largest_epsilon_that_is_excluded() -> None:
    bound = epsilon_lower_bound(400, 300, 1_000)
    assert p_value(400, 300, 1_000, bound) <= 0.05
    assert p_value(400, 300, 1_000, bound + 0.001) > 0.05
    assert epsilon_lower_bound(400, 210, 1_000) == 0.0
    assert epsilon_lower_bound(400, 300, 1_000, delta=0.0) == pytest.approx(
        quick_lower_bound(400, 300), abs=1e-3
    )
    assert epsilon_lower_bound(400, 300, 1_000, delta=0.0) > bound
    assert p_value(400, 300, 1_000, math.inf) == 1.0


@pytest.mark.parametrize(
    ("guesses", "correct", "pairs", "epsilon"),
    [(5, 6, 10, 1.0), (11, 5, 10, 1.0), (5, -1, 10, 1.0), (5, 5, 5, -1.0), (5, 5, 5, math.nan)],
)
def test_numbers_that_do_not_fit_are_refused(
    guesses: int, correct: int, pairs: int, epsilon: float
) -> None:
    with pytest.raises(ValueError, match="expected correct <= guesses <= pairs"):
        p_value(guesses, correct, pairs, epsilon)

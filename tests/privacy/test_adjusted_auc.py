"""The leak among rows of which features reveal the same, and what an attack is worth besides."""

import math

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve

from splitveil.common.privacy.adjusted_auc import (
    MIN_PER_STRATUM,
    adjusted_leak_auc,
    advantage_over,
    operating_points,
    placements,
    strata_of,
)
from splitveil.common.privacy.leakage import Floats, OneClass, leak_auc


def rows(
    count: int, seed: int, offset: float = -1.0
) -> tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.bool_]], Floats]:
    """Return a feature, labels that it predicts, and their true probabilities."""
    generator = np.random.default_rng(seed)
    feature = generator.normal(size=count)
    predictions = 1 / (1 + np.exp(-(offset + 1.5 * feature)))
    return feature, generator.random(count) < predictions, predictions


def noise(count: int, seed: int) -> Floats:
    return np.random.default_rng(seed + 1000).normal(size=count)


def test_a_score_that_repeats_features_reveals_nothing_beyond_them() -> None:
    """The raw leak AUC is .82, and one of its own stratum of 20 rows per limit is still .54."""
    feature, positive, predictions = rows(20_000, seed=1)
    assert leak_auc(feature, positive) > 0.8
    found = adjusted_leak_auc(feature, positive, predictions)
    assert found.value < 0.51
    assert found.low <= 0.5
    coarse = adjusted_leak_auc(feature, positive, np.round(predictions, 1).clip(0.05, 0.95))
    assert coarse.low > 0.5


def test_a_score_that_knows_labels_reveals_all_of_them() -> None:
    _, positive, predictions = rows(2_000, seed=2)
    found = adjusted_leak_auc(predictions - positive, positive, predictions)
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.98 < found.low < 1.0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """At least 180 of 200 intervals of 95 %; those of half the width do not."""
    truth = norm.cdf(0.5 / math.sqrt(2))
    covered = narrow = 0
    for seed in range(200):
        feature, positive, predictions = rows(2_000, seed)
        scores = feature + 0.5 * positive + noise(2_000, seed)
        value, low, high = adjusted_leak_auc(scores, positive, predictions)
        covered += low <= truth <= high
        narrow += (low + value) / 2 <= truth <= (high + value) / 2
    assert covered >= 180
    assert narrow < 180


def test_a_negative_weighs_as_much_as_it_looks_like_a_positive() -> None:
    """By an oracle that goes through all pairs of a stratum."""
    generator = np.random.default_rng(5)
    scores, positive = generator.integers(0, 5, 60).astype(float), generator.random(60) < 0.4
    predictions = generator.uniform(0.05, 0.95, 60)
    strata = strata_of(predictions, positive)
    placed = []
    for i in np.flatnonzero(positive):
        below = total = 0.0
        for j in np.flatnonzero(~positive & (strata == strata[i])):
            weight = predictions[j] / (1 - predictions[j])
            below += weight * ((scores[j] < scores[i]) + 0.5 * (scores[j] == scores[i]))
            total += weight
        placed.append(below / total)
    expected = np.mean(placed)
    found = adjusted_leak_auc(scores, positive, predictions).value
    assert found == pytest.approx(max(expected, 1 - expected))


@pytest.mark.parametrize("offset", [-1.0, -6.0, 4.0])
def test_few_rows_of_a_class_make_few_strata(offset: float) -> None:
    _, positive, predictions = rows(10_000, seed=7, offset=offset)
    strata = strata_of(predictions, positive)
    rarer = min(positive.sum(), (~positive).sum())
    assert strata.max() + 1 <= max(1, min(100, rarer // MIN_PER_STRATUM) + 1)
    assert strata.max() > 0
    assert (np.diff(strata[np.argsort(predictions)]) >= 0).all()
    for number in range(strata.max() + 1):
        of_stratum = positive[strata == number]
        assert min(of_stratum.sum(), (~of_stratum).sum()) >= 2


def test_predictions_without_information_make_one_stratum() -> None:
    _, positive, predictions = rows(500, seed=8)
    assert set(strata_of(np.full(500, 0.3), positive)) == {0}
    found = adjusted_leak_auc(predictions, positive, np.full(500, 0.3))
    assert found.value == pytest.approx(roc_auc_score(positive, predictions))


def test_one_positive_has_no_adjusted_leak() -> None:
    with pytest.raises(OneClass, match="expected two rows of each class, got 1 of one"):
        adjusted_leak_auc(np.arange(9.0), np.arange(9) == 4, np.full(9, 0.5))


@pytest.mark.parametrize("bad", [np.array([0.0, np.nan]), np.zeros(3)])
def test_scores_without_an_order_are_refused(bad: Floats) -> None:
    with pytest.raises(ValueError, match="expected one score per label, none of them NaN"):
        placements(bad, np.array([True, False]))


def test_the_advantage_is_the_difference_of_the_leak_aucs() -> None:
    feature, positive, _ = rows(3_000, seed=10)
    scores = feature + positive + noise(3_000, seed=10)
    found = advantage_over(feature, scores, positive)
    own = roc_auc_score(positive, feature)
    assert found.prior == pytest.approx(own)
    assert found.value == pytest.approx(roc_auc_score(positive, scores) - own)
    assert advantage_over(feature, -scores, positive) == pytest.approx(found)
    nothing = advantage_over(np.zeros(3_000), scores, positive)
    assert nothing.prior == pytest.approx(0.5)


def test_the_advantage_of_repeating_features_is_nothing() -> None:
    """The interval of a difference covers 0 in 95 % of the draws, and not one that ignores pairing.

    Scores of the same rows vary together: an interval for independent ones covers all of them.
    """
    covered = unpaired = 0
    for seed in range(200):
        feature, positive, _ = rows(1_000, seed)
        own, attack = (feature + 0.5 * noise(1_000, seed + shift) for shift in (0, 5_000))
        found = advantage_over(own, attack, positive)
        covered += found.low <= 0 <= found.high
        apart = [placements(scores, positive) for scores in (own, attack)]
        variance = sum(part.var(ddof=1) / len(part) for one in apart for part in one[:2])
        unpaired += abs(found.value) <= 1.96 * variance**0.5
    assert 180 <= covered < 200
    assert unpaired == 200


def test_the_rates_are_those_of_the_roc_curve() -> None:
    feature, positive, _ = rows(5_000, seed=11)
    scores = feature + positive
    accused, found_rates, _ = roc_curve(positive, scores, drop_intermediate=False)
    found = operating_points(scores, positive)
    assert found["tpr_at_per_mille"] == pytest.approx(found_rates[accused <= 0.001].max())
    assert found["tpr_at_percent"] == pytest.approx(found_rates[accused <= 0.01].max())
    assert found["precision_at_100"] == positive[np.argsort(scores)[-100:]].mean()
    assert operating_points(-scores, positive) == found


def test_ties_are_not_counted_as_found() -> None:
    scores, positive = np.repeat([0.0, 1.0], 500), np.tile([True, False], 500)
    assert [*operating_points(scores, positive).values()] == [0.0, 0.0, 0.5]
    assert operating_points(scores[:100], positive[:100])["precision_at_100"] is None

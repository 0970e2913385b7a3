"""The leak among rows of which features reveal the same, and what an attack is worth besides."""

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve

from splitveil import audit
from splitveil.common.privacy import adjusted_auc
from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.beyond_features import Covariates, measure_beyond_features
from splitveil.common.privacy.cross_fitting import FeatureModels
from splitveil.common.privacy.figures import STANDARD_ERRORS, AdjustedFigures, BeyondFigures
from splitveil.common.privacy.leakage import ClassIndices, Floats, OneClass, leak_auc
from splitveil.common.record.assessment import WIDEST


def rows(
    count: int, seed: int, offset: float = -1.0
) -> tuple[Floats, np.ndarray[tuple[int, ...], np.dtype[np.bool_]], Floats]:
    """Return a feature, labels that it predicts, and their true probabilities."""
    generator = np.random.default_rng(seed)
    feature = generator.normal(size=count)
    predictions = 1 / (1 + np.exp(-(offset + 1.5 * feature)))
    return feature, generator.random(count) < predictions, predictions


def beyond(features: Floats, labels: ClassIndices, scores: dict[str, Floats]) -> BeyondFigures:
    positions, nothing = np.arange(len(labels)), np.zeros((len(labels), 0), np.float32)
    covariates = Covariates(positions, features.astype(np.float32), nothing, nothing, labels)
    by_attack = {name: [RunScores(positions, one)] for name, one in scores.items()}
    found = measure_beyond_features(covariates, by_attack, {})
    assert found is not None
    return found


def at_95_percent(found: AdjustedFigures) -> tuple[float, float]:
    """Return the interval that covers the truth in 95 % of all draws."""
    value, low, high = found
    share = norm.ppf(0.975) / STANDARD_ERRORS
    return value - share * (value - low), value + share * (high - value)


def noise(count: int, seed: int) -> Floats:
    return np.random.default_rng(seed + 1000).normal(size=count)


def test_a_score_that_repeats_features_reveals_nothing_beyond_them() -> None:
    """The raw leak AUC is .82; with predictions rounded to tenths, an interval is above 1/2."""
    feature, positive, predictions = rows(20_000, seed=1)
    assert leak_auc(feature, positive) > 0.8
    found = adjusted_auc.adjusted_leak_auc(feature, positive, predictions)
    assert found.value < 0.51
    assert found.low <= 0.5
    coarse = adjusted_auc.adjusted_leak_auc(
        feature, positive, np.round(predictions, 1).clip(0.05, 0.95)
    )
    assert coarse.low > 0.5


def test_a_score_that_knows_labels_reveals_all_of_them() -> None:
    _, positive, predictions = rows(2_000, seed=2)
    found = adjusted_auc.adjusted_leak_auc(predictions - positive, positive, predictions)
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.97 < found.low < 1.0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """At least 180 of 200 intervals of 95 %; those of half the width do not."""
    truth = norm.cdf(0.5 / math.sqrt(2))
    covered = narrow = 0
    for seed in range(200):
        feature, positive, predictions = rows(2_000, seed)
        scores = feature + 0.5 * positive + noise(2_000, seed)
        found = adjusted_auc.adjusted_leak_auc(scores, positive, predictions)
        value, (low, high) = found.value, at_95_percent(found)
        covered += low <= truth <= high
        narrow += (low + value) / 2 <= truth <= (high + value) / 2
    assert covered >= 180
    assert narrow < 180


def test_a_row_weighs_as_much_as_features_leave_its_label_open() -> None:
    """By an oracle that goes through all pairs of a stratum."""
    generator = np.random.default_rng(5)
    scores, positive = generator.integers(0, 5, 150).astype(float), generator.random(150) < 0.4
    predictions = generator.uniform(0.05, 0.95, 150)
    strata = adjusted_auc.strata_of(predictions, positive, max_strata=2)
    assert strata.max() == 1
    expected = shares = 0.0
    for stratum in (0, 1):
        rows_of = strata == stratum
        higher = total = 0.0
        for i in np.flatnonzero(positive & rows_of):
            for j in np.flatnonzero(~positive & rows_of):
                weight = (1 - predictions[i]) * predictions[j]
                higher += weight * ((scores[j] < scores[i]) + 0.5 * (scores[j] == scores[i]))
                total += weight
        share = (predictions * (1 - predictions))[rows_of].sum()
        expected, shares = expected + share * higher / total, shares + share
    found = adjusted_auc.adjusted_leak_auc(scores, positive, predictions, max_strata=2).value
    assert found == pytest.approx(max(expected / shares, 1 - expected / shares))


def test_predictions_that_are_fitted_leave_nothing_of_features_and_all_of_a_leak() -> None:
    """Of 72 intervals of 95 %, fewer than 64 cover the truth with a probability of 1 %.

    Strata of the same predictions, with the scores as they are, cover three quarters at most.
    """
    covered = by_strata = 0
    leaks = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        features = generator.normal(size=(800, 4))
        log_odds = 2 * features[:, 0] + np.abs(features[:, 1])
        truth = expit(log_odds)
        labels = (generator.random(800) < truth).astype(np.int64)
        noise = generator.normal(size=(3, 800))
        hidden = labels + 2 * features[:, 2] + noise[0] / (math.sqrt(2) * norm.ppf(0.75))
        epochs = sum(expit(log_odds * part / 3 + one) for part, one in enumerate(noise))
        scores: dict[str, tuple[float, Floats]] = {
            "probability": (0.5, truth),
            "function": (0.5, np.sin(features[:, 3]) + features[:, 0] * features[:, 2]),
            "epochs": (0.5, np.asarray(epochs)),
            "three of five right": (0.6, (labels ^ (generator.random(800) > 0.6)).astype(float)),
            "hidden": (0.75, hidden),
            "label": (1.0, labels.astype(float)),
        }
        found = beyond(features, labels, {name: values for name, (_, values) in scores.items()})
        assert found.rows == 800
        assert found.feature_auc == pytest.approx(roc_auc_score(labels, truth), abs=0.05)
        models = FeatureModels.of(features, labels)
        predictions = models.predictions(labels).probabilities[:, 1]
        for name, (expected, values) in scores.items():
            low, high = at_95_percent(found.adjusted[name])
            covered += low <= expected <= high
            by_strata_only = adjusted_auc.adjusted_leak_auc(values, labels == 1, predictions)
            low, high = at_95_percent(by_strata_only)
            by_strata += low <= expected <= high
        leaks.append(
            [
                (found.adjusted[name].value, at_95_percent(found.adjusted[name])[0])
                for name in ("three of five right", "hidden")
            ]
        )
    assert covered >= 64
    assert by_strata < 54
    values = np.array(leaks)
    assert values[:, :, 0].mean(axis=0) == pytest.approx([0.6, 0.75], abs=0.02)
    assert (values[:, 0, 1] > 0.5).sum() >= 8  # power: the weak leak is seen
    assert (values[:, 1, 1] > 0.6).all()


def test_few_rows_that_features_leave_open_make_a_wide_interval() -> None:
    """Where features decide nearly every label, 400 rows are no better than 20 open ones."""
    feature, _, _ = rows(400, seed=12)
    predictions = 1 / (1 + np.exp(-25 * feature))
    positive = np.random.default_rng(12).random(400) < predictions
    found = adjusted_auc.adjusted_leak_auc(noise(400, seed=12), positive, predictions)
    assert found.high - found.low > 0.25
    assert found.low < 0.5 < found.high


def test_the_rest_of_a_function_of_features_is_not_magnified() -> None:
    scores = noise(2_000, seed=13)
    assert (adjusted_auc.rest_of(np.ones(9), np.ones(9)) == 0).all()
    assert adjusted_auc.rest_of(scores, 0.99 * scores).std() == pytest.approx(
        adjusted_auc.RESOLUTION, rel=0.05
    )
    assert (adjusted_auc.rest_of(scores, 0.5 * scores) == 0.5 * scores).all()


@pytest.mark.parametrize("offset", [-1.0, -6.0, 4.0])
def test_few_rows_whose_labels_are_open_make_few_strata(offset: float) -> None:
    _, positive, predictions = rows(10_000, seed=7, offset=offset)
    strata = adjusted_auc.strata_of(predictions, positive)
    left_open = predictions * (1 - predictions)
    assert 0 < strata.max() < min(100, left_open.sum() / adjusted_auc.MIN_PER_STRATUM)
    assert (np.diff(strata[np.argsort(predictions)]) >= 0).all()
    for number in range(strata.max() + 1):
        of_stratum = positive[strata == number]
        assert min(of_stratum.sum(), (~of_stratum).sum()) >= 2
    assert np.bincount(strata, left_open).min() > 0.9 * adjusted_auc.MIN_PER_STRATUM


def test_predictions_without_information_make_one_stratum() -> None:
    _, positive, predictions = rows(500, seed=8)
    assert set(adjusted_auc.strata_of(np.full(500, 0.3), positive)) == {0}
    found = adjusted_auc.adjusted_leak_auc(predictions, positive, np.full(500, 0.3))
    assert found.value == pytest.approx(roc_auc_score(positive, predictions))


def test_one_positive_has_no_adjusted_leak() -> None:
    with pytest.raises(OneClass, match="expected two rows of each class, got 1 of one"):
        adjusted_auc.adjusted_leak_auc(np.arange(9.0), np.arange(9) == 4, np.full(9, 0.5))


@pytest.mark.parametrize("bad", [np.array([0.0, np.nan]), np.zeros(3)])
def test_scores_without_an_order_are_refused(bad: Floats) -> None:
    with pytest.raises(ValueError, match="expected one score per label, none of them NaN"):
        adjusted_auc.placements(bad, np.array([True, False]))


def test_the_advantage_is_the_difference_of_the_leak_aucs() -> None:
    feature, positive, _ = rows(3_000, seed=10)
    scores = feature + positive + noise(3_000, seed=10)
    found = adjusted_auc.advantage_over(feature, scores, positive)
    own = roc_auc_score(positive, feature)
    assert found.prior == pytest.approx(own)
    assert found.value == pytest.approx(roc_auc_score(positive, scores) - own)
    assert adjusted_auc.advantage_over(feature, -scores, positive) == pytest.approx(found)
    nothing = adjusted_auc.advantage_over(np.zeros(3_000), scores, positive)
    assert nothing.prior == pytest.approx(0.5)


def test_the_advantage_of_repeating_features_is_nothing() -> None:
    """The interval of a difference covers 0 in 95 % of the draws, and not one that ignores pairing.

    Scores of the same rows vary together: an interval for independent ones covers all of them.
    """
    covered = unpaired = 0
    for seed in range(200):
        feature, positive, _ = rows(1_000, seed)
        own, attack = (feature + 0.5 * noise(1_000, seed + shift) for shift in (0, 5_000))
        found = adjusted_auc.advantage_over(own, attack, positive)
        covered += found.low <= 0 <= found.high
        apart = [adjusted_auc.placements(scores, positive) for scores in (own, attack)]
        variance = sum(part.var(ddof=1) / len(part) for one in apart for part in one[:2])
        unpaired += abs(found.value) <= 1.96 * variance**0.5
    assert 180 <= covered < 200
    assert unpaired == 200


def test_the_rates_are_those_of_the_roc_curve() -> None:
    feature, positive, _ = rows(5_000, seed=11)
    scores = feature + positive
    accused, found_rates, _ = roc_curve(positive, scores, drop_intermediate=False)
    found = adjusted_auc.operating_points(scores, positive)
    assert found[0] == pytest.approx(found_rates[accused <= 0.001].max())
    assert found[1] == pytest.approx(found_rates[accused <= 0.01].max())
    assert found[2] == positive[np.argsort(scores)[-100:]].mean()
    assert adjusted_auc.operating_points(-scores, positive) == found


def test_ties_are_not_counted_as_found() -> None:
    scores, positive = np.repeat([0.0, 1.0], 500), np.tile([True, False], 500)
    assert adjusted_auc.operating_points(scores, positive) == (0.0, 0.0, 0.5)
    assert adjusted_auc.operating_points(scores[:100], positive[:100])[2] is None


def test_a_peer_that_sends_back_what_it_received_hides_no_leak_but_leaves_nothing_to_measure() -> (
    None
):
    generator = np.random.default_rng(0)
    features = generator.normal(size=(1_000, 4))
    truth = 1 / (1 + np.exp(-features[:, 0]))
    labels = (generator.random(1_000) < truth).astype(int)
    gradients = np.outer(truth - labels, generator.normal(size=8))
    gradients += generator.normal(size=(1_000, 8)) * 0.1
    for sent, is_measured in ((features, True), (np.column_stack([features, gradients]), False)):
        found = audit(gradients, labels, batches=100, covariates=sent, attacks=["cosine"]).beyond
        assert found is not None
        leak = found.adjusted["cosine"]
        assert (leak.high - leak.low <= WIDEST and leak.low > 0.9) is is_measured

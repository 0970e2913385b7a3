"""Scores that are fitted to noisy labels, or to noisy sums of labels."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge as ReferenceRidge

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import InvalidMessage, SettingsError
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.dense import ComponentsNetwork
from splitveil.common.models.ridge import Ridge, statistics_of_labels, statistics_of_sums
from splitveil.common.models.settings import PcaModel, ScoreModel

ROWS, CODES = 2_000, 60
DRAWN = np.random.default_rng(1)
X = DRAWN.normal(size=(ROWS, CODES))
SIGNAL = (X[:, 0] + 0.5 * X[:, 1]) / 5**0.5


def fitted(targets: NDArray[np.float64], codes: NDArray[np.int64] | None = None) -> Ridge:
    joined = np.column_stack([np.ones(ROWS), X, targets])
    return Ridge(statistics_of_labels(joined.T @ joined, CODES), codes)


def scores(ridge: Ridge) -> NDArray[np.float64]:
    weight, bias = ridge.function()
    found: NDArray[np.float64] = (X @ weight + bias)[:, 0]
    return found


def test_a_score_keeps_near_what_the_best_strength_reaches_whatever_the_noise() -> None:
    """A strength by cross-validation is sometimes so small that the score is mostly noise."""
    lost = []
    for seed in range(20):
        noisy = SIGNAL + 2.8 * np.random.default_rng(seed).normal(size=ROWS)
        found = scores(fitted(noisy))
        assert abs(found.mean()) < 1e-9
        assert abs(found.std() - 1) < 1e-6
        references = (
            ReferenceRidge(alpha=alpha).fit(X, noisy).predict(X)
            for alpha in ROWS * np.logspace(-3, 2, 16)
        )
        best = max(np.corrcoef(one, SIGNAL)[0, 1] for one in references)
        lost.append(best - np.corrcoef(found, SIGNAL)[0, 1])
    assert max(lost) < 0.05


def test_columns_that_tell_more_of_noisy_labels_have_more_evidence() -> None:
    noisy = SIGNAL + 2.8 * np.random.default_rng(0).normal(size=ROWS)
    evidence = [fitted(noisy, np.array([2 * pair, 2 * pair + 1])).evidence for pair in range(10)]
    assert np.argmax(evidence) == 0
    assert max(evidence[1:]) < evidence[0] / 2


def test_a_constant_code_counts_for_nothing() -> None:
    joined = np.column_stack([np.ones((ROWS, 2)), X[:, 0], SIGNAL])
    weight, _ = Ridge(statistics_of_labels(joined.T @ joined, 2)).function()
    assert abs(weight[0]) < 1e-9
    assert weight[1] > 0.5


# ---- sums ---------------------------------------------------------------------------------------

COLUMNS = tuple(f"x{number}" for number in range(6))
OF_COLUMNS = DRAWN.uniform(0, 8, size=(ROWS, 6)).astype(np.float32)
PLACES = Features(OF_COLUMNS)
PROBABLE = 1 / (1 + np.exp(-(OF_COLUMNS[:, 0] - OF_COLUMNS[:, 1])))
LABELS = (DRAWN.random(ROWS) < PROBABLE).astype(np.float64)
NOISE_RATIO = 2.8


def ready(max_column_share: float | None = None) -> tuple[ComponentsBottom, NDArray[np.float64]]:
    shapes = FeatureShapes(numeric_dim=6, bins=(8,) * 6)
    settings = ScoreModel(kind="score", max_column_share=max_column_share)
    model = ComponentsBottom(settings, shapes, (1,))
    return model, model.before_labels(lambda: iter([PLACES]))


def sums_of(model: ComponentsBottom, values: NDArray[np.float64]) -> NDArray[np.float64]:
    bits = np.column_stack([model.bits(PLACES), np.ones(ROWS)])
    found: NDArray[np.float64] = bits.T @ values[:, None]
    return found


def fitted_to_sums(sums: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    model, moments = ready()
    halves = [PLACES.rows(slice(ROWS // 2)), PLACES.rows(slice(ROWS // 2, ROWS))]
    model.fit_sums(lambda: iter(halves), sums, sigma, moments, COLUMNS)
    return model(PLACES)[:, 0].astype(np.float64)


def test_a_score_from_sums_is_the_mean_of_the_weights_that_its_noise_leaves_open() -> None:
    """Against the same written out with covariances of sums, and densities of SciPy."""
    sigma, codes = 30.0, X[:, :8]
    bits = (X[:, :12] > 0).astype(float)
    labels = (SIGNAL > 0.8).astype(float)
    ones = np.column_stack([bits, np.ones(ROWS)])
    released = ones.T @ labels + np.random.default_rng(3).normal(scale=sigma, size=13)
    joined = np.column_stack([np.ones(ROWS), codes, bits])
    statistics = statistics_of_sums(joined.T @ joined, 8, released[:, None], sigma)
    weight = Ridge(statistics).function()[0][:, 0]

    p = released[-1] / ROWS
    deviation = math.sqrt(p * (1 - p))
    # What is seen is what the labels' noise and that of the mechanism make of the weights.
    less_mean = np.column_stack([np.eye(12), -bits.mean(0)])
    seen = less_mean @ released / deviation
    design = (bits - bits.mean(0)).T @ (codes - codes.mean(0)) / codes.std(0)
    noise = np.cov(bits.T, bias=True) * ROWS + less_mean @ less_mean.T * (sigma / deviation) ** 2
    variances = 1 / ROWS / np.logspace(-5, 2, 43)
    densities = [
        multivariate_normal.logpdf(seen, np.zeros(12), variance * design @ design.T + noise)
        for variance in variances
    ]
    variance = variances[np.argmax(densities)] / 2
    solved = np.linalg.solve(variance * design @ design.T + noise, seen)
    expected = variance * design.T @ solved / codes.std(0)
    expected /= ((codes - codes.mean(0)) @ expected).std()
    assert np.allclose(weight, expected, atol=1e-6)


def test_sums_without_noise_give_back_what_is_linear_in_the_codes() -> None:
    """Of two targets, each has a score of its own; the number beside them is a component."""
    settings, shapes = ScoreModel(kind="score"), FeatureShapes(numeric_dim=6, bins=(8,) * 6)
    model = ComponentsBottom(settings, shapes, (3,))
    moments = model.before_labels(lambda: iter([PLACES]))
    weights = np.column_stack([np.arange(6), np.arange(6)[::-1] ** 2]) / 400
    values = OF_COLUMNS.astype(np.float64) @ weights
    sums = np.column_stack([sums_of(model, of_one) for of_one in values.T])
    model.fit_sums(lambda: iter([PLACES]), sums, 0.0, moments, COLUMNS)
    found = model(PLACES)
    for target in range(2):
        assert np.corrcoef(found[:, target], values[:, target])[0, 1] > 0.999
    component = ComponentsBottom(PcaModel(kind="pca"), shapes, (1,))
    component.fit(lambda: iter([PLACES]), is_final=True)
    assert np.allclose(found[:, 2], component(PLACES)[:, 0], atol=1e-5)


def test_a_table_of_few_rows_has_fewer_bits_because_each_adds_to_the_noise() -> None:
    model, _ = ready()
    many = model.num_bits
    model.before_labels(lambda: iter([PLACES.rows(slice(300))]))
    assert 0 < model.num_bits < many <= 6 * 8


def test_sums_lose_less_than_labels_that_are_noised_for_the_same_bound() -> None:
    """A bound holds for a row of any bits: the noise is that of the longest, all ones."""
    model, moments = ready()
    sums, sigma = sums_of(model, LABELS), NOISE_RATIO * math.sqrt(model.num_bits + 1)
    by_sums: list[float] = []
    by_labels: list[float] = []
    for seed in range(5):
        drawn = np.random.default_rng(seed)
        noisy = LABELS[:, None] + NOISE_RATIO * drawn.normal(size=(ROWS, 1))
        model.fit_score(PLACES, noisy.astype(np.float32), moments, COLUMNS)
        of_labels = model(PLACES)[:, 0]
        of_sums = fitted_to_sums(sums + sigma * drawn.normal(size=sums.shape), sigma)
        for found, score in ((by_sums, of_sums), (by_labels, of_labels)):
            found.append(np.corrcoef(score, PROBABLE)[0, 1])
    assert np.mean(by_sums) > 0.9
    assert np.mean(by_sums) > np.mean(by_labels) + 0.05


@pytest.mark.parametrize("sigma", [1e154, 1e160])
def test_noise_that_no_number_holds_is_refused(sigma: float) -> None:
    model, _ = ready()
    with pytest.raises(InvalidMessage, match=r"sums with noise of deviation 1e\+1"):
        fitted_to_sums(sums_of(model, LABELS), sigma)


@pytest.mark.parametrize("scale", [1e160, 1e-20, 0])
def test_sums_that_give_no_score_are_refused(scale: float) -> None:
    model, _ = ready()
    with pytest.raises(InvalidMessage, match="to which no score can be fitted"):
        fitted_to_sums(scale * sums_of(model, LABELS), 10.0)


@pytest.mark.parametrize("wrong", ["one sum too few", "not a number", "infinite noise"])
def test_sums_that_cannot_be_are_refused(wrong: str) -> None:
    model, _ = ready()
    sums, sigma = sums_of(model, LABELS), 1.0
    match wrong:
        case "one sum too few":
            sums = sums[1:]
        case "not a number":
            sums[3] = math.nan
        case _:
            sigma = math.inf
    with pytest.raises(InvalidMessage, match="sums: expected finite ones over"):
        fitted_to_sums(sums, sigma)


def test_labels_that_are_a_column_in_disguise_are_refused_by_its_owner() -> None:
    """An honest score of two columns has .5 of each; one that is a guess of a column nearly all."""
    model, moments = ready(max_column_share=0.7)
    sums, sigma = sums_of(model, LABELS), 10.0
    model.fit_sums(lambda: iter([PLACES]), sums, sigma, moments, COLUMNS)
    honest = model.weight.copy()
    column = (OF_COLUMNS[:, 4] > 4).astype(np.float64)
    with pytest.raises(SettingsError, match=r"max_column_share: 0.7; column x4 alone explains 0.9"):
        model.fit_sums(lambda: iter([PLACES]), sums_of(model, column), sigma, moments, COLUMNS)
    assert np.array_equal(model.weight, honest)
    noisy = column[:, None] + DRAWN.normal(size=(ROWS, 1))
    with pytest.raises(SettingsError, match="column x4 alone explains"):
        model.fit_score(PLACES, noisy.astype(np.float32), moments, COLUMNS)
    # The share is that of the score's own variance, however little it was fitted to.
    with pytest.raises(InvalidMessage, match="to which no score can be fitted"):
        model.fit_score(PLACES, (1e-32 * noisy).astype(np.float32), moments, COLUMNS)
    with pytest.raises(InvalidMessage, match="to which no score can be fitted"):
        model.fit_sums(
            lambda: iter([PLACES]), sums_of(model, column) / 1e20, sigma, moments, COLUMNS
        )
    assert np.array_equal(model.weight, honest)


def test_a_column_s_share_is_the_same_of_a_score_of_any_scale() -> None:
    joined = np.column_stack([np.ones(ROWS), X, SIGNAL])
    statistics = statistics_of_labels(joined.T @ joined, CODES)
    weight = np.zeros((CODES, 1))
    weight[:2, 0] = [1.0, 0.5]
    first = statistics.share(weight, np.array([0]))
    assert first == pytest.approx(0.8, abs=0.02)
    assert statistics.share(1e-20 * weight, np.array([0])) == pytest.approx(first)


# ---- activations --------------------------------------------------------------------------------

ALL_PARTS = FeatureShapes(
    numeric_dim=4,
    vocabulary_sizes=(5, 3),
    image_shape=(2, 3, 3),
    bins=(8, 4),
    num_tokens=(6, 4),
    max_lengths=(3, 2),
)


def rows_of_all_parts(count: int = 300) -> Features:
    """Return numbers, of which one in the last row is extreme, categories, images and sequences."""
    drawn = np.random.default_rng(11)
    numeric = np.column_stack([drawn.uniform(-1, 9, (count, 2)), drawn.normal(size=(count, 2))])
    numeric[-1, 2] = 1e3
    lengths = drawn.integers(0, [4, 3], (count, 2))
    is_there = np.concatenate([np.arange(w) < lengths[:, [at]] for at, w in enumerate((3, 2))], 1)
    return Features(
        numeric.astype(np.float32),
        drawn.integers(0, [5, 3], (count, 2)),
        drawn.integers(0, 256, (count, 2, 3, 3), dtype=np.uint8),
        drawn.integers(0, [6, 6, 6, 4, 4], (count, 5)) * is_there,
        lengths,
    )


def test_a_network_with_its_weights_computes_the_same_as_do_codes_written_out() -> None:
    features, usual = rows_of_all_parts(), rows_of_all_parts().rows(slice(299))
    model = ComponentsBottom(PcaModel(kind="pca"), ALL_PARTS, (2, 3))
    model.fit(lambda: iter([usual]), is_final=True)
    network = ComponentsNetwork(ALL_PARTS, (2, 3))
    model.put_into(network)
    found = model(features)
    with torch.no_grad():
        np.testing.assert_allclose(network(features.to("cpu")).numpy(), found, atol=1e-5)
    linear = model.codes(features) @ model.weight + model.bias
    is_clipped = np.abs(linear) > model.limit
    assert is_clipped[-1].all()
    assert not is_clipped[:-1].any()
    expected = linear.clip(-model.limit, model.limit).reshape(-1, 2, 3)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(found[:-1].mean(0)).max() < 1e-5  # the bias takes off the mean
    assert np.ptp(model.codes(features), axis=0).min() > 0  # each code is in some row


@pytest.mark.parametrize("width", [1, 4, 16])
def test_a_row_s_bits_depend_on_no_other_row(width: int) -> None:
    """A product by BLAS may add up in another order for another number of rows."""
    features = rows_of_all_parts()
    model = ComponentsBottom(PcaModel(kind="pca"), ALL_PARTS, (width,))
    model.fit(lambda: iter([features]), is_final=True)
    whole = model(features)
    for part in (slice(0, 1), slice(1, 4), slice(5, 70)):
        assert np.array_equal(model(features.rows(part)), whole[part])

"""The best AUC against each mechanism of noisy labels: exact, and none above its neighbours."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from splitveil.active_party.defenses.dp_bounds import (
    auc_of_epsilon,
    gaussian_auc,
    laplace_auc,
    response_auc,
    strength_for_auc,
)
from splitveil.active_party.defenses.sum_kl import leak_auc_bound

SAMPLES = 400_000


def measured(of_positives: npt.NDArray[np.float64], of_negatives: npt.NDArray[np.float64]) -> float:
    """AUC of log likelihood ratios; ratios that are equal but for rounding count as ties."""
    scores = np.concatenate((of_positives, of_negatives)).round(9)
    return float(roc_auc_score([1] * len(of_positives) + [0] * len(of_negatives), scores))


def laplace_ratio(label: int, epsilon: float, numbers: int) -> npt.NDArray[np.float64]:
    """Log likelihood ratios of noisy numbers, all of which move with the label."""
    generator = np.random.default_rng(7 + label)
    each = epsilon / numbers
    noisy = label + generator.laplace(scale=1 / each, size=(SAMPLES, numbers))
    return np.asarray(each * (np.abs(noisy) - np.abs(noisy - 1)).sum(axis=1))


@pytest.mark.parametrize("numbers", [1, 2])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_the_likelihood_ratio_of_laplace_noise_meets_its_auc(epsilon: float, numbers: int) -> None:
    """Within 5 standard errors of .0009; rejects the AUC of an epsilon 10 % larger."""
    found = measured(*(laplace_ratio(label, epsilon, numbers) for label in (1, 0)))
    assert abs(found - laplace_auc(epsilon, numbers)) < 0.0045
    assert abs(found - laplace_auc(1.1 * epsilon, numbers)) > 0.0045


@pytest.mark.parametrize("num_classes", [2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_the_auc_of_randomized_response_counts_every_pair_of_answers(
    epsilon: float, num_classes: int
) -> None:
    """Over all answers about a positive and a negative, in the order of their likelihood ratios."""
    kept = math.exp(epsilon) / (math.exp(epsilon) + num_classes - 1)
    other = (1 - kept) / (num_classes - 1)
    positive = [kept if answer == 1 else other for answer in range(num_classes)]
    negative = [kept if answer == 0 else other for answer in range(num_classes)]
    ratios = [round(math.log(p / n), 9) for p, n in zip(positive, negative, strict=True)]
    expected = sum(
        p * n * ((ratios[i] > ratios[j]) + (ratios[i] == ratios[j]) / 2)
        for i, p in enumerate(positive)
        for j, n in enumerate(negative)
    )
    assert response_auc(epsilon, num_classes) == pytest.approx(expected, rel=1e-12)
    if num_classes == 2:
        assert auc_of_epsilon(epsilon) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 1.0, 3.0, 8.0])
def test_every_mechanism_of_an_epsilon_stays_below_the_bound_of_all(epsilon: float) -> None:
    """The bound by the divergence alone lies above; the spread noise of ALIBI is the weakest."""
    alibi, laplace = laplace_auc(epsilon, 2), laplace_auc(epsilon)
    several = response_auc(epsilon, 5)
    assert 0.5 < several < auc_of_epsilon(epsilon) < 1
    assert 0.5 < alibi < laplace < auc_of_epsilon(epsilon)
    assert alibi < leak_auc_bound(4 * (epsilon / 2 + math.expm1(-epsilon / 2)))
    assert auc_of_epsilon(epsilon) < leak_auc_bound(2 * epsilon * math.tanh(epsilon / 2))


def test_gaussian_noise_has_the_area_of_its_trade_off_curve() -> None:
    """Integrates Dong, Roth and Su's curve, beta(alpha) = Phi(Phi^-1(1 - alpha) - mu)."""
    alpha = np.linspace(0, 1, 200_001)[1:-1]
    beta = stats.norm.cdf(stats.norm.isf(alpha) - 0.7)
    assert gaussian_auc(0.7) == pytest.approx(float(np.mean(1 - beta)), abs=1e-5)


@pytest.mark.parametrize("leak_auc", [0.52, 0.6, 0.8, 0.97])
def test_a_strength_is_found_for_every_auc(leak_auc: float) -> None:
    for auc_of in (gaussian_auc, auc_of_epsilon, laplace_auc, response_auc):
        assert auc_of(strength_for_auc(auc_of, leak_auc)) == pytest.approx(leak_auc, abs=1e-12)

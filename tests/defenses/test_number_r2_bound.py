"""How much of a number's variance a Gaussian mechanism can give away: (exp(mu^2) - 1) / 4 at most.

Let y be the label's share of the range with any distribution, f(y) the density of what is sent if
the label is y, f its mean over y, and y' and z independent of y with the same distribution. No
score explains more than the mean of y given what is sent, which differs from E[y] by the mean over
y and y' of (y - y') (f(y) - f(y')) / 2f. By Cauchy and Schwarz it explains at most half of the mean
of the integral of (f(y) - f(y'))^2 / f, where 1/f is at most the mean of 1/f(z). For a Gaussian
mechanism the integral of f(y) f(y') / f(z) is exp(mu^2 (y - z) (y' - z)), and releases with more
noise can be completed to one. So the bound is the mean over z of the sum over k of mu^(2k)/k! times
the variance of (y - z)^k, which for k of 1 and more lies in an interval of length 1 at most, and so
has a variance of 1/4 at most.

The oracle integrates the posterior mean, which is the score with the largest squared correlation,
over everything that may be sent. Labels are shares of their range, and mu is the distance of the
two ends in standard deviations of the noise.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest

MUS = (0.05, 0.071, 0.2, 0.358, 0.6, 0.9)

ENDS = ((0.0, 1.0), (0.5, 0.5))
DISTRIBUTIONS: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "both ends": ENDS,
    "rarely at the upper end": ((0.0, 1.0), (0.9, 0.1)),
    "almost always in the middle": ((0.0, 0.5, 1.0), (0.05, 0.9, 0.05)),
    "evenly": (np.linspace(0, 1, 41).tolist(), [1 / 41] * 41),
    "close together": ((0.4, 0.6), (0.5, 0.5)),
}


def best_r2(values: Sequence[float], shares: Sequence[float], mu: float) -> float:
    labels, weights = np.array(values), np.array(shares)
    noise_std = 1 / mu
    sent = np.linspace(-9 * noise_std, 1 + 9 * noise_std, 40_001)
    densities = np.exp(-0.5 * ((sent[:, None] - labels) / noise_std) ** 2)
    densities *= weights / (noise_std * math.sqrt(2 * math.pi))
    of_sent = densities.sum(axis=1)
    mean = float(labels @ weights)
    posterior = densities @ labels / of_sent
    explained = np.trapezoid(of_sent * (posterior - mean) ** 2, sent)
    return float(explained / (weights @ (labels - mean) ** 2))


def stated(mu: float) -> float:
    return math.expm1(mu**2) / 4


def test_the_oracle_agrees_with_labels_whose_answer_is_known() -> None:
    """Normal labels have R2 = v / (v + noise variance); a fine grid stands for them."""
    grid = np.linspace(-4, 4, 401)
    weights = np.exp(-(grid**2) / 2)
    weights /= weights.sum()
    values = 0.5 + 0.1 * grid
    variance = float(weights @ (values - 0.5) ** 2)
    found = best_r2(values.tolist(), weights.tolist(), mu=2.0)
    assert found == pytest.approx(variance / (variance + 0.25), rel=1e-3)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("labels", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_no_score_explains_more_than_the_bound(
    labels: tuple[Sequence[float], Sequence[float]], mu: float
) -> None:
    assert best_r2(*labels, mu) <= stated(mu)


@pytest.mark.parametrize("mu", [one for one in MUS if one <= 0.6])
def test_half_the_noise_passes_the_bound(mu: float) -> None:
    assert best_r2(*ENDS, 2 * mu) > stated(mu)


@pytest.mark.parametrize("mu", [one for one in MUS if one <= 0.358])
def test_labels_at_the_two_ends_nearly_meet_the_bound(mu: float) -> None:
    """So a fifth instead of a quarter would be no bound."""
    assert stated(mu) * 4 / 5 < best_r2(*ENDS, mu)


def test_the_documented_figures_are_rounded_up() -> None:
    assert 0.034 < stated(0.3583) <= 0.035
    assert stated(0.0710) <= 0.0013

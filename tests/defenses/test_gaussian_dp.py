"""Conversions of Gaussian differential privacy, against integration."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate, stats

from splitveil.active_party.defenses.dp_bounds import (
    delta_of,
    epsilon_of,
    leak_auc_of_mu,
    mu_of_leak_auc,
)


@pytest.mark.parametrize("mu", [0.05, 0.358, 1.0, 3.0])
def test_the_auc_is_the_probability_that_a_positive_scores_higher(mu: float) -> None:
    """Against the integral over the ROC curve of N(0, 1) and N(mu, 1)."""
    area, _ = integrate.quad(lambda fpr: stats.norm.cdf(stats.norm.ppf(fpr) + mu), 0, 1)
    assert leak_auc_of_mu(mu) == pytest.approx(area, abs=1e-7)
    assert mu_of_leak_auc(leak_auc_of_mu(mu)) == pytest.approx(mu, rel=1e-12)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.358, 0.5), (1.0, 0.0), (1.0, 1.0), (3.0, 2.0)])
def test_delta_is_the_divergence_of_two_normal_distributions(mu: float, epsilon: float) -> None:
    """Against the integral of the positive part of p - exp(epsilon) q."""

    def excess(x: float) -> float:
        return float(stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x))

    start = epsilon / mu + mu / 2  # where the excess turns positive
    area, _ = integrate.quad(excess, start, start + 40, epsabs=1e-13)
    assert delta_of(mu, epsilon) == pytest.approx(area, rel=1e-8)


def test_delta_neither_overflows_nor_loses_its_digits() -> None:
    values = [delta_of(mu, epsilon) for mu in (1e-3, 1.0, 40.0) for epsilon in (0.0, 1.0, 5000.0)]
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)
    tail = stats.norm.sf(20 - 0.5) - math.exp(20 + stats.norm.logsf(20 + 0.5))
    assert delta_of(1.0, 20.0) == pytest.approx(tail, rel=1e-9)
    assert np.all(np.diff([delta_of(mu, 1.0) for mu in np.linspace(0.1, 9, 200)]) > 0)


@pytest.mark.parametrize("mu", [0.01, 0.358, 1.0, 7.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_epsilon_is_the_least_that_keeps_delta(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    assert epsilon == 0 or delta_of(mu, epsilon * (1 - 1e-5)) > delta


def test_no_mu_needs_no_epsilon_and_a_bare_answer_any() -> None:
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(math.inf, 1e-5) == math.inf


@pytest.mark.parametrize(
    ("convert", "arguments"),
    [
        *((mu_of_leak_auc, (auc,)) for auc in (0.4999, 1.0, math.nan)),
        *((epsilon_of, (mu, 0.1)) for mu in (-1.0, math.nan)),
        *((epsilon_of, (1.0, delta)) for delta in (0.0, 1.0)),
    ],
)
def test_what_has_no_meaning_is_refused(
    convert: Callable[..., float], arguments: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="expected"):
        convert(*arguments)

"""The best AUC against each mechanism of noisy labels: exact, and none above its neighbours."""

import math

import pytest

from splitveil.active_party.defenses.dp_bounds import (
    auc_of_epsilon,
    laplace_auc,
    leak_auc_of_mu,
    response_auc,
    strength_for_auc,
)
from splitveil.active_party.defenses.sum_kl import leak_auc_bound


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 1.0, 3.0, 8.0])
def test_every_mechanism_of_an_epsilon_stays_below_the_bound_of_all(epsilon: float) -> None:
    """The bound by the divergence alone lies above; the spread noise of ALIBI is the weakest."""
    alibi, laplace = laplace_auc(epsilon, 2), laplace_auc(epsilon)
    several = response_auc(epsilon, 5)
    assert 0.5 < several < auc_of_epsilon(epsilon) < 1
    assert 0.5 < alibi < laplace < auc_of_epsilon(epsilon)
    assert alibi < leak_auc_bound(4 * (epsilon / 2 + math.expm1(-epsilon / 2)))
    assert auc_of_epsilon(epsilon) < leak_auc_bound(2 * epsilon * math.tanh(epsilon / 2))


@pytest.mark.parametrize("leak_auc", [0.52, 0.6, 0.8, 0.97])
def test_a_strength_is_found_for_every_auc(leak_auc: float) -> None:
    for auc_of in (leak_auc_of_mu, auc_of_epsilon, laplace_auc, response_auc):
        assert auc_of(strength_for_auc(auc_of, leak_auc)) == pytest.approx(leak_auc, abs=1e-12)

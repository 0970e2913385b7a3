"""Scores that are fitted to noisy labels."""

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge as ReferenceRidge

from splitveil.common.models.components import Ridge, told_by_labels

ROWS, CODES = 2_000, 60
DRAWN = np.random.default_rng(1)
X = DRAWN.normal(size=(ROWS, CODES))
SIGNAL = (X[:, 0] + 0.5 * X[:, 1]) / 5**0.5


def fitted(targets: NDArray[np.float64], codes: NDArray[np.int64] | None = None) -> Ridge:
    joined = torch.from_numpy(np.column_stack([np.ones(ROWS), X, targets]))
    return Ridge(told_by_labels(joined.T @ joined, CODES), codes)


def scores(ridge: Ridge) -> NDArray[np.float64]:
    weight, bias = ridge.function()
    found: NDArray[np.float64] = (torch.from_numpy(X) @ weight + bias).numpy()[:, 0]
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
    joined = torch.from_numpy(np.column_stack([np.ones((ROWS, 2)), X[:, 0], SIGNAL]))
    weight, _ = Ridge(told_by_labels(joined.T @ joined, 2)).function()
    assert abs(weight[0]) < 1e-9
    assert weight[1] > 0.5

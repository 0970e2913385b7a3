"""The interval of a test AUC."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from splitveil.active_party.report.tables import estimate_of
from splitveil.active_party.training.evaluation import StoredPredictions

ROWS = 400


def stored(logits: np.ndarray, labels: np.ndarray) -> StoredPredictions:
    ids = np.array([n.to_bytes(16, "big") for n in range(len(labels))], dtype="V16")
    return StoredPredictions(ids, logits.astype(np.float64), labels.astype(np.int64), b"a")


@pytest.mark.parametrize("digits", [6, 1, 0])
def test_an_auc_and_its_variance_are_those_of_the_pairs(digits: int) -> None:
    generator = np.random.default_rng(1)
    labels = (generator.random(ROWS) < 0.3).astype(np.int64)
    scores = (labels + generator.normal(size=ROWS)).round(digits)  # with few digits there are ties
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
    of_each = [(wins.mean(axis=1 - side).var(ddof=1), wins.shape[side]) for side in (0, 1)]
    half = 1.959964 * math.sqrt(sum(variance / count for variance, count in of_each))
    auc = roc_auc_score(labels, scores)
    found = estimate_of(auc, stored(scores, labels))
    assert found == pytest.approx((auc, auc - half, auc + half))
    assert estimate_of(auc + 0.001, stored(scores, labels)) is None
    assert estimate_of(auc, stored(scores, np.zeros_like(labels))) is None


def test_several_classes_are_the_mean_of_each_against_the_rest() -> None:
    """The interval covers the expectation: that of 300 sets of rows, 95 % of the time."""
    aucs, half = [], 0.0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        labels = generator.integers(0, 3, 200)
        logits = np.eye(3)[labels] + generator.normal(size=(200, 3))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        auc = np.mean([roc_auc_score(labels == k, shares[:, k]) for k in range(3)])
        found = estimate_of(float(auc), stored(logits, labels))
        assert found is not None
        assert found.value == pytest.approx(auc)
        aucs.append(auc)
        half += (found.high - found.low) / 2 / 300
    assert half == pytest.approx(1.96 * np.std(aucs), rel=0.12)
    assert half != pytest.approx(1.96 * np.std(aucs) * 1.2, rel=0.12)

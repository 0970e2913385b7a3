"""The difference of two test AUCs, and its interval."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from splitveil.active_party.report.paired import auc_estimate, auc_terms, compare
from splitveil.active_party.training.evaluation import StoredPredictions

ROWS = 400


def stored(
    logits: np.ndarray, labels: np.ndarray, *, first_id: int = 0, trained: bytes = b"a"
) -> StoredPredictions:
    ids = np.array([(first_id + n).to_bytes(16, "big") for n in range(len(labels))], dtype="V16")
    return StoredPredictions(ids, logits.astype(np.float64), labels.astype(np.int64), trained)


def drawn(seed: int, signal: float = 1.0, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = (generator.random(rows) < 0.3).astype(np.int64)
    return signal * labels + generator.normal(size=rows), labels


def delong_variance(scores: np.ndarray, labels: np.ndarray) -> float:
    """The textbook's formula, pair by pair."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
    of_positives, of_negatives = wins.mean(axis=1), wins.mean(axis=0)
    of_each = (of_positives.var(ddof=1) / len(positive), of_negatives.var(ddof=1) / len(negative))
    return float(sum(of_each))


@pytest.mark.parametrize("digits", [6, 1, 0])
def test_an_auc_and_its_variance_are_those_of_the_pairs(digits: int) -> None:
    scores, labels = drawn(1)
    scores = scores.round(digits)  # with few digits there are ties
    found = auc_terms(scores, labels)
    assert found is not None
    auc, terms = found
    assert auc == pytest.approx(roc_auc_score(labels, scores))
    assert terms @ terms == pytest.approx(delong_variance(scores, labels))


def test_the_variance_of_a_difference_is_that_of_the_paired_components() -> None:
    (scores, labels), (noise, _) = drawn(1), drawn(2)
    others = scores + 0.3 * noise
    found = compare(stored(scores, labels), stored(others, labels))
    assert found.difference is not None
    wins = [(s[labels == 1][:, None] > s[labels == 0]).astype(float) for s in (scores, others)]
    gap = wins[1] - wins[0]
    variance = gap.mean(axis=1).var(ddof=1) / len(gap) + gap.mean(axis=0).var(ddof=1) / gap.shape[1]
    assert found.difference.value == pytest.approx(gap.mean())
    half = (found.difference.high - found.difference.low) / 2
    assert half == pytest.approx(1.959964 * math.sqrt(variance))
    # Unpaired, the interval of the same difference would be wider.
    alone = [auc_estimate(stored(s, labels)) for s in (scores, others)]
    unpaired = math.hypot(*((one.high - one.low) / 2 for one in alone if one is not None))
    assert half < 0.8 * unpaired


def test_the_interval_of_a_difference_covers_its_expectation() -> None:
    """Two models of the same quality on 300 sets of rows: 95 % of the intervals contain 0."""
    inside = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        labels = (generator.random(200) < 0.4).astype(np.int64)
        shared = labels + generator.normal(size=200)
        pair = [shared + 0.5 * generator.normal(size=200) for _ in range(2)]
        found = compare(*(stored(scores, labels) for scores in pair)).difference
        assert found is not None
        inside += found.low <= 0 <= found.high
    assert 273 <= inside <= 297  # 285 expected, standard deviation 3.8


def test_several_classes_are_the_mean_of_each_against_the_rest() -> None:
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 3, ROWS)
    logits = np.eye(3)[labels] + generator.normal(size=(ROWS, 3))
    found = auc_estimate(stored(logits, labels))
    assert found is not None
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    each = [roc_auc_score(labels == k, shares[:, k]) for k in range(3)]
    assert found.value == pytest.approx(np.mean(each))
    assert found.low < found.value < found.high


def test_runs_with_other_test_rows_are_said_to_have_them_and_get_no_interval() -> None:
    scores, labels = drawn(1)
    found = compare(stored(scores, labels), stored(scores, labels, first_id=100))
    assert found.difference is None
    assert f"{ROWS - 100} are common to both" in found.sharing
    same = compare(stored(scores, labels), stored(scores, labels, trained=b"b"))
    assert same.difference is not None
    assert "other training rows" in same.sharing
    missing = compare(stored(scores, labels), None)
    assert missing.difference is None
    assert "not kept" in missing.sharing


def test_a_single_class_has_no_auc() -> None:
    scores, labels = drawn(1)
    assert auc_estimate(stored(scores, np.zeros_like(labels))) is None

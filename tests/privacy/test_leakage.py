"""The leak AUC against scikit-learn and against figures known in advance."""

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from splitveil.active_party.training.label_kinds import average_precision
from splitveil.common.privacy.adjusted_auc import placements
from splitveil.common.privacy.leakage import (
    OneClass,
    areas,
    auc,
    leak_auc,
    leak_auc_interval,
    pair_aucs,
)


def _scores_and_labels(
    seed: int, num_examples: int, pos_fraction: float, decimals: int | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    labels = (generator.random(num_examples) < pos_fraction).astype(np.int64)
    labels[:2] = 0, 1
    scores = generator.normal(size=num_examples) + 0.5 * labels
    return scores if decimals is None else scores.round(decimals), labels


@pytest.mark.parametrize("num_examples", [2, 3, 100, 5000])
def test_many_aucs_at_once_equal_scikit_learns(num_examples: int) -> None:
    """Continuous, tied, constant and infinite scores side by side, each with rows of its own."""
    drawn = [_scores_and_labels(num_examples, num_examples, 0.2, n) for n in (None, 1, 0)]
    labels = drawn[0][1]
    infinite = np.where(drawn[0][0] > 0.3, np.inf, drawn[0][0])
    constant = np.zeros(num_examples)
    scores = np.stack([*(values for values, _ in drawn), infinite, constant])
    chosen = np.random.default_rng(1).random(scores.shape) < 0.7
    chosen[:, :2] = True
    finite = np.nan_to_num(scores, posinf=1e9)
    expected = [roc_auc_score(labels, row) for row in finite]
    of_chosen = [
        roc_auc_score(labels[use], row[use]) for row, use in zip(finite, chosen, strict=True)
    ]
    tensors = torch.from_numpy(scores), torch.from_numpy(labels == 1)
    assert areas(*tensors).numpy() == pytest.approx(expected, abs=1e-12)
    found = areas(*tensors, torch.from_numpy(chosen))
    assert found.numpy() == pytest.approx(of_chosen, abs=1e-12)
    of_one_class = torch.from_numpy(np.broadcast_to(labels == 1, scores.shape).copy())
    assert bool(areas(*tensors, of_one_class).isnan().all())


def _exact_auc(scores: npt.NDArray[np.int64], positive: npt.NDArray[np.bool_]) -> float:
    """Count pairs in Python's integers, which round nothing."""
    most = int(scores.max()) + 1
    positives, negatives = (
        np.bincount(scores[rows], minlength=most).tolist() for rows in (positive, ~positive)
    )
    twice = below = 0
    for own, others in zip(positives, negatives, strict=True):
        twice, below = twice + own * (2 * below + others), below + others
    return float(Fraction(twice, 2 * sum(positives) * below))


@settings(max_examples=25, deadline=None)
@given(
    num_positives=st.integers(1, 40_000),
    num_negatives=st.integers(1, 40_000),
    levels=st.integers(1, 50),
    is_told=st.booleans(),
)
def test_areas_of_many_tied_rows_are_exact(
    num_positives: int, num_negatives: int, levels: int, is_told: bool
) -> None:
    """Above 2^24 pairs, where a float32 no longer holds every integer."""
    positive = np.arange(num_positives + num_negatives) < num_positives
    drawn = np.random.default_rng(num_positives).integers(levels, size=len(positive))
    scores = positive.astype(np.int64) if is_told else drawn
    expected = _exact_auc(scores, positive)
    values, labels = scores.astype(np.float64), torch.from_numpy(positive)
    both = torch.from_numpy(np.stack([values, values]))
    chosen = torch.ones(both.shape, dtype=torch.bool)
    assert auc(values, positive) == expected
    assert areas(both, labels).tolist() == areas(both, labels, chosen).tolist() == [expected] * 2
    pairs = pair_aucs(values, positive.astype(np.int64), 2).pairs
    assert pairs[1, 0] == pytest.approx(expected, abs=1e-15)
    assert placements(values, positive).auc == pytest.approx(expected, abs=1e-12)
    assert 0.0 <= placements(values, positive).auc <= 1.0
    precision = average_precision(torch.from_numpy(values), labels)
    assert precision == pytest.approx(average_precision_score(positive, values), abs=1e-12)
    assert 0.0 <= precision <= 1.0


def test_perfect_scores_of_many_rows_have_an_area_of_one() -> None:
    positive = np.arange(39_333) < 9_000
    interval = leak_auc_interval(positive.astype(np.float64), positive, np.random.default_rng(0))
    assert interval == (1.0, 1.0, 1.0)


def test_neighbouring_numbers_and_both_zeros_keep_their_order() -> None:
    """Scores of two classes that differ in their last bit, in either direction, or not at all."""
    generator = np.random.default_rng(7)
    scores = generator.normal(size=600)
    scores[200:400] = np.nextafter(scores[:200], generator.choice([-np.inf, np.inf], 200))
    scores[400:500], scores[500:] = 0.0, -0.0
    labels = generator.permutation(600) % 3 == 0
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert auc(scores, labels) != auc(scores.astype(np.float32), labels)


def test_aucs_on_a_gpu_are_those_on_the_cpu(gpu: torch.device) -> None:
    scores, labels = map(torch.from_numpy, _scores_and_labels(9, 50_000, 0.2, 1))
    on_gpu = areas(scores[None].to(gpu), labels.to(gpu) == 1)
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_gpu.cpu(), areas(scores[None], labels == 1))


def test_auc_of_half_precision_scores_counts_their_ties() -> None:
    scores, labels = _scores_and_labels(3, 2000, 0.3)
    half = torch.from_numpy(scores).bfloat16()
    expected = roc_auc_score(labels, half.double().numpy())
    assert auc(half, torch.from_numpy(labels)) == pytest.approx(expected, abs=1e-12)
    assert expected != roc_auc_score(labels, scores)


def test_an_inverted_score_is_a_leak() -> None:
    scores, labels = _scores_and_labels(5, 300, 0.2)
    assert auc(-scores, labels) == pytest.approx(1 - auc(scores, labels), abs=1e-15)
    assert leak_auc(-scores, labels) == pytest.approx(leak_auc(scores, labels), abs=1e-15)
    assert leak_auc(np.array([1.0, 0.0]), np.array([0, 1])) == 1.0


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64]
)
def test_label_shape_and_dtype_do_not_matter(dtype: torch.dtype) -> None:
    scores, labels = _scores_and_labels(7, 100, 0.3)
    typed = torch.from_numpy(labels).to(dtype)
    assert leak_auc(scores, typed) == leak_auc(scores, labels)
    assert leak_auc(scores[:, None], typed[:, None]) == leak_auc(scores, labels)
    assert leak_auc(scores, typed.numpy()[:, None]) == leak_auc(scores, labels)


def test_read_only_memory_is_scored_and_left_alone() -> None:
    scores, labels = _scores_and_labels(8, 50, 0.3)
    before = scores.copy()
    scores.flags.writeable = labels.flags.writeable = False
    assert leak_auc(scores, labels) == leak_auc(before, labels)
    assert np.array_equal(scores, before)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_no_auc(label: int) -> None:
    with pytest.raises(OneClass):
        leak_auc(np.arange(4.0), np.full(4, label))


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.0, np.nan], [0, 1], "NaN"),
        ([0.0, 1.0, 2.0], [0, 1, 2], "labels in"),
        ([0.0, 1.0], [0.0, np.nan], "labels in"),
        ([0.0, 1.0], [0, 1, 1], "one label per score"),
        ([[0.0, 1.0]], [0, 1], "scores of shape"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    scores: list[float], labels: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        auc(np.array(scores), np.array(labels))
    assert not isinstance(caught.value, OneClass)

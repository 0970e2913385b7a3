"""The adaptive calibration error: its value by hand, and what it is for labels that fit."""

import numpy as np
import pytest
import torch

from splitveil.active_party.training.predictions import adaptive_calibration_error


def test_the_error_is_that_of_bins_of_equal_size() -> None:
    probabilities = torch.tensor([0.9, 0.1, 0.2, 0.6])
    labels = torch.tensor([1.0, 0.0, 1.0, 1.0])
    # By prediction: (0.1, 0.2) with one positive of two, (0.6, 0.9) with two of two.
    expected = (abs(0.5 - 0.15) + abs(1.0 - 0.75)) / 2
    assert adaptive_calibration_error(probabilities, labels, 2) == pytest.approx(expected)


def test_it_agrees_with_a_calculation_in_numpy() -> None:
    random = np.random.default_rng(3)
    predicted, labels = random.random(1001), random.integers(0, 2, 1001)
    order = np.argsort(predicted, kind="stable")
    bins = zip(np.array_split(predicted[order], 15), np.array_split(labels[order], 15), strict=True)
    expected = np.mean([abs(y.mean() - p.mean()) for p, y in bins])
    found = adaptive_calibration_error(torch.from_numpy(predicted), torch.from_numpy(labels))
    assert found == pytest.approx(expected, abs=1e-12)


def test_calibrated_predictions_have_a_small_error_and_overconfident_ones_a_large_one() -> None:
    random = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(30_000, generator=random)
    labels = (torch.rand(30_000, generator=random) < logits.sigmoid()).float()
    assert adaptive_calibration_error(logits.sigmoid(), labels) < 0.01
    assert adaptive_calibration_error((3 * logits).sigmoid(), labels) > 0.05


def test_fewer_examples_than_bins_have_a_bin_each() -> None:
    found = adaptive_calibration_error(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
    assert found == pytest.approx((0.2 + 0.1) / 2)


def test_examples_without_a_label_each_are_refused() -> None:
    with pytest.raises(ValueError, match="one label for each"):
        adaptive_calibration_error(torch.rand(3), torch.ones(2))
    with pytest.raises(ValueError, match="one label for each"):
        adaptive_calibration_error(torch.empty(0), torch.empty(0))

"""Loss and figures of a softmax against scikit-learn's; of two classes nothing has changed."""

import math
from typing import cast

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score

from splitveil.active_party.training.label_kinds import (
    adaptive_calibration_error,
    cross_entropy_of,
    measure_predictions,
    probabilities_of,
)
from splitveil.common.privacy.leakage import auc


def test_figures_of_several_classes_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (500,), generator=generator)
    logits = torch.randn(500, 4, generator=generator) + torch.eye(4)[labels]
    found = measure_predictions(logits, labels.float())
    probabilities = torch.softmax(logits.double(), dim=1).numpy()
    assert found.loss == pytest.approx(log_loss(labels, probabilities), rel=1e-6)
    macro = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert found.auc == pytest.approx(macro, abs=1e-12)
    precision = average_precision_score(torch.eye(4)[labels], probabilities, average="macro")
    assert found.average_precision == pytest.approx(precision, abs=1e-12)
    assert found.accuracy == accuracy_score(labels, probabilities.argmax(axis=1))
    each = roc_auc_score(labels, probabilities, multi_class="ovr", average=None)
    assert [*found.auc_by_class.values()] == pytest.approx(each, abs=1e-12)
    one = adaptive_calibration_error(torch.from_numpy(probabilities[:, 0]), (labels == 0).double())
    assert found.calibration_error is not None
    assert 0 < found.calibration_error < 0.2
    assert one != pytest.approx(found.calibration_error)  # the mean of four


def test_an_absent_class_is_left_out_of_the_mean() -> None:
    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(60) % 2
    found = measure_predictions(logits, labels.float(), ("a", "b", "absent"))
    aucs = cast("dict[str, float]", found.auc_by_class)
    assert math.isnan(aucs["absent"])
    assert found.auc == pytest.approx((aucs["a"] + aucs["b"]) / 2, abs=1e-15)


def test_of_two_classes_they_are_those_of_a_sigmoid() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(80, generator=generator), (torch.arange(80) % 3 == 0).float()
    logits[10:30] = 0.5  # a tie
    found = measure_predictions(logits, labels)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert found.loss == float(loss)
    assert torch.equal(cross_entropy_of(logits, labels), loss)
    assert found.auc == auc(logits, labels)
    precision = average_precision_score(labels, logits)
    assert found.average_precision == pytest.approx(precision, abs=1e-12)
    without = measure_predictions(logits, torch.zeros(80)).average_precision
    assert without is not None
    assert math.isnan(without)
    assert found.calibration_error == adaptive_calibration_error(logits.sigmoid(), labels)
    assert (found.accuracy, found.auc_by_class, found.rmse) == (None, {}, None)
    assert torch.equal(probabilities_of(logits), logits.sigmoid())


# ---- the adaptive calibration error ----


def test_it_agrees_with_a_calculation_in_numpy() -> None:
    random = np.random.default_rng(3)
    predicted, labels = random.random(1001), random.integers(0, 2, 1001)
    order = np.argsort(predicted, kind="stable")
    bins = zip(np.array_split(predicted[order], 15), np.array_split(labels[order], 15), strict=True)
    expected = np.mean([abs(y.mean() - p.mean()) for p, y in bins])
    found = adaptive_calibration_error(torch.from_numpy(predicted), torch.from_numpy(labels))
    assert found == pytest.approx(expected, abs=1e-12)


def test_fewer_examples_than_bins_have_a_bin_each() -> None:
    found = adaptive_calibration_error(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
    assert found == pytest.approx((0.2 + 0.1) / 2)


def test_examples_without_a_label_each_are_refused() -> None:
    with pytest.raises(ValueError, match="one label for each"):
        adaptive_calibration_error(torch.rand(3), torch.ones(2))
    with pytest.raises(ValueError, match="one label for each"):
        adaptive_calibration_error(torch.empty(0), torch.empty(0))

"""What logits mean: loss, probabilities and figures of a prediction, for two classes or several.

Logits (rows,) are of two classes, for label 1 against 0: a sigmoid. Logits (rows, classes) are of
several: a softmax, and labels are the classes' places. Their AUC is the mean over the classes of
that of the class's probability, the class against the rest; a class without examples, or without
any others, has none and is left out.
"""

import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from splitveil.active_party.training.calibration import adaptive_calibration_error
from splitveil.common.privacy.leakage import auc, has_both_classes


class ClassFigures(NamedTuple):
    """How well several classes are predicted."""

    accuracy: float
    """Share of examples whose class has the highest probability."""

    aucs: tuple[float, ...]
    """Each class against the rest; NaN where there is none."""


class PredictionFigures(NamedTuple):
    """How good predictions are."""

    loss: float
    """Cross entropy, nats per example."""

    auc: float
    calibration_error: float
    """Of several classes the mean over them, each against the rest."""

    classes: ClassFigures | None


def cross_entropy_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over some rows, with its graph.

    Args:
        logits: (rows,) or (rows, classes).
        labels: (rows,), floating point: 0 or 1, noisy ones in between or beyond, or places of
            classes.
    """
    if logits.ndim == 1:
        return binary_cross_entropy_with_logits(logits, labels)
    return cross_entropy(logits, labels.long())


def probabilities_of(logits: Tensor) -> Tensor:
    """Return the predicted probabilities, (rows,) for label 1 or (rows, classes)."""
    return torch.sigmoid(logits) if logits.ndim == 1 else torch.softmax(logits, dim=1)


def measure_predictions(logits: Tensor, labels: Tensor) -> PredictionFigures:
    """Measure the predictions of a whole split.

    Args:
        logits: (rows,) or (rows, classes).
        labels: (rows,); of at least two classes.

    Raises:
        OneClass: the labels are all of one.
    """
    loss = float(cross_entropy_of(logits, labels))
    if logits.ndim == 1:
        error = adaptive_calibration_error(logits.sigmoid(), labels)
        return PredictionFigures(loss, auc(logits, labels), error, None)
    # In float64: a softmax in float32 ties the surest rows.
    probabilities = probabilities_of(logits.double())
    members = [labels == place for place in range(logits.shape[1])]
    aucs = [
        auc(scores, member) if has_both_classes(member) else math.nan
        for scores, member in zip(probabilities.T, members, strict=True)
    ]
    errors = [
        adaptive_calibration_error(scores, member.double())
        for scores, member in zip(probabilities.T, members, strict=True)
    ]
    hits = probabilities.argmax(dim=1) == labels
    return PredictionFigures(
        loss,
        statistics.fmean(area for area in aucs if not math.isnan(area)),
        statistics.fmean(errors),
        ClassFigures(float(hits.double().mean()), tuple(aucs)),
    )

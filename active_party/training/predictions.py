"""Loss, probabilities and figures computed from logits, for two or more classes.

Logits of shape (rows,) belong to two classes and to a sigmoid, for label 1 against 0. Logits of
shape (rows, classes) belong to more classes and to a softmax, and labels are class indices. The AUC
of more than two classes is the mean of the AUCs of each class's probability, the class against the
rest; a class without examples, or without any others, does not have an AUC and is left out.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    log_softmax,
    one_hot,
    softplus,
)

from splitveil.common.privacy.figures import PredictionFigures
from splitveil.common.privacy.leakage import areas

NUM_BINS = 15


class LossWeights(NamedTuple):
    """The weights of rows and classes in a loss; None if all are 1."""

    of_rows: Tensor | None = None
    """(rows,), positive, a mean of 1 over the training rows."""

    of_classes: Tensor | None = None
    """(classes,), positive; of label 0 and label 1 if there are two."""


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
    """Return the cross entropy with weights, summed and divided by the number of rows.

    A row's loss depends on no label or weight of another row: dividing by the sum of the batch's
    weights would let one row's label move all gradients of the batch.
    """
    if weights.of_rows is None and weights.of_classes is None:
        return cross_entropy_of(logits, labels)
    losses = _losses(logits, labels, weights.of_classes)
    return (losses if weights.of_rows is None else weights.of_rows * losses).mean()


def _losses(logits: Tensor, labels: Tensor, of_classes: Tensor | None) -> Tensor:
    if logits.ndim == 1:
        low, high = (1.0, 1.0) if of_classes is None else of_classes
        return high * labels * softplus(-logits) + low * (1 - labels) * softplus(logits)
    shares = one_hot(labels.long(), logits.shape[1]) if labels.ndim == 1 else labels
    if of_classes is not None:
        shares = shares * of_classes
    return -(shares * log_softmax(logits, dim=1)).sum(dim=1)


def cross_entropy_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over some rows, with its graph."""
    if logits.ndim == 1:
        return binary_cross_entropy_with_logits(logits, labels)
    return cross_entropy(logits, labels.long() if labels.ndim == 1 else labels)


def probabilities_of(logits: Tensor) -> Tensor:
    """Return the predicted probabilities, (rows,) for label 1 or (rows, classes)."""
    return torch.sigmoid(logits) if logits.ndim == 1 else torch.softmax(logits, dim=1)


def _mean_of_defined(aucs: Sequence[float]) -> float:
    defined = [area for area in aucs if not math.isnan(area)]
    return statistics.fmean(defined) if defined else math.nan


def measure_predictions(
    logits: Tensor, labels: Tensor, names: Sequence[str] = ()
) -> PredictionFigures:
    """Measure the predictions of a whole split; several classes have names.

    A peer waits for this, and may choose the rows: the operations depend on no label, and an AUC of
    rows of one class is NaN.
    """
    loss = float(cross_entropy_of(logits, labels))
    if logits.ndim == 1:
        error = adaptive_calibration_error(logits.sigmoid(), labels)
        precision = average_precision(logits, labels == 1)
        auc = _auc(logits, labels == 1)
        return PredictionFigures(loss, auc, error, precision)
    # In float64: a softmax in float32 makes ties of the most certain rows.
    probabilities = probabilities_of(logits.double())
    members = [labels == index for index in range(logits.shape[1])]
    aucs = [_auc(*one) for one in zip(probabilities.T, members, strict=True)]
    precisions = [average_precision(*one) for one in zip(probabilities.T, members, strict=True)]
    errors = [
        adaptive_calibration_error(scores, member.double())
        for scores, member in zip(probabilities.T, members, strict=True)
    ]
    hits = probabilities.argmax(dim=1) == labels
    return PredictionFigures(
        loss,
        _mean_of_defined(aucs),
        statistics.fmean(errors),
        _mean_of_defined(precisions),
        float(hits.double().mean()),
        dict(zip(names or map(str, range(len(aucs))), aucs, strict=True)),
    )


def auc_of_classes(logits: Tensor, labels: Tensor) -> float:
    """Return the AUC of `measure_predictions`, which takes a sixth of the time of all figures."""
    if logits.ndim == 1:
        return _auc(logits, labels == 1)
    columns = enumerate(probabilities_of(logits.double()).T)
    return _mean_of_defined([_auc(scores, labels == index) for index, scores in columns])


def _auc(scores: Tensor, positive: Tensor) -> float:
    return float(areas(scores.detach().double()[None], positive)[0])


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the precision-recall curve, as a sum of steps; NaN without a positive.

    AP = sum over thresholds of precision x gain in recall

    as scikit-learn's ``average_precision_score``. An order by chance has the share of positives.
    """
    ordered = -scores.double()
    _, group, counts = torch.unique(ordered, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(counts), dtype=torch.float64, device=scores.device)
    hits = hits.index_add(0, group, positive.double())
    found = hits.cumsum(0)
    return float((hits * found / counts.cumsum(0)).sum() / found[-1])


def adaptive_calibration_error(
    probabilities: Tensor, labels: Tensor, num_bins: int = NUM_BINS
) -> float:
    """Return the adaptive calibration error, between 0 and 1.

    ACE = mean over bins of |share of positives in the bin - mean prediction in the bin|

    with bins of equally many examples, in the order of their predictions (Nixon et al., "Measuring
    Calibration in Deep Learning", 2019): the expected calibration error (ECE) with equal-mass bins
    (Roelofs et al., AISTATS 2022). With two classes, both classes give the same error, so that one
    is enough. Random labels at the predicted rates do not reach 0: a bin of n examples is off by
    about 0.8 sqrt(p (1 - p) / n) by chance.

    Shapes: ``probabilities`` (examples,), ``labels`` (examples,).
    """
    if probabilities.ndim != 1 or probabilities.shape != labels.shape or not len(labels):
        raise ValueError(
            f"expected one label for each of some probabilities, got {tuple(probabilities.shape)} "
            f"and {tuple(labels.shape)}"
        )
    ordered, order = probabilities.double().sort(stable=True)
    gaps = labels.to(ordered).index_select(0, order) - ordered
    bins = gaps.tensor_split(min(num_bins, len(gaps)))
    return float(torch.stack([one.mean().abs() for one in bins]).mean())

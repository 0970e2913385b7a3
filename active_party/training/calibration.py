"""Calibration of predicted probabilities: the adaptive calibration error.

    ACE = mean over bins of |share of positives in the bin - mean prediction in the bin|

with bins of equally many examples, in the order of their predictions (Nixon et al., "Measuring
Calibration in Deep Learning", 2019). With two classes, both classes give the same error, so that
one is enough. Random labels at the predicted rates do not reach 0: a bin of n examples is off by
about 0.8 sqrt(p (1 - p) / n) by chance.
"""

import torch
from torch import Tensor

NUM_BINS = 15


def adaptive_calibration_error(
    probabilities: Tensor, labels: Tensor, num_bins: int = NUM_BINS
) -> float:
    """Return the adaptive calibration error, between 0 and 1.

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

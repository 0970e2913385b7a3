"""How much a score tells about the labels: the leak AUC.

The AUC is the chance that a random positive scores above a random negative, a tie counting one
half. An attacker may turn a score around, so its leak is ``max(auc, 1 - auc)``.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values: TypeAlias = Tensor | npt.NDArray[Any]


class OneClass(ValueError):
    """The labels hold one class only, for which there is no AUC."""


def auc(scores: Values, labels: Values) -> float:
    """Return the area under the ROC curve, ties counted as one half.

    Computed on the device of ``scores``, in float64.

    Args:
        scores: one number per example, (batch,) or (batch, 1); infinities are allowed.
        labels: 0 or 1 per example in any dtype, (batch,) or (batch, 1).

    Raises:
        OneClass: there is no positive, or no negative.
        ValueError: the shapes differ, a score is NaN, or a label is neither 0 nor 1.
    """
    values = _one_per_example(scores, "scores").double()
    classes = _one_per_example(labels, "labels").to(values.device)
    if len(values) != len(classes):
        raise ValueError(f"expected one label per score, got {len(classes)} for {len(values)}")
    if bool(values.isnan().any()):
        raise ValueError("expected scores without NaN")
    positives, negatives = values[classes == 1], values[classes == 0]
    if len(positives) + len(negatives) != len(values):
        raise ValueError("expected labels in {0, 1}")
    if not len(positives) or not len(negatives):
        raise OneClass(f"{len(positives)} positives and {len(negatives)} negatives have no AUC")
    ranked = negatives.sort().values
    # Negatives below a positive count twice here, its ties once: the average rank, in integers.
    below = torch.searchsorted(ranked, positives, right=False)
    below_or_tied = torch.searchsorted(ranked, positives, right=True)
    return int((below + below_or_tied).sum()) / (2 * len(positives) * len(negatives))


def leak_auc(scores: Values, labels: Values) -> float:
    """Return ``max(auc, 1 - auc)``: an inverted score is a leak too.

    Raises:
        OneClass: there is no positive, or no negative.
        ValueError: as for `auc`.
    """
    area = auc(scores, labels)
    return max(area, 1.0 - area)


def _one_per_example(values: Values, name: str) -> Tensor:
    # The copy keeps torch from complaining about read-only memory.
    tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(np.array(values))
    if tensor.ndim not in (1, 2) or tensor[0:1].numel() > 1:
        raise ValueError(
            f"expected {name} of shape (batch,) or (batch, 1), got {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1)

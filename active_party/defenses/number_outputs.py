"""What an output of the top model says of a label that is a number.

Labels are shares of their range, within 0 and 1 (`splitveil.common.data.label_range`). The output
is measured from the middle of the range, so that a model whose output is 0 says as little as one of
two classes whose logit is 0. Training uses it as it is; a prediction is cut off at the bounds,
which only brings it closer to the label.
"""

from torch import Tensor

MIDDLE = 0.5


def residuals_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return output less label, as a share of the range, (rows,).

    Args:
        outputs: of the top model, (rows,).
        labels: shares of the range, or noisy ones beyond it, (rows,).
    """
    return outputs + (MIDDLE - labels)


def shares_of(outputs: Tensor) -> Tensor:
    """Return the predictions as shares of the range, (rows,), within 0 and 1."""
    return (outputs + MIDDLE).clamp(0.0, 1.0)

"""The interface of an objective: the loss that the top model is trained for.

An objective computes the gradient at the cut layer and lets the top model learn. It knows neither
the protocol nor the noise that a defense adds to its gradient.

Labels that are numbers are shares of their range, within 0 and 1 (`common.data.label_range`). Then
an output of the top model is measured from the middle of the range, so that a model whose output is
0 says as little as one of two classes whose logit is 0. Training uses it as it is; a prediction is
cut off at the bounds, which only brings it closer to the label.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitveil.active_party.defenses.interface import Step
from splitveil.common.run.progress import State

_MIDDLE = 0.5

Schedule = Callable[[int], float]  # maps a step to the multiplier of the learning rate


class TopModel(NamedTuple):
    """A top model and the means of its optimisation."""

    model: nn.Module  # maps (activation, own features or None) to logits
    optimizer: Optimizer
    schedule: Schedule


class Objective(Protocol):
    """A top model and the way it learns."""

    model: nn.Module
    """The model that makes the predictions. Maps (activation, own features or None) to logits,
    (batch,), or (batch, classes) with several classes."""

    def compute(self, step: Step, /) -> None:
        """Fill in gradient, probabilities, loss, and what else follows from it.

        The activation requires a gradient; the loss compares with ``targets``.
        """
        ...

    def learn(self, step: Step, /) -> None:
        """Do the rest of the step once the answer has been sent."""
        ...

    def state_dict(self) -> State:
        """Return everything that a step changes."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Return to the step at which ``state_dict`` was taken."""
        ...


def descend(loss: Tensor, parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Take one optimiser step on the loss; nothing else in its graph keeps a gradient."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def residuals_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return output less label, which may be a noisy one, as a share of the range, (rows,)."""
    return outputs + (_MIDDLE - labels)


def shares_of(outputs: Tensor) -> Tensor:
    """Return the predictions as shares of the range, (rows,), within 0 and 1."""
    return (outputs + _MIDDLE).clamp(0.0, 1.0)

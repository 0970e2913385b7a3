"""The interface of an objective: the loss that the top model is trained for.

An objective computes the gradient at the cut layer and lets the top model learn. It knows neither
the protocol nor the noise that a defense adds to its gradient.

Labels that are numbers are shares of their range, within 0 and 1 (`common.data.label_range`). Then
an output of the top model is measured from the middle of the range, so that a model whose output is
0 says as little as one of two classes whose logit is 0. Training uses it as it is; a prediction is
cut off at the bounds, which only brings it closer to the label.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitveil.active_party.defenses.interface import LabelledRows
from splitveil.common.data.features import Features
from splitveil.common.run.progress import State

_MIDDLE = 0.5

Schedule = Callable[[int], float]  # maps a step to the multiplier of the learning rate


class TopModel(NamedTuple):
    """A top model and the means of its optimisation."""

    model: nn.Module  # maps (activation, own features or None) to logits
    optimizer: Optimizer
    schedule: Schedule


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one training step, before the top model has learned from all of it."""

    raw: Tensor  # gradient at the cut layer, before any defense, (batch, *cut_shape)
    probabilities: Tensor  # the model's predictions, (batch,) for label 1, or (batch, classes)
    loss: Tensor
    """Cross entropy of the prediction, mean over the batch; with its graph if the model is still to
    learn from it."""
    label_move: float | None = None
    """The largest move of a row by its own label; None if the gap of the class means represents
    it."""
    logits: Tensor | None = None
    """Outputs of the model, with their graph, where ``raw`` is the gradient of their cross entropy
    or squared error: (batch,), or (batch, classes); None for another loss."""


class Objective(Protocol):
    """A top model and the way it learns."""

    model: nn.Module
    """The model that makes the predictions. Maps (activation, own features or None) to logits,
    (batch,), or (batch, classes) with several classes."""

    def compute(
        self, activation: Tensor, own: Features | None, targets: Tensor, batch: LabelledRows
    ) -> StepOutcome:
        """Compute the gradient at the activation, (batch, *cut_shape), which requires it.

        Targets, (batch,), are the labels of the loss: the batch's true labels, or a defense's
        replacements.
        """
        ...

    def learn(self, outcome: StepOutcome, /) -> None:
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

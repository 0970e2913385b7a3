"""What training asks of any model: its mode, and the weights that learn."""

from torch import nn


def in_training_mode(model: nn.Module) -> None:
    """Put a model into training mode, unless it is in that mode already.

    `Module.train` sets an attribute of every module in the model. In each step that would take
    longer than the arithmetic of a small layer.
    """
    if not model.training:
        model.train()


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are trained, in order; finding them takes a walk over all modules."""
    return [weight for weight in model.parameters() if weight.requires_grad]

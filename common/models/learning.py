"""Puts models into the mode for training."""

from torch import nn


def in_training_mode(model: nn.Module) -> None:
    """Put a model into training mode, unless it is in that mode already.

    `Module.train` sets an attribute of every module in the model. In each step that would take
    longer than the arithmetic of a small layer.
    """
    if not model.training:
        model.train()

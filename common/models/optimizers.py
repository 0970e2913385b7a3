"""Optimizers, from settings."""

from collections.abc import Iterable

import torch
from torch import nn

from common.errors import SettingsError
from common.models.settings import AdamOptimizer, OptimizerSettings, SgdOptimizer


def build_optimizer(
    settings: OptimizerSettings, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters.

    Raises:
        SettingsError: the model has nothing to train.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise SettingsError("optimizer: the model has no parameters that can be trained")
    match settings:
        case AdamOptimizer():
            return torch.optim.Adam(
                trainable,
                lr=settings.learning_rate,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
            )
        case SgdOptimizer():
            return torch.optim.SGD(
                trainable,
                lr=settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )

"""A malicious optimizer: it makes the whole model rely on this party's half.

Active model completion (Fu et al., "Label Inference Attacks Against Vertical Federated Learning",
USENIX Security 2022, section 4.2): in each coordinate the gradient g of this party's parameters is
multiplied, before the optimizer uses it, by

    1 + g / h, limited to [1, 5],

h being what the optimizer was given one step before. Where gradients keep their direction the
bottom model learns up to five times as fast as it should, and the rest of the network adapts to
activations that say more about the labels. To the active party it looks like a larger learning
rate: no rule of the protocol is broken. Embedding tables with sparse gradients are left alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from splitveil.common.models.optimizers import JoinedOptimizer

LARGEST_FACTOR = 5.0
_KEY = "amplified_gradient"
_AWAY_FROM_ZERO = 1e-7


def amplify_steps(optimizer: Optimizer) -> None:
    for part in optimizer.parts if isinstance(optimizer, JoinedOptimizer) else [optimizer]:
        part.register_step_pre_hook(_amplify)
        part.register_step_post_hook(_remember)


def amplified(gradient: Tensor, before: Tensor) -> Tensor:
    growth = 1.0 + gradient / (before + _AWAY_FROM_ZERO)
    return gradient * growth.clamp(1.0, LARGEST_FACTOR)


def _amplify(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    for parameter in _with_dense_gradient(optimizer):
        before = optimizer.state[parameter].get(_KEY) if parameter in optimizer.state else None
        if before is not None and parameter.grad is not None:
            parameter.grad.copy_(amplified(parameter.grad, before))


def _remember(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    # Not before the step: of a state that is not empty, an optimizer believes that it is its own.
    for parameter in _with_dense_gradient(optimizer):
        if parameter.grad is not None:
            optimizer.state[parameter][_KEY] = parameter.grad.detach().clone()


def _with_dense_gradient(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [one for one in every if one.grad is not None and not one.grad.is_sparse]

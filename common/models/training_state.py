"""What training asks of any model: its mode, the weights that learn, and its random draws."""

import torch
from torch import Tensor, nn


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


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's, for dropout after a checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

"""Handles any model's training state: its mode, the weights that learn, and its random draws."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from splitveil.common.errors import SettingsError
from splitveil.common.text.wording import suggest


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


def freeze(model: nn.Module, parts: Iterable[str], setting: str) -> None:
    """Freeze the parameters that settings name."""
    check_names(parts, model, setting)
    for name, weight in model.named_parameters():
        if is_in(name, parts):
            weight.requires_grad = False


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Return whether a parameter is one of those that settings name, or in one of the modules."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def check_names(parts: Iterable[str], model: nn.Module, setting: str) -> None:
    """Check that each name belongs to a parameter or a module with parameters."""
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(is_in(name, [part]) for name in names):
            raise SettingsError(
                f"{setting}: the model has no parameter {part!r}{suggest(part, names)}"
            )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's, for dropout after a checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

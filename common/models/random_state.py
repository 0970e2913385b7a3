"""The state of torch's own generators, from which dropout draws: part of a checkpoint."""

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of a GPU's where the model is on one."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    """Go on drawing where ``random_state`` was taken."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

"""Saves and restores the state of torch's own generators, which dropout uses, for checkpoints."""

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's if the model is on a GPU."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    """Restore the state that ``random_state`` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

"""The passive party's half of the network: its computations, without any rule of the protocol."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from splitveil.common.data.features import Features
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.training_state import in_training_mode, random_state, set_random_state
from splitveil.common.run.host_copies import to_device
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions
from splitveil.passive_party.stashed_weights import keeping_weights

BottomModel = Callable[[Features], Tensor]
"""Computes the activation of a batch with its graph: the model itself, or several processes."""


Take = Callable[[], Tensor | None]  # returns the latest gradient at a layer's output and forgets it


class TrainingPass(NamedTuple):
    """How training batches are computed."""

    compute: BottomModel
    taps: Mapping[str, Take] = MappingProxyType({})
    """For each layer whose gradients the adversary wants to see, by name."""


class BottomTrainer:
    """Bottom model, optimiser and features.

    Args:
        model: maps features to activations (batch, *cut_shape).
        training: how training batches are computed; by default by the model, without taps.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler,
        features: Features,
        device: torch.device,
        data_digest: str = "",
        training: TrainingPass | None = None,
    ) -> None:
        self.model = model.to(device)
        self.data_digest = data_digest
        self._compute, self._taps = training or TrainingPass(self.model)
        self._optimizer = optimizer
        self._schedule = schedule
        self._features = features.to(device)
        self._device = device
        self._waiting: deque[Tensor] = deque()
        """Activations whose gradients are to come, with their graphs, in the order of the course.
        """

    @property
    def is_between_steps(self) -> bool:
        """Whether no activation waits for its gradient, so that the state is whole."""
        return not self._waiting

    @property
    def num_rows(self) -> int:
        return len(self._features)

    def rows(self, positions: Positions) -> Features:
        """Gather the features of some rows; best called while waiting for the peer."""
        return self._features.rows(torch.from_numpy(positions.copy()).to(self._device))

    def forward(self, features: Features, *, keeps_weights: bool = False) -> Tensor:
        """Return the activation of a training batch, (batch, *cut_shape), and keep its graph.

        Args:
            keeps_weights: whether the model may learn from other gradients before this batch's.
        """
        in_training_mode(self.model)
        with keeping_weights(self.model) if keeps_weights else nullcontext():
            activation: Tensor = self._compute(features)
        self._waiting.append(activation)
        return activation.detach()

    def backward(self, gradient: Tensor) -> dict[str, Tensor]:
        """Learn from the gradient received for the oldest activation that waits for one.

        It is that of the weights with which the activation was computed, and changes those of now.

        Returns the gradients at the tapped layers, (batch, ...) each.
        """
        if not self._waiting:
            raise RuntimeError("backward without a forward")
        activation = self._waiting.popleft()
        self._optimizer.zero_grad(set_to_none=True)
        received = to_device(gradient, activation.device, activation.dtype)
        torch.autograd.backward(_with_gradient(activation, received))
        self._optimizer.step()
        self._schedule.step()
        taken = {name: take() for name, take in self._taps.items()}
        return {name: gradient for name, gradient in taken.items() if gradient is not None}

    def state_dict(self) -> State:
        """Return everything that a step changes, or raise RuntimeError."""
        if not self.is_between_steps:
            raise RuntimeError("no state in the middle of a step")
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "random": random_state(self._device),
        }

    def load_state_dict(self, state: State) -> None:
        self._waiting.clear()
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        set_random_state(self._device, state["random"])

    def embed(self, features: Features) -> Tensor:
        """Return activations of held-out rows, without a graph."""
        return predict_in_blocks(self.model, features)


def _with_gradient(activation: Tensor, received: Tensor) -> Tensor:
    scalar: Tensor = _WithGradient.apply(activation, received)  # type: ignore[no-untyped-call]
    return scalar


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient at the activation is the one that was received.

    `torch.autograd.backward` takes such a gradient as well, and imports SymPy to compare its shape
    with the activation's: a quarter of a second, and 40 MiB of memory.
    """

    @staticmethod
    def forward(context: Any, activation: Tensor, received: Tensor) -> Tensor:
        if received.shape != activation.shape:
            raise ValueError(
                f"expected a gradient of shape {tuple(activation.shape)}, "
                f"got {tuple(received.shape)}"
            )
        context.save_for_backward(received)
        return activation.new_zeros(())

    @staticmethod
    def backward(context: Any, _of_scalar: Tensor) -> tuple[Tensor, None]:
        (received,) = context.saved_tensors
        return received, None

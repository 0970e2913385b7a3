"""Remembers the activations that the passive parties have sent, row by row."""

import torch
from torch import Tensor

from splitveil.common.run.progress import State


class CutMemory:
    """The last activation of each aligned row; NaN for a row that was not visited yet."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._values: Tensor | None = None

    @property
    def is_filled(self) -> bool:
        return self._values is not None

    def note(self, rows: Tensor, activation: Tensor) -> None:
        """Remember the activations of a batch.

        Shapes: ``rows`` (batch,), ``activation`` (batch, *cut_shape).
        """
        if self._values is None:
            shape = (self._num_rows, *activation.shape[1:])
            self._values = torch.full(shape, torch.nan, device=self._device)
        self._values[rows.to(self._device)] = activation.detach().to(self._values)

    def at(self, rows: Tensor) -> Tensor:
        """Return the last activations of some rows, (rows, *cut_shape) float32."""
        if self._values is None:
            raise RuntimeError("no activation was noted yet")
        return self._values[rows.to(self._device)]

    def is_noted(self, rows: Tensor) -> Tensor:
        """Return which rows were visited, (rows,) bool on the CPU; no peer may send NaN."""
        first: Tensor = self.at(rows).flatten(1)[:, 0]
        return ~first.isnan().cpu()

    def state_dict(self) -> State:
        return {} if self._values is None else {"values": self._values}

    def load_state_dict(self, state: State) -> None:
        values = state.get("values")
        if values is not None and len(values) != self._num_rows:
            raise ValueError(f"expected activations of {self._num_rows} rows, got {len(values)}")
        self._values = None if values is None else values.to(self._device, copy=True)

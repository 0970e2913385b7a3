"""A worker: computes its share of each batch for rank 0 of the same party, and keeps no state."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features
from splitveil.common.models.blocks import Inputs, tensors_of
from splitveil.common.models.spread_model import RowForm, RowShare, in_one, weights_of
from splitveil.common.models.worker_line import Order, WorkerLine


class Replica(NamedTuple):
    """A worker's own copy of rank 0's model."""

    model: nn.Module
    """On its device; its weights are those that rank 0 sends."""

    form: RowForm
    """Of the model's inputs."""

    device: torch.device
    watched: Sequence[Callable[[], Tensor | None]] = ()
    """As for ``SpreadModel``, about this copy."""

    at_once: int = 1
    """Batches that may wait for their gradients at the same time."""

    keeping: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds the computation of a batch, as at rank 0."""


class Worker:
    """Does what rank 0 orders.

    Args:
        line: to rank 0.
        build: builds the copy of the model from what rank 0 says about it.
    """

    def __init__(self, line: WorkerLine, build: Callable[[dict[str, Any]], Replica]) -> None:
        self._line = line
        self._build = build
        self._replica: Replica
        self._weights: Tensor
        self._shares: deque[tuple[int, RowShare]]

    def work(self) -> None:
        """Work until rank 0 lets this process end.

        Raises:
            WorkerLost: rank 0 is gone.
            SettingsError: rank 0 has another model.
        """
        while (order := self._line.next_order()).kind != "end":
            match order.kind:
                case "begin":
                    self._begin(self._build(self._line.facts(order)))
                case "ping":
                    self._reply(torch.ones(1))
                case "forward":
                    self._compute(order)
                case "inputs":
                    share = self._share(order)
                    self._reply(share.input_gradient(self._gradient(share)))
                case "weights":
                    self._learn(order)

    def _begin(self, replica: Replica) -> None:
        self._replica = replica
        self._weights = in_one(weights_of(replica.model))
        self._shares = deque(maxlen=replica.at_once)

    def _compute(self, order: Order) -> None:
        values = self._line.receive(self._weights)
        start = 0
        with torch.no_grad():
            for tensor in weights_of(self._replica.model):
                part = values[start : start + tensor.numel()]
                tensor.copy_(part.reshape(tensor.shape))
                start += tensor.numel()
        given = self._replica.form.zeros(order.rows)
        for tensor in tensors_of(given):
            self._line.receive(tensor)
        share = RowShare.compute(
            self._replica.model, _on(given, self._replica.device), self._replica.keeping()
        )
        self._shares.append((order.number, share))
        self._reply(share.output)

    def _learn(self, order: Order) -> None:
        share = self._share(order)
        self._reply(in_one(share.weight_gradients(self._gradient(share), self._replica.model)))
        for take in self._replica.watched:
            seen = take()
            if seen is not None:
                self._reply(seen)

    def _share(self, order: Order) -> RowShare:
        (found,) = (share for number, share in self._shares if number == order.number)
        return found

    def _gradient(self, share: RowShare) -> Tensor:
        into = torch.empty(share.output.shape, dtype=share.output.dtype)
        return self._line.receive(into).to(self._replica.device)

    def _reply(self, values: Tensor) -> None:
        self._line.send(values, 0).wait()


def _on(inputs: Inputs, device: torch.device) -> Inputs:
    return [part.to(device) if isinstance(part, Tensor | Features) else None for part in inputs]

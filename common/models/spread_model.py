"""A model whose training batches several processes of one party compute, each some of the rows.

Rank 0 holds the model, the optimizer and the data. For each batch it sends every worker the weights
and its share of the rows, and puts the outputs together in the order of the batch. What happens to
the outputs then is that of one process: the loss is one mean over the whole batch, and a defense
sees the whole gradient. Backward, each process gets the gradient of its own rows' outputs. The
gradients of the weights are added up in the order of the ranks, so that the same step has the same
bits when it is computed again by as many processes.

Workers keep nothing but the graphs of the batches that wait for gradients: a checkpoint holds no
trace of them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.autograd.function import Function

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.blocks import Inputs, tensors_of
from splitveil.common.models.training_state import in_training_mode, trained_of
from splitveil.common.models.worker_line import Order, Pending, WorkerLine, wait_for


class RowForm(NamedTuple):
    """The form of a model's input."""

    cut_shape: tuple[int, ...] | None
    """Shape of a row's activation, if the model takes one as its first input."""

    shapes: FeatureShapes | None
    """Of the features that follow; None if there are none."""

    def zeros(self, rows: int) -> list[Tensor | Features | None]:
        """Return inputs of this form."""
        features = None if self.shapes is None else self.shapes.zeros(rows)
        return [*([] if self.cut_shape is None else [torch.zeros(rows, *self.cut_shape)]), features]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        shapes = None if self.shapes is None else self.shapes._asdict()
        return {"cut_shape": self.cut_shape, "shapes": shapes}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "RowForm":
        """Return the form that ``to_json`` described."""
        return TypeAdapter(cls).validate_python(found)


def shares_of(rows: int, processes: int) -> list[int]:
    """Return how many consecutive rows of a batch each process computes, rank 0 first."""
    each, more = divmod(rows, processes)
    return [each + (rank < more) for rank in range(processes)]


def check_spreadable(model: nn.Module, role: str) -> None:
    """Check that shares of a batch give what the whole batch would.

    Raises SettingsError, which names what stands against it.
    """
    for name, part in model.named_modules():
        layer = f"{role}: several processes: {name or 'the model'} is a {type(part).__name__}"
        if isinstance(part, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 (base of them all)
            raise SettingsError(f"{layer}, which looks at a whole batch: one process computes it")
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p:  # noqa: SLF001
            raise SettingsError(
                f"{layer}, whose random state is that of one process: set its dropout to 0"
            )
        if isinstance(part, nn.Embedding) and part.sparse:
            raise SettingsError(
                f"optimizer.sparse_from_rows: several processes: {name} is updated in the rows of "
                f"a batch alone, which several processes cannot add up; set it to null"
            )
    if any(tensor.dtype != torch.float32 for tensor in weights_of(model)):
        raise SettingsError(f"{role}: several processes: expected weights of type float32 only")


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return all tensors of a model that may change, in order; other buffers are its constants."""
    return [*model.parameters(), *(one for one in model.buffers() if one.is_floating_point())]


class RowShare(NamedTuple):
    """The rows of a batch that one process computes, with their graph."""

    inputs: Inputs
    output: Tensor

    @classmethod
    def compute(
        cls,
        model: nn.Module,
        inputs: Inputs,
        keeping: AbstractContextManager[None] | None = None,
    ) -> "RowShare":
        """Compute the output of some rows in training mode."""
        given = [
            part.detach().requires_grad_() if isinstance(part, Tensor) else part for part in inputs
        ]
        in_training_mode(model)
        with torch.enable_grad(), keeping or nullcontext():
            return cls(given, model(*given))

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the first input, and keep the graph."""
        first = self.inputs[0]
        if not isinstance(first, Tensor):
            raise TypeError("features have no gradient")
        (found,) = torch.autograd.grad(self.output, [first], gradient, retain_graph=True)
        return found

    def weight_gradients(self, gradient: Tensor, model: nn.Module) -> list[Tensor | None]:
        """Return the gradients of the trained weights, None for what the output lacks."""
        trained = trained_of(model)
        return list(torch.autograd.grad(self.output, trained, gradient, allow_unused=True))


def in_one(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the values of all tensors one after another, (values,), on the CPU."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor is not None]
    return torch.cat(flat).cpu() if flat else torch.zeros(0)


class SpreadModel:
    """Computes training batches of a model together with the workers; call it as the model.

    Args:
        model: on its device.
        line: to the workers.
        watched: hand over what layers' hooks have seen in a backward pass, each a gradient with a
            row for each row of the batch or None; those of all processes are put together.
    """

    def __init__(
        self,
        model: nn.Module,
        line: WorkerLine,
        watched: Sequence[Callable[[], Tensor | None]] = (),
    ) -> None:
        self.model = model
        self.line = line
        self.seen: list[Tensor | None] = []
        """What was watched in the last backward pass, for all rows of its batch."""
        self._watched = watched
        self._number = 0

    def __call__(self, *inputs: Tensor | Features | None) -> Tensor:
        """Return the model's output for a batch, with a graph to the first input and the weights.

        Args:
            inputs: as the model takes them, in training.
        """
        self._number += 1
        batch = _Batch(self, self._number, inputs)
        first = inputs[0]
        trained = trained_of(self.model)
        output: Tensor = _apply(_ByWeights, batch, batch.output, *trained)
        if isinstance(first, Tensor) and first.requires_grad:
            # A gradient of the inputs alone then leaves the weights aside, and the other way round.
            output = _apply(_ByInput, batch, torch.zeros_like(batch.output), first) + output
        return output

    def take_seen(self, index: int) -> Tensor | None:
        """Return what was watched in the last backward pass, and forget it."""
        if not self.seen:
            return None
        found, self.seen[index] = self.seen[index], None
        return found

    def watched_now(self) -> list[Tensor | None]:
        """Return what this process has watched since the last time."""
        return [take() for take in self._watched]


class _Batch:
    """One batch under way, as rank 0 sees it."""

    def __init__(self, spread: SpreadModel, number: int, inputs: Inputs) -> None:
        self._spread = spread
        self._line = spread.line
        self._number = number
        tensors = tensors_of(inputs)
        self._sizes = shares_of(len(tensors[0]), self._line.size)
        with self._line.lock:
            pending = self._send_out(tensors)
            self._own = RowShare.compute(spread.model, _first_rows(inputs, self._sizes[0]))
            own = self._own.output.detach()
            self.output = torch.cat([own, *self._gathered(own)])
            wait_for(pending)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the first input, (batch, ...)."""
        with self._line.lock:
            pending = self._ask("inputs", gradient)
            own = self._own.input_gradient(gradient[: self._sizes[0]])
            found = torch.cat([own, *self._gathered(own)])
            wait_for(pending)
        return found

    def weight_gradients(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the trained weights, added up over all rows."""
        spread = self._spread
        with self._line.lock:
            pending = self._ask("weights", gradient)
            own = self._own.weight_gradients(gradient[: self._sizes[0]], spread.model)
            total = in_one(own)
            for worker in self._working():
                total += self._line.receive(torch.empty_like(total), worker)
            spread.seen = [
                None if seen is None else torch.cat([seen, *self._gathered(seen)])
                for seen in spread.watched_now()
            ]
            wait_for(pending)
        return _like(own, total)

    def _send_out(self, tensors: list[Tensor]) -> list[Pending]:
        weights = in_one(weights_of(self._spread.model))
        shares = zip(*(torch.split(tensor, self._sizes) for tensor in tensors), strict=True)
        pending: list[Pending] = []
        for rank, share in enumerate(shares):
            if rank in self._working():
                pending.append(self._order("forward", rank))
                pending += [self._line.send(part, rank) for part in (weights, *share)]
        return pending

    def _ask(self, kind: Any, gradient: Tensor) -> list[Pending]:
        parts = torch.split(gradient, self._sizes)
        return [
            one
            for worker in self._working()
            for one in (self._order(kind, worker), self._line.send(parts[worker], worker))
        ]

    def _order(self, kind: Any, worker: int) -> Pending:
        return self._line.order(Order(kind, self._number, self._sizes[worker]), worker)

    def _working(self) -> list[int]:
        """Return the workers that have rows of this batch."""
        return [worker for worker in self._line.workers if self._sizes[worker]]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Receive the other processes' rows of something, on the device of this one's."""
        pending = [
            self._line.begin_receiving(
                torch.empty(self._sizes[worker], *own.shape[1:], dtype=own.dtype), worker
            )
            for worker in self._working()
        ]
        return [rows.to(own.device) for rows in wait_for(pending)]


def _first_rows(inputs: Inputs, count: int) -> Inputs:
    return [
        part.changed(lambda one: one[:count])
        if isinstance(part, Features)
        else None
        if part is None
        else part[:count]
        for part in inputs
    ]


def _like(tensors: Sequence[Tensor | None], values: Tensor) -> list[Tensor | None]:
    """Cut values into tensors of the same shapes and devices; None stays None."""
    found: list[Tensor | None] = []
    start = 0
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        part = values[start : start + tensor.numel()]
        found.append(part.reshape(tensor.shape).to(tensor.device))
        start += tensor.numel()
    return found


class _ByWeights(Function):
    """The outputs of a batch as a function of the weights."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, output: Tensor, *_weights: Tensor) -> Tensor:
        ctx.batch = batch
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.batch.weight_gradients(gradients[0])


class _ByInput(Function):
    """The outputs of a batch as a function of its first input."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, zeros: Tensor, _first: Tensor) -> Tensor:
        ctx.batch = batch
        return zeros.view_as(zeros)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, ctx.batch.input_gradient(gradients[0])


def _apply(function: type[Function], *inputs: Any) -> Tensor:
    found: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return found

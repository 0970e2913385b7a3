"""Computes a model's training batches on all ranks of a party, each the rows that it owns.

Every rank has the model, its optimizer and its rows of the features. Rank 0 has the protocol: it
orders a batch, and gets the outputs of all rows. Everything after that is as in one process: the
loss is one mean over the whole batch, and a defense sees the whole gradient. Backward, each rank
gets the gradient of its own rows' outputs; the gradients of the weights are added up, and every
rank takes the same step. So the weights stay equal without ever travelling, which is checked
whenever a state is saved. A rank that owns no row of a batch computes one of no rows.

Batch normalisation is over the whole batch: torch's SyncBatchNorm is for GPUs only, and for ranks
that all have rows.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.modules.batchnorm import _BatchNorm  # the base of them all
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.models.optimizers import (
    in_training_mode,
    random_state,
    set_random_state,
    trained_of,
)
from splitveil.common.models.ranks import CPU, Order, OrderKind, Ranks, as_bytes
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions
from splitveil.common.run.state_bytes import state_from_bytes, state_to_bytes

_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def with_whole_batches(model: nn.Module) -> None:
    """Normalise over whole batches in a model that all ranks compute.

    Raises SettingsError for a class of the user's own.
    """
    if model._compiled_call_impl is not None:  # noqa: SLF001
        # Compiled models call it as it is.
        as_it_is = torch.compiler.disable(WholeBatchNorm.forward)  # type: ignore[no-untyped-call]
        WholeBatchNorm.forward = as_it_is  # type: ignore[method-assign]
    for name, part in model.named_modules():
        if type(part) in _OF_TORCH:
            part.__class__ = WholeBatchNorm
        elif isinstance(part, _BatchNorm) and not isinstance(part, WholeBatchNorm):
            raise SettingsError(
                f"{name}: several processes cannot compute {type(part).__name__} over a whole "
                f"batch: use a batch normalisation of torch.nn itself, or one process"
            )


class WholeBatchNorm(_BatchNorm):
    """Batch normalisation, (rows, channels, ...), over the rows of all ranks while they train."""

    ranks: ClassVar[Ranks | None] = None
    """Set while all ranks compute the same, in all threads: a GPU's backward has its own."""

    def _check_input_dim(self, values: Tensor) -> None:
        if values.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {values.ndim}")

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values, of the same shape; also of no rows."""
        ranks = self.ranks
        if ranks is None or not self.training:
            return super().forward(values)
        self._check_input_dim(values)
        over = [0, *range(2, values.ndim)]
        shape = [1, -1, *[1] * (values.ndim - 2)]
        exact = values.float()
        own = exact.new_full((1,), exact.numel() / max(1, exact.shape[1]))
        total = _sum(ranks, torch.cat([exact.sum(over), own]))
        sums, count = total[:-1], total[-1].detach()
        if count <= 1:
            raise ValueError("expected more than 1 value per channel when training")
        centred = exact - (mean := sums / count).view(shape)
        variance = _sum(ranks, centred.square().sum(over)) / count
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), share)  # type: ignore[union-attr]
            unbiased = variance.detach() * count / (count - 1)
            self.running_var.lerp_(unbiased, share)  # type: ignore[union-attr]
        found: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(values.dtype)


def _sum(ranks: Ranks, values: Tensor) -> Tensor:
    def added(own: Tensor) -> Tensor:
        ranks.add_up([total := own.detach().clone()])
        return total

    return computed(lambda gradient: [added(gradient)], added(values), values)


class _Computed(Function):
    @staticmethod
    def forward(ctx: Any, gradients_at: Any, values: Tensor, *_at: Tensor) -> Tensor:
        ctx.gradients_at = gradients_at
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.gradients_at(gradients[0])


def computed(
    gradients_at: Callable[[Tensor], Sequence[Tensor | None]], values: Tensor, *at: Tensor
) -> Tensor:
    """Return values as a function of some tensors, whose gradients follow from the values'."""
    found: Tensor = _Computed.apply(gradients_at, values, *at)  # type: ignore[no-untyped-call]
    return found


_logger = logging.getLogger(__name__)

_BLOCK_BYTES = 16_000_000

Take = Callable[[], Tensor | None]  # returns the latest gradient at a layer's output and forgets it


class Learner(NamedTuple):
    """A model and how it learns, the same at all ranks."""

    model: nn.Module
    """Maps (first input, own features or None), or own features, to outputs; on its device."""

    optimizer: Optimizer
    schedule: LRScheduler
    device: torch.device
    taps: Mapping[str, Take] = MappingProxyType({})  # for each layer that is watched, by name
    at_once: int = 1  # batches that may wait for their gradients at the same time
    keeping: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds the computation of a batch."""


class _Share(NamedTuple):
    """The rows of a batch that one rank computes, with their graph."""

    owners: Tensor  # the rank of each row of the batch, (batch,)
    first: Tensor | None
    output: Tensor


class Beginning(NamedTuple):
    """Facts about a run that rank 0 sends before the first batch."""

    shapes: FeatureShapes | None  # of the party's features, if it has any
    cut_shape: tuple[int, ...] | None  # of a row of the model's first input, if it has two
    total_steps: int


class DataParallelModel:
    """One rank's part of the model. What rank 0 does here, it orders all others to do with it.

    ``rows_at`` returns features of rows that this rank owns, (rows,) int64; None without any.
    """

    def __init__(
        self,
        ranks: Ranks,
        learner: Learner,
        beginning: Beginning,
        rows_at: Callable[[Tensor], Features] | None,
    ) -> None:
        with_whole_batches(learner.model)
        self.ranks = ranks
        self._learner = learner
        self._rows_at = rows_at
        self._cut_shape = beginning.cut_shape
        self._shares: deque[tuple[int, _Share]] = deque(maxlen=learner.at_once)
        self._number = 0
        self._captured: dict[str, Tensor] = {}

    # ---- rank 0 ----

    def __call__(self, positions: Tensor, first: Tensor | None = None) -> Tensor:
        """Return the model's outputs for a batch, with a graph to the first input and the weights.

        ``positions``, (batch,) int64, locates the rows in the common order; ``first``, (batch,
        ...), is the model's first input if it has two.
        """
        self._number += 1
        number = self._number
        output = self.forward(number, positions.cpu(), first)
        trained = trained_of(self._learner.model)
        found = computed(partial(self.weight_gradients, number), output, *trained)
        if first is not None and first.requires_grad:
            # A gradient of the inputs alone then leaves the weights aside, and the other way round.
            zeros = torch.zeros_like(output)
            found = found + computed(lambda one: [self.input_gradient(number, one)], zeros, first)
        return found

    @property
    def taps(self) -> Mapping[str, Take]:
        """As the learner's, with the gradients of all rows of a batch."""
        return {name: partial(self._captured.pop, name, None) for name in self._learner.taps}

    def share(self, random: list[Tensor]) -> None:
        """Copy rank 0's current model, optimizer and schedule to all ranks.

        ``random`` has the random states of the other ranks, as far as they are to change.
        """
        parts = [part.state_dict() for part in self._learner[:3]]
        content = as_bytes(state_to_bytes({"parts": parts, "random": random}))
        with self.ranks.lock:
            self.ranks.order("load", content=content)

    # ---- all ranks; what is for all rows of a batch is there at rank 0 only ----

    @contextmanager
    def _together(
        self, kind: OrderKind, number: int = 0, content: Tensor | None = None
    ) -> Iterator[None]:
        with self.ranks.lock:
            if not self.ranks.rank:
                self.ranks.order(kind, number, content)
            WholeBatchNorm.ranks = self.ranks
            try:
                yield
            finally:
                WholeBatchNorm.ranks = None

    def forward(self, number: int, positions: Tensor, first: Tensor | None = None) -> Tensor:
        """Compute a batch in training mode, and return its outputs."""
        ranks, model, device = self.ranks, self._learner.model, self._learner.device
        owners = positions % ranks.size
        with self._together("forward", number, positions):
            at = positions[owners == ranks.rank].to(device)
            inputs: list[Any] = [None if self._rows_at is None else self._rows_at(at)]
            cut = None
            if self._cut_shape is not None:
                like = torch.empty(0, *self._cut_shape, device=device)
                cut = ranks.scatter_rows(first, owners, like).requires_grad_()
                inputs.insert(0, cut)
            in_training_mode(model)
            with torch.enable_grad(), self._learner.keeping():
                output = model(*inputs)
            self._shares.append((number, _Share(owners, cut, output)))
            return ranks.gather_rows(output, owners)

    def input_gradient(self, number: int, gradient: Tensor | None = None) -> Tensor:
        """Return the gradient at the first input, and keep the graph."""
        with self._together("inputs", number):
            share, own = self._of(number, gradient)
            first: Any = share.first
            (found,) = torch.autograd.grad(share.output, first, own, retain_graph=True)
            return self.ranks.gather_rows(found, share.owners)

    def weight_gradients(self, number: int, gradient: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients of the trained weights, the same at all ranks; forget the batch."""
        with self._together("weights", number):
            share, own = self._of(number, gradient)
            self._shares.remove((number, share))
            trained = trained_of(self._learner.model)
            found: list[Tensor | None] = []
            found += torch.autograd.grad(share.output, trained, own, allow_unused=True)
            self.ranks.add_up_gradients(trained, found)
            for name, take in self._learner.taps.items():
                if (tapped := take()) is not None:
                    self._captured[name] = self.ranks.gather_rows(tapped, share.owners)
        return found

    def _of(self, number: int, gradient: Tensor | None) -> tuple[_Share, Tensor]:
        (share,) = (share for other, share in self._shares if other == number)
        return share, self.ranks.scatter_rows(gradient, share.owners, share.output)

    def random_states(self) -> list[Tensor]:
        """Return the random states of the ranks above 0, as bytes.

        Raises SplitveilError if the weights of two ranks differ.
        """
        with self._together("state"):
            digest = hashlib.sha256(state_to_bytes(self._learner.model.state_dict())).digest()
            random = state_to_bytes(random_state(self._learner.device))
            every = self.ranks.gather(as_bytes(digest + random))
        size = len(digest)
        for rank, found in enumerate(every):
            if not torch.equal(found[:size], every[0][:size]):
                raise SplitveilError(
                    f"rank {rank} has other weights than rank 0, so they compute differently: run "
                    f"all ranks on machines of one type with the same libraries, and resume from "
                    f"the last checkpoint"
                )
        return [found[size:] for found in every[1:]]

    # ---- ranks above 0 ----

    def work(self) -> Order:
        """Do what rank 0 orders, until it orders something else."""
        while True:
            order = self.ranks.next_order()
            match order.kind:
                case "load":
                    self._load(state_from_bytes(bytes(order.content.numpy())))
                case "forward":
                    self.forward(order.number, order.content.view(torch.int64))
                case "inputs":
                    self.input_gradient(order.number)
                case "weights":
                    self._learn(self.weight_gradients(order.number))
                case "state":
                    self.random_states()
                case _:
                    return order

    def _learn(self, gradients: list[Tensor | None]) -> None:
        """Take the same step as rank 0."""
        for weight, gradient in zip(trained_of(self._learner.model), gradients, strict=True):
            weight.grad = gradient
        self._learner.optimizer.step()
        self._learner.schedule.step()

    def _load(self, state: State) -> None:
        learner: tuple[Any, ...] = self._learner[:3]
        for part, own in zip(learner, state["parts"], strict=True):
            part.load_state_dict(own)
        for random in state["random"][self.ranks.rank - 1 : self.ranks.rank]:
            set_random_state(self._learner.device, state_from_bytes(bytes(random.numpy())))


def go_on(parallel: DataParallelModel | None, random: list[Tensor]) -> None:
    """Let all ranks, or rank 0 if ``parallel`` is None, go on from what rank 0 has loaded.

    ``random`` has the random states of the other ranks that saved it.
    """
    before, now = 1 + len(random), 1 if parallel is None else parallel.ranks.size
    if before != now:
        _logger.warning(
            "%d process(es) of this party have come this far and %d go on: what follows is equal "
            "within rounding only, and a batch that was answered before may be refused",
            before,
            now,
        )
    if parallel is not None:
        parallel.share(random)


# ---- the beginning of a run ----


def begin(
    ranks: Ranks,
    learner: Learner,
    beginning: Beginning,
    features: Features | None,
    trained: Positions,
) -> DataParallelModel:
    """Give all ranks their rows, and rank 0's model.

    ``features`` of all rows are on the learner's device already. ``trained`` has the positions of
    the training rows, ascending, (training rows,) int64.
    """
    positions, device = torch.from_numpy(trained.copy()), learner.device
    with ranks.lock:
        content = state_to_bytes({"beginning": beginning, "positions": positions})
        ranks.order("begin", content=as_bytes(content))
        if features is not None:
            for rank in range(1, ranks.size):
                for block in _blocks(positions[positions % ranks.size == rank], beginning):
                    for part in features.rows(block.to(device)).to(CPU).parts():
                        ranks.move({rank: part})
    rows_at = None if features is None else features.rows
    found = DataParallelModel(ranks, learner, beginning, rows_at)
    found.share([])
    return found


def work(ranks: Ranks, build: Callable[[Beginning], Learner]) -> None:
    """Do what rank 0 orders until it lets this process end. Raises RankLost."""
    order = ranks.next_order()
    while order.kind == "begin":
        said = state_from_bytes(bytes(order.content.numpy()))
        shapes, *others = said["beginning"]
        beginning = Beginning(None if shapes is None else FeatureShapes(*shapes), *others)
        own = said["positions"][said["positions"] % ranks.size == ranks.rank]
        order = _begun(ranks, build(beginning), beginning, own).work()


def _begun(ranks: Ranks, learner: Learner, beginning: Beginning, own: Tensor) -> DataParallelModel:
    if beginning.shapes is None:
        return DataParallelModel(ranks, learner, beginning, None)
    received = beginning.shapes.zeros(len(own))
    for block in _blocks(torch.arange(len(own)), beginning):
        for part in received.parts():
            ranks.move({}, {0: part[block[0] : block[-1] + 1]})
    features = received.to(learner.device)

    def rows_at(positions: Tensor) -> Features:
        return features.rows(torch.searchsorted(own, positions.cpu()).to(learner.device))

    return DataParallelModel(ranks, learner, beginning, rows_at)


def _blocks(positions: Tensor, beginning: Beginning) -> Sequence[Tensor]:
    """Return the rows that travel at once."""
    row = () if beginning.shapes is None else beginning.shapes.zeros(1).parts()
    rows = max(1, _BLOCK_BYTES // max(1, sum(part.nbytes for part in row)))
    return torch.split(positions, rows) if len(positions) else ()

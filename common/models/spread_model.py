"""A model whose training batches all ranks of a party compute, each the rows that it owns.

Every rank has the model, its optimizer and its rows of the features. Rank 0 has the protocol: it
orders a batch, and gets the outputs of all rows. What happens to them then is that of one process:
the loss is one mean over the whole batch, and a defense sees the whole gradient. Backward, each
rank gets the gradient of its own rows' outputs; the gradients of the weights are added up on all
ranks, and every rank takes the same step. So the weights stay equal without ever travelling, which
is checked whenever a state is saved.

A rank may own no row of a batch: it computes a batch of no rows, so that all ranks go through what
they compute together.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SplitveilError
from splitveil.common.models.ranks import Order, Ranks, as_bytes
from splitveil.common.models.training_state import (
    in_training_mode,
    random_state,
    set_random_state,
    trained_of,
)
from splitveil.common.models.whole_batch_norm import computing_together
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions
from splitveil.common.run.state_bytes import state_from_bytes, state_to_bytes

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
    taps: Mapping[str, Take] = MappingProxyType({})
    """For each layer whose gradients are wanted at rank 0, by name."""

    at_once: int = 1
    """Batches that may wait for their gradients at the same time."""

    keeping: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds the computation of a batch."""


class _Share(NamedTuple):
    """The rows of a batch that one rank computes, with their graph."""

    owners: Tensor  # the rank of each row of the batch, (batch,)
    first: Tensor | None
    output: Tensor


class Half:
    """What each rank does for an order; what is for all rows of a batch is there at rank 0 only.

    Args:
        ranks: all of them.
        learner: this rank's.
        rows_at: returns features of rows that this rank owns, (rows,) int64; None if the party has
            none.
        cut_shape: of a row of the model's first input, if that comes from rank 0.
    """

    def __init__(
        self,
        ranks: Ranks,
        learner: Learner,
        rows_at: Callable[[Tensor], Features | None],
        cut_shape: tuple[int, ...] | None,
    ) -> None:
        self.learner = learner
        self._ranks = ranks
        self._rows_at = rows_at
        self._cut_shape = cut_shape
        self._shares: deque[tuple[int, _Share]] = deque(maxlen=learner.at_once)

    def forward(self, number: int, positions: Tensor, first: Tensor | None = None) -> Tensor:
        """Compute a batch in training mode, and return its outputs."""
        ranks, learner = self._ranks, self.learner
        owners = positions % ranks.size
        own = self._rows_at(positions[owners == ranks.rank].to(learner.device))
        cut = None
        if self._cut_shape is not None:
            like = torch.empty(0, *self._cut_shape, device=learner.device)
            cut = ranks.scatter_rows(first, owners, like).requires_grad_()
        in_training_mode(learner.model)
        with torch.enable_grad(), learner.keeping(), computing_together(ranks):
            output = learner.model(own) if cut is None else learner.model(cut, own)
        self._shares.append((number, _Share(owners, cut, output)))
        return ranks.gather_rows(output, owners)

    def input_gradient(self, number: int, gradient: Tensor | None = None) -> Tensor:
        """Return the gradient at the first input, and keep the graph."""
        share, own = self._of(number, gradient)
        if share.first is None:
            raise TypeError("features have no gradient")
        (found,) = torch.autograd.grad(share.output, [share.first], own, retain_graph=True)
        return self._ranks.gather_rows(found, share.owners)

    def weight_gradients(
        self, number: int, gradient: Tensor | None = None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Return the gradients of the trained weights, the same at all ranks; forget the batch.

        With them come the gradients at the tapped layers, for all rows at rank 0.
        """
        share, own = self._of(number, gradient)
        trained = trained_of(self.learner.model)
        found: list[Tensor | None] = [
            *torch.autograd.grad(share.output, trained, own, allow_unused=True)
        ]
        self._shares = deque((one for one in self._shares if one[0] != number), self._shares.maxlen)
        self._ranks.add_up_gradients(trained, found)
        taken = {name: take() for name, take in self.learner.taps.items()}
        seen = {
            name: self._ranks.gather_rows(gradient, share.owners)
            for name, gradient in taken.items()
            if gradient is not None
        }
        return found, seen

    def _of(self, number: int, gradient: Tensor | None) -> tuple[_Share, Tensor]:
        (share,) = (share for other, share in self._shares if other == number)
        return share, self._ranks.scatter_rows(gradient, share.owners, share.output)

    def learn(self, number: int) -> None:
        """Take the step of a batch as rank 0 does."""
        gradients, _ = self.weight_gradients(number)
        for weight, gradient in zip(trained_of(self.learner.model), gradients, strict=True):
            weight.grad = gradient
        self.learner.optimizer.step()
        self.learner.schedule.step()

    def load(self, state: State) -> None:
        """Go on from a state of rank 0."""
        learner, at = self.learner, self._ranks.rank - 1
        learner.model.load_state_dict(state["model"])
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.schedule.load_state_dict(state["schedule"])
        if at < len(state["random"]):
            own = state_from_bytes(bytes(state["random"][at].numpy()))
            set_random_state(learner.device, own)

    def facts(self) -> list[Tensor]:
        """Return the random state of every rank at rank 0. Raises SplitveilError.

        It is an error there if another rank's weights differ.
        """
        random = state_to_bytes(random_state(self.learner.device))
        digest = hashlib.sha256()
        for weight in self.learner.model.state_dict().values():
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        every = self._ranks.gather(as_bytes(digest.digest() + random))
        size = digest.digest_size
        for rank, facts in enumerate(every):
            if not torch.equal(facts[:size], every[0][:size]):
                raise SplitveilError(
                    f"rank {rank} has other weights than rank 0, so the ranks compute differently: "
                    f"run all of them on machines of one type with the same libraries, and resume "
                    f"from the last checkpoint"
                )
        return [facts[size:] for facts in every]


class SpreadModel:
    """Rank 0's part of a model that all ranks compute.

    Args:
        ranks: all of them, each of which has taken part in ``begin``.
        half: rank 0's.
    """

    def __init__(self, ranks: Ranks, half: Half) -> None:
        self._seen: dict[str, Tensor] = {}
        self._ranks = ranks
        self._half = half
        self._number = 0

    def __call__(self, positions: Any, first: Tensor | None = None) -> Tensor:
        """Return the model's outputs for a batch, with a graph to the first input and the weights.

        Args:
            positions: of the rows in the common order, a tensor or an array, (batch,) int64.
            first: the model's first input, where features are not all, (batch, ...).
        """
        self._number += 1
        rows = torch.as_tensor(positions, device="cpu")
        with self._ranks.lock:
            self._ranks.order("forward", self._number, rows)
            output = self._half.forward(self._number, rows, first)
        trained = trained_of(self._half.learner.model)
        found: Tensor = _apply(_ByWeights, self, self._number, output, *trained)
        if first is not None and first.requires_grad:
            # A gradient of the inputs alone then leaves the weights aside, and the other way round.
            zeros = torch.zeros_like(output)
            found = _apply(_ByInput, self, self._number, zeros, first) + found
        return found

    def input_gradient(self, number: int, gradient: Tensor) -> Tensor:
        """Return the gradient at a batch's first input, (batch, ...)."""
        with self._ranks.lock:
            self._ranks.order("inputs", number)
            return self._half.input_gradient(number, gradient)

    def weight_gradients(self, number: int, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the trained weights; the other ranks take their step."""
        with self._ranks.lock:
            self._ranks.order("weights", number)
            found, seen = self._half.weight_gradients(number, gradient)
            self._seen.update(seen)
            return found

    def random_states(self) -> list[Tensor]:
        """Return those of the other ranks, as bytes. Raises SplitveilError.

        It is an error if a rank's weights differ from rank 0's.
        """
        with self._ranks.lock:
            self._ranks.order("state")
            return self._half.facts()[1:]

    def share(self, random: list[Tensor]) -> None:
        """Let all ranks go on from rank 0's model, optimizer and schedule of now.

        ``random`` has the random states of the other ranks, as far as they are to change.
        """
        learner = self._half.learner
        content = {
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "schedule": learner.schedule.state_dict(),
            "random": random,
        }
        with self._ranks.lock:
            self._ranks.order("load", content=as_bytes(state_to_bytes(content)))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._ranks.size

    @property
    def taps(self) -> Mapping[str, Take]:
        """As the learner's, with the gradients of all rows of a batch."""
        return {name: partial(self._seen.pop, name, None) for name in self._half.learner.taps}


def go_on(spread: SpreadModel | None, random: list[Tensor]) -> None:
    """Let all ranks, or rank 0 if ``spread`` is None, go on from what rank 0 has loaded.

    ``random`` has the random states of the other ranks that saved it.
    """
    before, now = 1 + len(random), 1 if spread is None else spread.size
    if before != now:
        _logger.warning(
            "%d process(es) of this party have come this far and %d go on: what follows is equal "
            "within rounding only, and a batch that was answered before may be refused",
            before,
            now,
        )
    if spread is not None:
        spread.share(random)


class _ByWeights(Function):
    """The outputs of a batch as a function of the weights."""

    @staticmethod
    def forward(
        ctx: Any, spread: SpreadModel, number: int, output: Tensor, *_weights: Tensor
    ) -> Tensor:
        ctx.batch = spread, number
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spread, number = ctx.batch
        return None, None, None, *spread.weight_gradients(number, gradients[0])


class _ByInput(Function):
    """The outputs of a batch as a function of its first input."""

    @staticmethod
    def forward(
        ctx: Any, spread: SpreadModel, number: int, zeros: Tensor, _first: Tensor
    ) -> Tensor:
        ctx.batch = spread, number
        return zeros.view_as(zeros)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spread, number = ctx.batch
        return None, None, None, spread.input_gradient(number, gradients[0])


def _apply(function: type[Function], *inputs: Any) -> Tensor:
    found: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


# ---- the beginning of a run, and the other ranks' part of it ----


class Beginning(NamedTuple):
    """What rank 0 says of a run before the first batch."""

    shapes: FeatureShapes | None
    """Of the party's features; None if it has none."""

    cut_shape: tuple[int, ...] | None
    """Of a row of the model's first input, if features are not all."""

    total_steps: int


def begin(
    ranks: Ranks,
    learner: Learner,
    beginning: Beginning,
    features: Features | None,
    trained: Positions,
) -> SpreadModel:
    """Give all ranks their rows, and rank 0's model.

    ``trained`` has the positions of the training rows, ascending, (training rows,) int64.
    """
    text = TypeAdapter(Beginning).dump_json(beginning)
    positions = torch.as_tensor(trained)
    with ranks.lock:
        ranks.order("begin", content=as_bytes(text))
        for rank in ranks.others if features is not None else ():
            own = positions[positions % ranks.size == rank]
            ranks.move({rank: torch.tensor([len(own)])})
            ranks.move({rank: own})
            for block in torch.split(own, _block_rows(beginning)):
                for part in [] if features is None else features.rows(block).tensors():
                    ranks.move({rank: part})
    rows_at = _no_features if features is None else features.to(learner.device).rows
    found = SpreadModel(ranks, Half(ranks, learner, rows_at, beginning.cut_shape))
    found.share([])
    return found


def work(ranks: Ranks, build: Callable[[Beginning], Learner]) -> None:
    """Do what rank 0 orders until it lets this process end. Raises RankLost."""
    half: Half
    while (order := ranks.next_order()).kind != "end":
        match order.kind:
            case "begin":
                half = _begun(ranks, order, build)
            case "load":
                half.load(state_from_bytes(bytes(order.content.numpy())))
            case "forward":
                half.forward(order.number, order.content)
            case "inputs":
                half.input_gradient(order.number)
            case "weights":
                half.learn(order.number)
            case "state":
                half.facts()
            case "ping":
                ranks.move({0: torch.ones(1)})
    ranks.close()


def _begun(ranks: Ranks, order: Order, build: Callable[[Beginning], Learner]) -> Half:
    beginning = TypeAdapter(Beginning).validate_json(bytes(order.content.numpy()))
    learner = build(beginning)
    if beginning.shapes is None:
        return Half(ranks, learner, _no_features, beginning.cut_shape)
    ranks.move({}, {0: (count := torch.zeros(1, dtype=torch.int64))})
    ranks.move({}, {0: (own := torch.empty(int(count), dtype=torch.int64))})
    features = beginning.shapes.zeros(len(own))
    for block in torch.split(torch.arange(len(own)), _block_rows(beginning)):
        for part in features.tensors():
            ranks.move({}, {0: part[block[0] : block[-1] + 1]})
    features = features.to(learner.device)

    def rows_at(positions: Tensor) -> Features:
        return features.rows(torch.searchsorted(own, positions.cpu()).to(learner.device))

    return Half(ranks, learner, rows_at, beginning.cut_shape)


def _no_features(_positions: Tensor) -> None:
    return None


def _block_rows(beginning: Beginning) -> int:
    """Return how many rows travel at once."""
    row = () if beginning.shapes is None else beginning.shapes.zeros(1).tensors()
    return max(1, _BLOCK_BYTES // max(1, sum(part.nbytes for part in row)))

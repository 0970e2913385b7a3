"""The passive party's half of the network: its computations, without any rule of the protocol.

With a ``pipeline_depth`` above 1 the model learns from other gradients before that of an activation
arrives. Autograd would then refuse the backward pass, because optimizers change weights in place.
So whatever the backward pass needs of parameters that train, and of buffers, is copied when the
activation is computed (weight stashing: Narayanan et al., "PipeDream", SOSP 2019, section 3.3). The
first layer's weights and embedding tables are not among it, however large they are. Masks of
dropout and all other values of the forward pass belong to the activation anyway.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from splitveil.common.data.features import Features
from splitveil.common.errors import InvalidMessage, SettingsError
from splitveil.common.models import optimizers
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.components import FIT_ROWS, ComponentsBottom
from splitveil.common.models.data_parallel import DataParallelModel, Learner, go_on
from splitveil.common.models.dense import (
    ConvBottom,
    ConvTop,
    MlpBottom,
    MlpTop,
    WideDeepBottom,
    WideDeepTop,
)
from splitveil.common.models.device import check_same_gpu, gpu_of, to_device
from splitveil.common.oblivious_transfer import Receiver
from splitveil.common.run.course import Batch
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.wording import suggest
from splitveil.passive_party.feature_values import feature_values


@contextmanager
def stashing_weights(model: nn.Module) -> Iterator[None]:
    """Stash the model's current weights and buffers for backward passes of computations within.

    A function that keeps a weight by other means than ``save_for_backward``, or computes the
    forward pass again (``torch.utils.checkpoint``), gets the weights of its backward pass instead.
    """
    owned = {_storage(tensor) for tensor in chain(optimizers.trained_of(model), model.buffers())}

    def save(tensor: Tensor) -> tuple[Tensor, int]:
        if tensor.layout is torch.strided and _storage(tensor) in owned:
            tensor = tensor.clone()
        return tensor, _version(tensor)

    def used(saved: tuple[Tensor, int]) -> Tensor:
        tensor, version = saved
        # Hooks take the place of autograd's own check: another version is another value.
        if _version(tensor) != version:
            raise RuntimeError(
                "the model changes a tensor in place that its own backward pass needs, of shape "
                f"{tuple(tensor.shape)}"
            )
        return tensor

    if model._compiled_call_impl is not None:  # noqa: SLF001
        # They differ from tensor to tensor, so that the compiler would compile them again and
        # again, for seconds each time.
        save, used = map(torch.compiler.disable, (save, used))
    with saved_tensors_hooks(save, used):
        yield


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 (documented under "In-place correctness checks")


def first_layer(model: nn.Module) -> nn.Module:
    """Return the layer whose output's gradient is attacked besides the cut layer's.

    In mlp, tabular and wide_deep that is the first dense layer with its activation, as in Marvell's
    paper; with no hidden layer it is the cut layer itself. In conv it is the first ReLU, before the
    pooling. In a user-defined model it is the first submodule, in the order of definition, that has
    parameters of its own that train; settings can name another.
    """
    if isinstance(model, MlpBottom | MlpTop | WideDeepBottom | WideDeepTop):
        return next(iter(model.layers.children()))
    if isinstance(model, ConvBottom | ConvTop) and len(model.blocks):
        return model.blocks.get_submodule("block_0.1")
    for layer in model.modules():
        if any(weight.requires_grad for weight in layer.parameters(recurse=False)):
            return layer
    raise SettingsError("the model has no layer with parameters")


def named_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer that settings name: ``first``, or a path such as ``layers.hidden_1``."""
    if name == "first":
        return first_layer(model)
    layers: dict[str, nn.Module] = {path: one for path, one in model.named_modules() if path}
    if name not in layers:
        raise SettingsError(
            f"the model has no layer {name!r}{suggest(name, layers)} (it has: {', '.join(layers)})"
        )
    return layers[name]


class LayerTap:
    """Holds the latest gradient with respect to a layer's output, of the output's shape.

    It costs one reference per step and does not copy: the gradient must not be changed in place.
    Each backward pass replaces the stored gradient; a new forward pass in training discards it.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._gradient: Tensor | None = None
        layer.register_forward_hook(self._watch)

    def take(self) -> Tensor | None:
        """Return the gradient and forget it; None before the backward pass."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def _watch(self, _layer: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self._gradient = None
            output.register_hook(self._store)  # type: ignore[no-untyped-call]

    def _store(self, gradient: Tensor) -> None:
        self._gradient = gradient


class BottomTrainer:
    """Bottom model, optimiser and features; the model's activations are (batch, *cut_shape)."""

    def __init__(
        self,
        learner: Learner,
        features: Features,
        *,
        data_digest: str = "",
        parallel: DataParallelModel | None = None,
        before_labels: tuple[Tensor, Sequence[str]] | None = None,
        scores: int = 1,
    ) -> None:
        """Take what a learner has, and of scores the moments, their columns' names and number."""
        self.model, self._optimizer, self._schedule, self._device = learner[:4]
        self.data_digest = data_digest
        self._taps = (parallel or learner).taps
        self._parallel = parallel
        self._features = features.to(self._device)
        self._before_labels, self._scores = before_labels, scores
        self._receiver: Receiver | None = None
        self._sums: NDArray[np.int64] | None = None
        self.released: tuple[Tensor, Tensor, float] | None = None
        """Rows' positions; their noisy labels, (rows, values), and 0, or noisy sums as for
        ``fit_sums``, and the deviation of their noise."""
        self._noisy: list[tuple[Positions, NDArray[np.float32]]] = []
        self._waiting: deque[Tensor] = deque()
        """Activations whose gradients are to come, with their graphs, in the order of the course.
        """

    @property
    def is_between_steps(self) -> bool:
        """True if no gradient and no further labels are awaited, so that the state is whole."""
        return not self._waiting and not self._noisy and self._receiver is None

    @property
    def num_rows(self) -> int:
        return len(self._features)

    def rows(self, positions: Positions) -> Features:
        """Gather the features of some rows; best called while waiting for the peer."""
        return self._features.rows(torch.from_numpy(positions.copy()).to(self._device))

    def feature_values(self, positions: Positions) -> Tensor | None:
        """Return some rows' features as plain numbers, (rows, values), unless they are too many."""
        return feature_values(self.rows(positions))

    def training_rows(self, positions: Positions) -> Features | Tensor:
        """Gather what ``forward`` needs; of several processes each gathers its own rows."""
        return (
            self.rows(positions) if self._parallel is None else torch.from_numpy(positions.copy())
        )

    def forward(self, given: Any, *, stashes_weights: bool = False) -> Tensor:
        """Return the activation of a training batch, (batch, *cut_shape), and keep its graph.

        ``given`` is what ``training_rows`` has gathered. ``stashes_weights`` if the model may
        learn from other gradients before this batch's.
        """
        optimizers.in_training_mode(self.model)
        with stashing_weights(self.model) if stashes_weights else nullcontext():
            activation: Tensor = (self._parallel or self.model)(given)
        self._waiting.append(activation)
        return activation.detach()

    def backward(self, gradient: Tensor) -> dict[str, Tensor]:
        """Learn from the gradient received for the oldest activation that waits for one.

        It belongs to the weights that computed the activation, and changes the current weights.

        Returns the gradients at the tapped layers, (batch, ...) each.
        """
        if not self._waiting:
            raise RuntimeError("backward without a forward")
        activation = self._waiting.popleft()
        self._optimizer.zero_grad(set_to_none=True)
        received = to_device(gradient, activation.device, activation.dtype)
        scalar: Tensor = _WithGradient.apply(activation, received)  # type: ignore[no-untyped-call]
        torch.autograd.backward(scalar)
        self._optimizer.step()
        self._schedule.step()
        taken = {name: take() for name, take in self._taps.items()}
        return {name: gradient for name, gradient in taken.items() if gradient is not None}

    def take_labels(self, positions: Positions, noisy: Tensor, *, is_last: bool) -> None:
        """Take noisy labels of training rows, (rows, values), and fit the model after the last."""
        self._noisy.append((positions, noisy.float().numpy()))
        if not is_last:
            return
        places, values = map(np.concatenate, zip(*self._noisy, strict=True))
        self.released = torch.from_numpy(places), torch.from_numpy(values), 0.0
        if self._before_labels is not None:
            self.score.fit_score(self.rows(places), values, *self._before_labels)
        self._noisy.clear()

    @property
    def score(self) -> ComponentsBottom:
        if not isinstance(self.model, ComponentsBottom):
            raise RuntimeError("only a score is fitted to labels")
        return self.model

    def transfer_question(self, batch: Batch) -> bytes:
        """Return the next message of an oblivious transfer to this party, or of its end."""
        if self._receiver is None or batch.split == "sums":
            return (self.score.num_bits + 1).to_bytes(4, "little")
        bits = self.score.bits(self.rows(batch.positions))
        reply = self._receiver.reply if batch.step == 1 else b""
        extension = self._receiver.extend(np.column_stack([bits, np.ones(len(bits), np.bool_)]))
        return len(reply).to_bytes(4, "little") + reply + extension

    def take_transferred(self, batch: Batch, answer: bytes) -> None:
        """Take an answer of an oblivious transfer, and fit the model after the last one."""
        if batch.split == "sums":
            if self._sums is None or self._before_labels is None:
                raise RuntimeError("noisy sums without a transfer before them")
            if len(answer) != 16 + 4 * self._sums.size:
                raise InvalidMessage(f"noisy sums in {len(answer)} bytes")
            deviation, grid = np.frombuffer(answer[:16], "<f8").tolist()
            # As an honest label owner's: a power of two that leaves the noise room in 32 bits.
            is_grid = 1 <= grid <= 2**20 and math.frexp(grid)[0] == 0.5
            least = 0.01 * math.sqrt(len(self._sums))
            if not (is_grid and least <= deviation <= 2**31 / grid):
                raise InvalidMessage(
                    f"noisy sums of deviation {deviation:g} in steps of 1/{grid:g}"
                )
            theirs = np.frombuffer(answer[16:], "<u4").reshape(self._sums.shape)
            sums = (self._sums - theirs).astype(np.uint32).astype(np.int32) / grid
            self.released = torch.tensor(batch.positions), torch.from_numpy(sums), deviation
            places = np.array_split(batch.positions, -(-len(batch.positions) // FIT_ROWS))
            self.score.fit_sums(
                lambda: map(self.rows, places), sums, deviation, *self._before_labels
            )
            self._sums = None
        elif self._receiver is None:
            self._receiver = Receiver(self.score.num_bits + 1, answer, self._scores)
        else:
            self._receiver.take(answer)
            if batch.closes_split:
                self._sums, self._receiver = self._receiver.sums.astype(np.int64), None

    def state_dict(self) -> State:
        """Return everything that a step changes, or raise RuntimeError."""
        if not self.is_between_steps:
            raise RuntimeError("no state in the middle of a step")
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "random": optimizers.random_state(self._device),
            "gpu": gpu_of(self._device),
            "ranks": [] if self._parallel is None else self._parallel.random_states(),
            "sums": self._sums if self._sums is None else torch.from_numpy(self._sums),
            "released": self.released,
            # Found again elsewhere, a row's bits may be others.
            "of_bits": self.score.of_bits if self._before_labels is not None else None,
        }

    def load_state_dict(self, state: State) -> None:
        check_same_gpu(self._device, state)
        self._waiting.clear()
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        optimizers.set_random_state(self._device, state["random"])
        go_on(self._parallel, state["ranks"])
        self._noisy.clear()
        self._receiver = None
        self._sums = None if state["sums"] is None else state["sums"].numpy()
        self.released = state["released"]
        if state["of_bits"] is not None:
            self.score.of_bits = state["of_bits"].to(self._device)

    def embed(self, features: Features) -> Tensor:
        return predict_in_blocks(self.model, features)


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient at the activation is the received one.

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

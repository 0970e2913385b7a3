"""The passive party's half of the network: its computations, without any rule of the protocol.

With a ``pipeline_depth`` above 1 the model learns from other gradients before that of an activation
arrives. Autograd would then refuse the backward pass, because optimizers change weights in place.
So whatever the backward pass needs of parameters that train, and of buffers, is copied when the
activation is computed (weight stashing: Narayanan et al., "PipeDream", SOSP 2019, section 3.3). The
first layer's weights and embedding tables are not among it, however large they are. Masks of
dropout and all other values of the forward pass belong to the activation anyway.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.lr_scheduler import LambdaLR

from splitveil.common.data.features import FeatureEncoder, Features, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models import optimizers
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.data_parallel import (
    Beginning,
    DataParallelModel,
    Learner,
    Take,
    begin,
    go_on,
)
from splitveil.common.models.dense import (
    ConvBottom,
    ConvTop,
    MlpBottom,
    MlpTop,
    WideDeepBottom,
    WideDeepTop,
)
from splitveil.common.models.device import check_same_gpu, gpu_of, speed_up, to_device, to_host
from splitveil.common.models.factory import Trial, build_bottom_model, one_at_a_time
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.ranks import Ranks
from splitveil.common.models.ridge import Numbers
from splitveil.common.record.model_files import EarlierModel, PretrainedWeights
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.wording import suggest
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.feature_values import feature_values
from splitveil.passive_party.settings import PassiveSettings


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


class BottomTrainer(ComponentsTrainer):
    """Bottom model, optimiser and features; the model's activations are (batch, *cut_shape)."""

    def __init__(
        self,
        learner: Learner,
        features: Features,
        *,
        data_digest: str = "",
        parallel: DataParallelModel | None = None,
    ) -> None:
        model, self._optimizer, self._schedule, self._device = learner[:4]
        super().__init__(model, features.to(self._device), data_digest=data_digest)
        self._taps = (parallel or learner).taps
        self._parallel = parallel
        self._waiting: deque[Tensor] = deque()
        """Activations whose gradients are to come, with their graphs, in the order of the course.
        """

    @property
    def is_between_steps(self) -> bool:
        return not self._waiting and super().is_between_steps

    def rows(self, positions: Positions) -> Features:
        return self._features.rows(torch.from_numpy(positions.copy()).to(self._device))

    def arrays(self, positions: Positions) -> Features:
        return self.rows(positions).arrays()

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

    def state_dict(self) -> State:
        return super().state_dict() | {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "random": optimizers.random_state(self._device),
            "gpu": gpu_of(self._device),
            "ranks": [] if self._parallel is None else self._parallel.random_states(),
        }

    def load_state_dict(self, state: State) -> None:
        check_same_gpu(self._device, state)
        self._waiting.clear()
        super().load_state_dict(state)
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        optimizers.set_random_state(self._device, state["random"])
        go_on(self._parallel, state["ranks"])

    def embed(self, features: Features) -> Tensor:
        return to_host(predict_in_blocks(self.model, features))

    def activations(self, positions: Positions) -> Numbers:
        found: Numbers = self.embed(self.rows(positions)).flatten(1).double().numpy()
        return found


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


@one_at_a_time
def fresh_model(
    settings: PassiveSettings,
    encoder: FeatureEncoder | FeatureShapes,
    cut_shape: Sequence[int] | None = None,
    trial: Trial | None = None,
) -> nn.Module:
    """Build the bottom model, by default with the contract's cut."""
    shape, seed = cut_shape or settings.contract.cut_shape, settings.model_seed
    return build_bottom_model(settings.bottom_model, encoder, shape, seed=seed, trial=trial)


def learner_of_rank(
    settings: PassiveSettings, device: torch.device, beginning: Beginning
) -> Learner:
    """Return the learner of a rank above 0."""
    model = fresh_model(settings, beginning.shapes or FeatureShapes())
    return learner_of(settings, model.to(device), device, beginning.total_steps)


def learner_of(
    settings: PassiveSettings, model: nn.Module, device: torch.device, total_steps: int
) -> Learner:
    contract = settings.contract
    speed_up(model, settings.autocast, compiled=settings.compile)
    taps = tapped(settings, model)
    optimizer = build_optimizer(settings.optimizer, model)
    schedule = LambdaLR(optimizer, lambda step: contract.schedule.factor(step, total_steps))
    depth = contract.pipeline_depth
    keeping = partial(stashing_weights, model) if depth > 1 else nullcontext
    return Learner(model, optimizer, schedule, device, taps, depth, keeping)


def tapped(settings: PassiveSettings, model: nn.Module) -> dict[str, Take]:
    """Tap the layers before the cut that the adversary looks at; the cut itself needs none."""
    if settings.adversary is None or not settings.adversary.labels:
        return {}
    layers = [name for name in settings.adversary.layers if name != "cut"]
    return {name: LayerTap(named_layer(model, name)).take for name in layers}


@one_at_a_time
def build_trainer(
    settings: PassiveSettings,
    encoder: FeatureEncoder,
    features: Features,
    rows: AlignedRows,
    weights: Sequence[PretrainedWeights | ComponentsBottom | EarlierModel],
    device: Any,
    ranks: Ranks | None,
    data_digest: str,
) -> BottomTrainer:
    """Build the model, put all of these weights into it in turn, and begin its training."""
    trial = Trial((*rows.order.batch_sizes, *(() if ranks is None else (0,))), device)
    model, total_steps = (
        fresh_model(settings, encoder, trial=trial),
        rows.total_steps(settings.contract),
    )
    for one in weights:
        one.put_into(model)
    learner = learner_of(settings, model.to(device), device, total_steps)
    parallel, features = None, features.to(device)
    if ranks is not None:
        beginning = Beginning(encoder.shapes, None, total_steps)
        parallel = begin(ranks, learner, beginning, features, rows.splits["train"])
    return BottomTrainer(learner, features, data_digest=data_digest, parallel=parallel)

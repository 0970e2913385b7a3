"""Builds optimizers from settings, and handles what a model trains with.

Large embedding tables get sparse gradients. Beside the optimizers: a model's training mode, the
weights that learn, and its random draws.
"""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import (
    SPARSE_FROM_ROWS,
    AdamSettings,
    AdamWOptimizer,
    OptimizerSettings,
    SgdOptimizer,
)
from splitveil.common.text.wording import suggest

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)


def _uncompiled(kind: type[_OptimizerT]) -> type[_OptimizerT]:
    """Return the same optimizer without the decorators that keep torch's compiler out of methods.

    To do so they import it, which takes a second and 70 MiB, and nothing compiles an optimizer.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step})


SGD, Adam = _uncompiled(optim.SGD), _uncompiled(optim.Adam)
AdamW, SparseAdam = _uncompiled(optim.AdamW), _uncompiled(optim.SparseAdam)


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> Optimizer:
    """Return an optimizer for a model's parameters.

    Large embedding tables are switched to sparse gradients where no step has to move every row.

    Raises:
        SettingsError: the model has no trainable parameters, or none that ``rates`` names.
    """
    momentum = settings.momentum if isinstance(settings, SgdOptimizer) else 0.0
    large = set[int]()
    for part in () if settings.weight_decay or momentum else model.modules():
        if not isinstance(part, nn.Embedding) or not part.weight.requires_grad:
            continue
        if part.num_embeddings >= SPARSE_FROM_ROWS:
            part.sparse = True
            large.add(id(part.weight))
    check_names(settings.rates, model, "optimizer.rates")
    trainable = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not trainable:
        raise SettingsError("optimizer: the model has no trainable parameters")
    rate, parts = settings.learning_rate, list[Optimizer]()
    dense = _groups(settings, (one for one in trainable if id(one[1]) not in large))
    sparse = _groups(settings, (one for one in trainable if id(one[1]) in large))
    match settings:
        case SgdOptimizer():
            every = _groups(settings, trainable)
            decay = settings.weight_decay
            parts.append(SGD(every, lr=rate, momentum=momentum, weight_decay=decay))
        case AdamSettings():
            kind = AdamW if isinstance(settings, AdamWOptimizer) else Adam
            if dense:  # fused: one kernel for each step, a third of the time on a CPU
                parts.append(kind(dense, lr=rate, weight_decay=settings.weight_decay, fused=True))
            if sparse:
                parts.append(SparseAdam(sparse, lr=rate))
    built = parts[0] if len(parts) == 1 else JoinedOptimizer(parts)
    if settings.clip_norm is not None:
        built.register_step_pre_hook(partial(_clip, settings.clip_norm))
    return built


def _groups(
    settings: OptimizerSettings, weights: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    groups: dict[float, list[nn.Parameter]] = {}
    for name, weight in weights:
        fitting = max((part for part in settings.rates if is_in(name, [part])), key=len, default="")
        groups.setdefault(settings.rates.get(fitting, settings.learning_rate), []).append(weight)
    return [{"params": weights, "lr": rate} for rate, weights in groups.items()]


def _clip(limit: float, optimizer: Optimizer, *_given: Any) -> None:
    """Scale all gradients so that their common norm is at most ``limit``.

    Not in place, as torch's own function does: two weights may share a gradient. That function
    refuses sparse gradients, too.
    """
    every = (weight for group in optimizer.param_groups for weight in group["params"])
    gradients = {
        weight: weight.grad.coalesce() if weight.grad.is_sparse else weight.grad
        for weight in every
        if weight.grad is not None
    }
    values = [one.values() if one.is_sparse else one for one in gradients.values()]
    factor = limit / get_total_norm(values).clamp(min=limit)
    for weight, gradient in gradients.items():
        weight.grad = gradient * factor


class JoinedOptimizer(Optimizer):
    """Several optimizers for disjoint parameters, used as one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([{**group} for part in parts for group in part.param_groups], {})
        self._share_groups()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001 (torch's signature)
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Raises:
            ValueError: the state has another number of parts.
        """
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        """Expose the parts' own groups, so that a schedule that changes them here changes them."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def in_training_mode(model: nn.Module) -> None:
    """Put a model into training mode, unless it is in that mode already.

    `Module.train` sets an attribute of every module in the model. In each step that would take
    longer than the arithmetic of a small layer.
    """
    if not model.training:
        model.train()


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are trained, in order; finding them takes a walk over all modules."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def freeze(model: nn.Module, parts: Iterable[str], setting: str) -> None:
    """Freeze the parameters that settings name."""
    check_names(parts, model, setting)
    for name, weight in model.named_parameters():
        if is_in(name, parts):
            weight.requires_grad = False


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Return whether a parameter is one of those that settings name, or in one of the modules."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def check_names(parts: Iterable[str], model: nn.Module, setting: str) -> None:
    """Check that each name belongs to a parameter or a module with parameters."""
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(is_in(name, [part]) for name in names):
            raise SettingsError(
                f"{setting}: the model has no parameter {part!r}{suggest(part, names)}"
            )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's, for dropout after a checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

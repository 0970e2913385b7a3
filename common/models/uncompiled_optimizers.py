"""torch's optimizers without torch's compiler.

torch keeps its compiler from tracing some methods of optimizers. For that it imports all of
`torch._dynamo`, SymPy included, when the first optimizer is built: more than a second of CPU time
and 70 MiB of memory, in a process that compiles no optimizer. Here the same methods are taken as
they were before torch wrapped them; `functools.wraps` keeps them for that purpose. Steps have the
same bits. An optimizer that is to be compiled has to be torch's own.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _before_wrapping(method: MethodT) -> MethodT:
    return cast("MethodT", inspect.unwrap(method))


def _step_of(optimizer: type[Optimizer]) -> Any:  # each optimizer's step is overloaded
    """Return an optimizer's step without gradients.

    torch's wrapper, for its profiler and for hooks, takes longer than the step of a small model:
    only an optimizer with hooks takes that way.
    """
    plain = torch.no_grad()(_before_wrapping(optimizer.step))
    watched = Optimizer.profile_hook_step(plain)

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        has_hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return (watched if has_hooks else plain)(self, closure)

    step.hooked = True  # type: ignore[attr-defined] # or torch would wrap it for every optimizer
    return step


class Uncompiled(Optimizer):
    """An optimizer that never imports torch's compiler, whatever optimizer it is mixed into."""

    add_param_group = _before_wrapping(Optimizer.add_param_group)
    load_state_dict = _before_wrapping(Optimizer.load_state_dict)
    state_dict = _before_wrapping(Optimizer.state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001 (torch's)
        """Clear the gradients."""
        if not set_to_none:
            _before_wrapping(Optimizer.zero_grad)(self, set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class Adam(Uncompiled, torch.optim.Adam):
    """`torch.optim.Adam`."""

    step = _step_of(torch.optim.Adam)


class SparseAdam(Uncompiled, torch.optim.SparseAdam):
    """`torch.optim.SparseAdam`."""

    step = _step_of(torch.optim.SparseAdam)


class Sgd(Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD`."""

    step = _step_of(torch.optim.SGD)

"""Makes training cheaper by other arithmetic: autocast, and compiled models.

Both change only how training batches are computed. Evaluations and predictions stay what they are
without them, in float32 and not compiled, so that a prediction has the bits of the evaluation and
does not depend on the rows beside it. Weights, gradients at the cut layer and everything that a
defense computes stay float32 as well.
"""

import threading
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from splitveil.common.errors import SettingsError
from splitveil.common.models.device import missing_compiler

Autocast = Literal["bfloat16"] | None


def speed_up(model: nn.Module, autocast: Autocast, *, compiled: bool = False) -> None:
    """Let a model compute its training batches faster, in place; its weights keep their names.

    Autocast sets the dtype of matrix products and convolutions in training mode; None keeps the
    weights' dtype. A compiled model is compiled at its first batch. Raises SettingsError without a
    compiler.
    """
    if autocast is not None:
        casting = _Casting()
        model.register_forward_pre_hook(casting.enter)
        model.register_forward_hook(casting.leave, always_call=True)
    if compiled:
        _compile_training(model)


def _compile_training(model: nn.Module) -> None:
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if missing := missing_compiler(device):
        raise SettingsError(f"compile: there is no {missing} on this machine")
    # torch's compiler takes seconds to import.
    from torch._functorch import config as functorch_config  # noqa: PLC0415

    # The active party goes backwards through one graph twice: for the answer, and to learn.
    functorch_config.donated_buffer = False
    # Other numbers of rows, as of the last batch of an epoch, do not compile it again.
    model.compile(dynamic=True)
    compiled = cast("Callable[..., Any]", model._compiled_call_impl)  # noqa: SLF001
    plain = model._call_impl  # noqa: SLF001

    def call(*given: Any, **named: Any) -> Any:
        return (compiled if model.training else plain)(*given, **named)

    model._compiled_call_impl = call  # noqa: SLF001


class _Casting:
    """The hooks that put a forward pass of training under autocast."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __deepcopy__(self, _memo: object) -> "_Casting":
        return _Casting()

    def enter(self, model: nn.Module, _given: Any) -> None:
        if model.training:
            parameter = next(model.parameters(), None)
            kind = "cpu" if parameter is None else parameter.device.type
            self._own.context = torch.autocast(kind, torch.bfloat16)
            self._own.context.__enter__()

    def leave(self, _model: nn.Module, _given: Any, outputs: Any) -> Any:
        """End, also after an error, and return what was computed in float32."""
        context = self._own.__dict__.pop("context", None)
        if context is None:
            return None
        context.__exit__(None, None, None)
        return outputs.float() if isinstance(outputs, Tensor) else None

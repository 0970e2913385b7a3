"""The device that a party computes on: chosen, named, made to repeat its bits, and sped up.

Autocast and compiled models change only how training batches are computed. Evaluations and
predictions stay what they are without them, in float32 and not compiled, so that a prediction has
the bits of the evaluation and does not depend on the rows beside it. Weights, gradients at the cut
layer and everything that a defense computes stay float32 as well.

Tensors are copied between it and the host with one wait in each direction. A tensor that goes to
the wire is copied behind what the device has still to compute for it, and only that copy is waited
for: what was queued after it, as the top model's learning, goes on meanwhile. A tensor that came
over the wire is copied on a stream of its own, beside what the device is computing, and the host
does not wait at all.

Both copies use pinned memory, because a GPU cannot copy while it computes without it. Pinned blocks
come from torch's caching allocator: it hands the same blocks out again, step for step, and not
before the copies from or to them are done. Nobody else may therefore write into a tensor that was
handed out here, and nothing has to be released. On the CPU both functions do what `Tensor.to` does.
"""

import functools
import importlib.util
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from splitveil.common.errors import SettingsError
from splitveil.common.text.imports import first_line

_logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia")
TensorT = TypeVar("TensorT", bound=Tensor)

_memory: Any = torch.utils.deterministic  # it sets the attribute, which no stub has


def torch_device(device: str, local_rank: int = 0) -> torch.device:
    """Return the device that a party's setting means.

    Raises:
        SettingsError: torch cannot use it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise SettingsError(f"device: {device} needs a GPU, and {_why_no_gpu()}")
    index = local_rank if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise SettingsError(
            f"device: expected one of the {torch.cuda.device_count()} CUDA device(s) that torch "
            f"sees, got cuda:{index}"
        )
    return torch.device("cuda", index)


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} cannot use one: {first_line(error)}"
    return f"torch {torch.__version__} sees none"


def use_device(device: str, local_rank: int = 0, *, deterministic: bool = True) -> torch.device:
    """Return the device that a party's setting means, and set how torch computes on a GPU.

    Products and convolutions in float32 are then not rounded to TF32. With ``deterministic``, what
    has no algorithm that repeats its bits raises RuntimeError. Both hold for the whole process.

    Raises:
        SettingsError: torch cannot use it.
    """
    found = torch_device(device, local_rank)
    if found.type == "cpu":
        if device == "auto" and (any(_DRIVER.glob("gpus/*")) or any(Path("/dev").glob("nvidia?"))):
            _logger.warning("device: auto: this machine has a GPU, but %s: the CPU", _why_no_gpu())
        return found
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False  # it may choose another algorithm each time
    if deterministic:
        # Read when CUDA starts, which it has not done so far in a party's process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # those of cuDNN, too
        # Else every new tensor is filled with NaN first; nothing here reads one before it is set.
        _memory.fill_uninitialized_memory = False
    return found


@contextmanager
def restoring_devices() -> Iterator[None]:
    """Restore afterwards what ``use_device`` sets."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    fills = _memory.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = flags
        _memory.fill_uninitialized_memory = fills
        if deterministic != torch.are_deterministic_algorithms_enabled():  # it imports for seconds
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def device_in_words(device: torch.device) -> str:
    """Name a device; a GPU with its model, its driver and torch's version of CUDA."""
    if device.type == "cpu":
        return "cpu"
    driver = ""
    if (version := _DRIVER / "version").is_file():
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", version.read_text())
        driver = "" if found is None else f"driver {found[1]}, "
    return f"{device} ({gpu_of(device)}, {driver}CUDA {torch.version.cuda})"


def gpu_of(device: torch.device) -> str:
    """Return the model of a GPU; empty for a CPU, whose model is not asked for."""
    return "" if device.type == "cpu" else torch.cuda.get_device_name(device)


def check_same_gpu(device: torch.device, state: Mapping[str, Any]) -> None:
    """Refuse the state of a run that had another GPU, or a CPU instead of one.

    Raises:
        SettingsError: the ``gpu`` of the state is another one than the device.
    """
    now, then = (name or "a CPU" for name in (gpu_of(device), state.get("gpu", "")))
    if now != then:
        raise SettingsError(
            f"device: this run was computed on {then}, and would go on with {now}, which rounds "
            f"otherwise: what is asked or answered again would have other bits than the first "
            f"time. Resume it on {then}, or start over with --fresh at both parties"
        )


def missing_compiler(device: torch.device) -> str:
    """Return what torch lacks to compile a model for a device; empty if nothing."""
    variable, names = ("CXX", ("g++", "clang++", "c++"))
    what = "C++ compiler (such as g++)"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton (pip install triton), by which torch compiles for a GPU,"
        variable, names, what = "CC", ("gcc", "clang", "cc"), "C compiler (such as gcc) for Triton"
    own = os.environ.get(variable)
    return "" if any(map(shutil.which, (*([own] if own else []), *names))) else what


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


def to_host(values: TensorT) -> TensorT:
    """Copy a tensor to the host's memory, and wait until it is there."""
    if values.device.type != "cuda":
        return cast("TensorT", values.to("cpu"))
    found = _pinned(values).copy_(values, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(values.device))
    done.synchronize()
    return cast("TensorT", found)  # a defended gradient stays one


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy a tensor from the host's memory to a device, without waiting for it.

    What is computed with the copy on the current stream waits for it on the device.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device, dtype)
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        copied = _pinned(values).copy_(values).to(device, non_blocking=True)
    current.wait_stream(side)
    # The allocator must not give the memory away while the current stream still uses it.
    copied.record_stream(current)
    return copied.to(dtype)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

"""A CUDA device for machines without one: it computes on the CPU, and refuses what CUDA refuses.

Its tensors claim ``cuda:0``, hold their content on the CPU, and look to torch's own code like those
of the device ``meta``, because a build of torch for the CPU knows no backward pass on CUDA. Refused
are tensors of two devices in one operation, where CUDA refuses them; a generator of the other
device; numpy; and, with deterministic algorithms, what has no such algorithm on CUDA.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call, override"
# Torch's own types say less than it allows.

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from splitveil.common.models import device

CUDA = torch.device("cuda", 0)
NAME = "Pretended GPU"

_aten = torch.ops.aten
_MOVES = {_aten._to_copy, _aten.copy_, _aten.copy, _aten._foreach_copy_}
_INDEXING = {_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_}
_INDEXING |= {_aten._index_put_impl_, _aten._unsafe_index_put}
# These take a number on the CPU as well, and are no pointwise operations.
_TAKE_NUMBERS = {_aten.fill_, _aten.fill, _aten.index_fill, _aten.index_fill_}
_TAKE_NUMBERS |= {_aten.masked_fill, _aten.masked_fill_}
_NEVER_DETERMINISTIC = re.compile(
    r"(_?adaptive_(max|avg)_pool[23]d|avg_pool3d|fractional_max_pool[23]d|grid_sampler_[23]d"
    r"|reflection_pad[123]d|upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)|_ctc_loss"
    r")_backward|max_unpool[23]d|nll_loss2d_\w+|histc|put_?"
)
"""What `torch.use_deterministic_algorithms` documents, by the names of the operations."""


class CudaTensor(Tensor):
    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> "CudaTensor":
        places: dict[str, Any] = {}
        if content.layout is torch.strided:
            places = {"strides": content.stride(), "storage_offset": content.storage_offset()}
        made: CudaTensor = Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            **places,
            dtype=content.dtype,
            layout=content.layout,
            device=torch.device("meta"),
            requires_grad=False,
        )
        made.content = content.detach()
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __getitem__(self, index: Any) -> Tensor:
        # Of a list torch makes an index on the device ``meta``, without content.
        given = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(
            tuple(torch.tensor(one) if isinstance(one, list) else one for one in given)
        )

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def new(self, *values: Any) -> Tensor:
        # What torch's SparseAdam means by it.
        return torch.sparse_coo_tensor(*values, check_invariants=False)

    def record_stream(self, _stream: object) -> None:
        """Do nothing: memory is not given away here."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _PretendedCuda(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing it takes seconds

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    there = [one for one in tensors if isinstance(one, CudaTensor)]
    if any(one.is_meta for one in tensors):
        raise AssertionError(f"{func}: a tensor without content")
    asked, kind = kwargs.get("device"), func.overloadpacket
    is_there = bool(there) if asked is None else asked.type != "cpu"
    if there:
        _refuse(func, args, tensors)
    generator = kwargs.get("generator")
    if generator is not None and (generator._cdata in _of_cuda) != is_there:
        raise RuntimeError("a generator of one device for a tensor on the other")
    named = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if "device" in named:
        named["device"] = torch.device("cpu")
    draws = is_there and generator is None and torch.Tag.nondeterministic_seeded in func.tags
    with _generator.drawing() if draws else nullcontext():
        found = func(*tree_map(_content, args), **tree_map(_content, named))
    changed = _changed(func, args, kwargs)
    if changed is not None:
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():
                func(*args, **kwargs)  # for the shape that torch's own code sees
        return changed
    if kind in _MOVES and asked is None:
        is_there = isinstance(args[0], CudaTensor)
    return tree_map(_wrapped, found) if is_there else found


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operation writes into and returns; None if it is no such one."""
    returned = func._schema.returns
    if not returned or returned[0].alias_info is None or not returned[0].alias_info.is_write:
        return None
    given = zip(func._schema.arguments, args, strict=False)
    values = {one.name: value for one, value in given} | kwargs
    written = [
        values[one.name]
        for one in func._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return written[0] if len(returned) == 1 else tuple(written)


def _content(value: Any) -> Any:
    return value.content if isinstance(value, CudaTensor) else value


def _wrapped(value: Any) -> Any:
    return CudaTensor(value) if isinstance(value, Tensor) else value


def _refuse(func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    kind, name = func.overloadpacket, func._schema.name.removeprefix("aten::")
    here = [one for one in tensors if not isinstance(one, CudaTensor)]
    if kind in _INDEXING:
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError(f"{name}: indices on cuda:0 of a tensor on the CPU")
        here = [one for one in args[2:3] if not isinstance(one, CudaTensor)]
    is_lenient = torch.Tag.pointwise in func.tags or name.startswith("_foreach")
    is_lenient |= kind in _TAKE_NUMBERS or kind in _INDEXING
    numbers = is_lenient and all(one.ndim == 0 for one in here)
    writes = any(
        one.alias_info is not None
        and one.alias_info.is_write
        and isinstance(value, Tensor)
        and not isinstance(value, CudaTensor)
        for one, value in zip(func._schema.arguments, args, strict=False)
    )
    if here and kind not in _MOVES and (writes or not numbers):
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device: cuda:0 and cpu")
    if torch.are_deterministic_algorithms_enabled():
        first = args[0] if args else None
        floating = isinstance(first, Tensor) and first.is_floating_point()
        weighted = name == "bincount" and len(args) > 1 and args[1] is not None
        summing = floating and name in {"cumsum", "cumsum_"}
        finding = func in {_aten.median.dim, _aten.nanmedian.dim}
        if _NEVER_DETERMINISTIC.fullmatch(name) or weighted or summing or finding:
            raise RuntimeError(f"{name} does not have a deterministic implementation")


_of_cuda: set[int] = set()


class _Generator(torch.Generator):
    _device: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> "_Generator":
        made: _Generator = super().__new__(cls)
        made._device = torch.device(device)
        # torch makes another object of it on the way to an operation.
        (_of_cuda.add if made._device.type == "cuda" else _of_cuda.discard)(made._cdata)
        return made

    @property
    def device(self) -> torch.device:
        return self._device

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw what torch's own generator for the CPU would draw from this one."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.get_state())
        try:
            yield
        finally:
            self.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)


_generator = _Generator(CUDA)


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Pretend that there is a GPU, in this thread and in those that are started meanwhile."""
    run = threading.Thread.run

    def running(thread: threading.Thread) -> None:
        with _in_this_thread():
            run(thread)

    event = SimpleNamespace(record=_nothing, synchronize=_nothing)
    stream = SimpleNamespace(
        wait_event=_nothing, wait_stream=_nothing, record_event=lambda: event, device=CUDA
    )
    replaced: dict[str, Callable[..., Any]] = {
        "_lazy_init": _nothing,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": _nothing,
        "set_device": lambda *_: None,
        "get_device_name": lambda *_: NAME,
        "manual_seed_all": _generator.manual_seed,
        "get_rng_state": lambda *_: _generator.get_state(),
        "set_rng_state": lambda state, *_: _generator.set_state(state),
        "Event": lambda **_: event,
        "Stream": lambda *_: stream,
        "current_stream": lambda *_: stream,
        "stream": lambda *_: nullcontext(),
        "is_bf16_supported": lambda *_: True,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(threading.Thread, "run", running)
        patch.setattr(device, "_side_stream", lambda _device: stream)
        _generator.manual_seed(0)
        with _in_this_thread():
            yield


@contextmanager
def _in_this_thread() -> Iterator[None]:
    # Otherwise `torch.tensor` copies what it has read without asking the mode.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _PretendedCuda():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, as there is nothing to wait for."""

"""Copies tensors between a device and the host, and waits for the device once in each direction.

A tensor that goes to the wire is copied behind what the device has still to compute for it, and
only that copy is waited for: what was queued after it, as the top model's learning, goes on
meanwhile. A tensor that came over the wire is copied on a stream of its own, beside what the device
is computing, and the host does not wait at all.

Both copies use pinned memory, because a GPU cannot copy while it computes without it. Pinned blocks
come from torch's caching allocator: it hands the same blocks out again, step for step, and not
before the copies from or to them are done. Nobody else may therefore write into a tensor that was
handed out here, and nothing has to be released. On the CPU both functions do what `Tensor.to` does.
"""

import functools
from typing import TypeVar, cast

import torch
from torch import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)

_CPU = torch.device("cpu")


def to_host(values: TensorT) -> TensorT:
    """Copy a tensor to the host's memory, and wait until it is there."""
    if values.device.type != "cuda":
        return cast("TensorT", values.to(_CPU))
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

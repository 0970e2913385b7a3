"""Keeps the weights with which an activation was computed until its gradient arrives.

With a ``pipeline_depth`` above 1 the model learns from other gradients in between. Autograd would
then refuse the backward pass, because optimizers change weights in place. So whatever the backward
pass needs of the model's parameters and buffers is copied when the activation is computed (weight
stashing: Narayanan et al., "PipeDream", SOSP 2019, section 3.3). The first layer's weights and
embedding tables are not among it, however large they are. Masks of dropout and all other values of
the forward pass belong to the activation anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _Kept(NamedTuple):
    tensor: Tensor
    version: int
    """Counts the changes of the tensor; another number later means that it is another value."""


@contextmanager
def keeping_weights(model: nn.Module) -> Iterator[None]:
    """Let the backward pass of what is computed within use the model's weights and buffers of now.

    A function that keeps a weight by other means than ``save_for_backward``, or computes the
    forward pass again (``torch.utils.checkpoint``), gets the weights of its backward pass instead.
    """
    owned = {_storage(tensor) for tensor in chain(model.parameters(), model.buffers())}

    def keep(tensor: Tensor) -> _Kept:
        if tensor.layout is torch.strided and _storage(tensor) in owned:
            tensor = tensor.clone()
        return _Kept(tensor, _version(tensor))

    with saved_tensors_hooks(keep, _used):
        yield


def _used(kept: _Kept) -> Tensor:
    # Hooks take the place of autograd's own check.
    if _version(kept.tensor) != kept.version:
        raise RuntimeError(
            "the model changes a tensor in place that its own backward pass needs, of shape "
            f"{tuple(kept.tensor.shape)}"
        )
    return kept.tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 (documented under "In-place correctness checks")

"""Batch normalisation over a batch of which each rank has some rows.

torch's SyncBatchNorm is for GPUs only, and for ranks that all have rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.modules.batchnorm import _BatchNorm  # the base of them all

from splitveil.common.errors import SettingsError
from splitveil.common.models.ranks import Ranks

_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_together: list[Ranks] = []  # the last counts, in all threads: a GPU's backward has its own


@contextmanager
def computing_together(ranks: Ranks) -> Iterator[None]:
    """Let batches be those of all ranks, each of which has to do the same."""
    _together.append(ranks)
    try:
        yield
    finally:
        _together.pop()


def with_whole_batches(model: nn.Module) -> None:
    """Let a model's batch normalisations look at the batches of all ranks.

    Raises SettingsError for a class of the user's own.
    """
    if model._compiled_call_impl is not None:  # noqa: SLF001
        _stay_uncompiled()
    for name, part in model.named_modules():
        if type(part) in _OF_TORCH:
            part.__class__ = WholeBatchNorm
        elif isinstance(part, _BatchNorm) and not isinstance(part, WholeBatchNorm):
            raise SettingsError(
                f"{name}: several processes cannot compute {type(part).__name__} over a whole "
                f"batch: use a batch normalisation of torch.nn itself, or one process"
            )


@cache
def _stay_uncompiled() -> None:
    """Let compiled models call what the ranks compute together as it is."""
    as_it_is = torch.compiler.disable(WholeBatchNorm.forward)  # type: ignore[no-untyped-call]
    WholeBatchNorm.forward = as_it_is  # type: ignore[method-assign]


class WholeBatchNorm(_BatchNorm):
    """Batch normalisation, (rows, channels, ...), over the rows of all ranks while they train."""

    def _check_input_dim(self, values: Tensor) -> None:
        if values.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {values.ndim}")

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values, of the same shape; also of no rows."""
        if not _together or not self.training:
            return super().forward(values)
        ranks = _together[-1]
        self._check_input_dim(values)
        over = [0, *range(2, values.ndim)]
        shape = [1, -1, *[1] * (values.ndim - 2)]
        exact = values.float()
        own = exact.new_full((1,), exact.numel() / max(1, exact.shape[1]))
        total = _sum(ranks, torch.cat([exact.sum(over), own]))
        sums, count = total[:-1], total[-1].detach()
        if count <= 1:
            raise ValueError("expected more than 1 value per channel when training")
        centred = exact - (mean := sums / count).view(shape)
        variance = _sum(ranks, centred.square().sum(over)) / count
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), share)  # type: ignore[union-attr]
            unbiased = variance.detach() * count / (count - 1)
            self.running_var.lerp_(unbiased, share)  # type: ignore[union-attr]
        found: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(values.dtype)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, values: Tensor) -> Tensor:
        ctx.ranks = ranks
        ranks.add_up([total := values.clone()])
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ranks.add_up([total := gradients[0].clone()])
        return None, total


def _sum(ranks: Ranks, values: Tensor) -> Tensor:
    found: Tensor = _Sum.apply(ranks, values)  # type: ignore[no-untyped-call]
    return found

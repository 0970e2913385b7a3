"""Batch normalisation over a batch of which each rank has some rows.

torch's SyncBatchNorm is for GPUs only, and for ranks that all have rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.modules.batchnorm import _BatchNorm  # the base of them all

from splitveil.common.errors import SettingsError
from splitveil.common.models.ranks import Ranks

_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def with_whole_batches(model: nn.Module) -> None:
    """Let a model's batch normalisations look at whole batches, while all ranks compute them.

    Raises SettingsError for a class of the user's own.
    """
    if model._compiled_call_impl is not None:  # noqa: SLF001
        # Compiled models call it as it is.
        as_it_is = torch.compiler.disable(WholeBatchNorm.forward)  # type: ignore[no-untyped-call]
        WholeBatchNorm.forward = as_it_is  # type: ignore[method-assign]
    for name, part in model.named_modules():
        if type(part) in _OF_TORCH:
            part.__class__ = WholeBatchNorm
        elif isinstance(part, _BatchNorm) and not isinstance(part, WholeBatchNorm):
            raise SettingsError(
                f"{name}: several processes cannot compute {type(part).__name__} over a whole "
                f"batch: use a batch normalisation of torch.nn itself, or one process"
            )


class WholeBatchNorm(_BatchNorm):
    """Batch normalisation, (rows, channels, ...), over the rows of all ranks while they train."""

    ranks: ClassVar[Ranks | None] = None
    """Set while all ranks compute the same, in all threads: a GPU's backward has its own."""

    def _check_input_dim(self, values: Tensor) -> None:
        if values.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {values.ndim}")

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values, of the same shape; also of no rows."""
        ranks = self.ranks
        if ranks is None or not self.training:
            return super().forward(values)
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


def _sum(ranks: Ranks, values: Tensor) -> Tensor:
    def added(own: Tensor) -> Tensor:
        ranks.add_up([total := own.detach().clone()])
        return total

    return computed(lambda gradient: [added(gradient)], added(values), values)


class _Computed(Function):
    @staticmethod
    def forward(ctx: Any, gradients_at: Any, values: Tensor, *_at: Tensor) -> Tensor:
        ctx.gradients_at = gradients_at
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.gradients_at(gradients[0])


def computed(
    gradients_at: Callable[[Tensor], Sequence[Tensor | None]], values: Tensor, *at: Tensor
) -> Tensor:
    """Return values as a function of some tensors, whose gradients follow from the values'."""
    found: Tensor = _Computed.apply(gradients_at, values, *at)  # type: ignore[no-untyped-call]
    return found

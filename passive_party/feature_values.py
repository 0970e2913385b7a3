"""Converts this party's features to plain numbers, which an attack could use without training."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from splitveil.common.data.features import Features, image_as_float

_MOST_LEVELS = 64  # of a column of categories, the most frequent; the others are taken together
_MOST_TOKENS = 256
_SIDE = 16  # of an image, in pixels
_MOST_VALUES = 2**27
_ROWS_AT_ONCE = 2**12


def feature_values(features: Features) -> Tensor | None:
    """Return numbers, categories as shares of levels, counts of tokens, and small images.

    Of shape (rows, values), float16, on the CPU; None if they would take more than 256 MiB.
    """
    columns = () if features.categorical is None else features.categorical.T
    levels = [_levels(column) for column in columns]
    found = torch.empty(0, 0, dtype=torch.float16)
    every = torch.arange(len(features), device=features.parts()[0].device)
    for at in torch.split(every, _ROWS_AT_ONCE):
        places = at.cpu()
        values = _values(features.rows(at), [(ranks[places], count) for ranks, count in levels])
        if not len(found):
            if values.shape[1] * len(features) > _MOST_VALUES:
                return None
            found = torch.empty(len(features), values.shape[1], dtype=torch.float16)
        found[places] = values
    return found


def _values(features: Features, levels: list[tuple[Tensor, int]]) -> Tensor:
    parts = [] if features.numeric is None else [features.numeric.cpu()]
    parts += [one_hot(ranks, count) for ranks, count in levels]
    if features.tokens is not None:
        slots = features.tokens.cpu().clamp(max=_MOST_TOKENS)
        counts = torch.zeros(len(slots), _MOST_TOKENS + 1)
        parts.append(counts.scatter_add_(1, slots, torch.ones_like(slots, dtype=counts.dtype)))
    if features.image is not None:
        image = image_as_float(features.image.cpu())
        parts.append(adaptive_avg_pool2d(image, _SIDE).flatten(1))
    largest = torch.finfo(torch.float16).max
    return torch.cat(parts, dim=1).clamp(-largest, largest).half()


def _levels(column: Tensor) -> tuple[Tensor, int]:
    """Return the rank of each value by its frequency, (rows,) int64, and the number of ranks."""
    _, levels, counts = np.unique(column.cpu(), return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-counts, kind="stable"))
    return torch.from_numpy(np.minimum(rank[levels], _MOST_LEVELS)), min(
        len(rank), _MOST_LEVELS + 1
    )

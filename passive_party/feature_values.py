"""This party's features as plain numbers: what an attack could look at without any training."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from splitveil.common.data.features import Features, image_as_float

_MOST_LEVELS = 64  # of a column of categories, the most frequent; the others are taken together
_MOST_TOKENS = 256
_SIDE = 16  # of an image, in pixels


def feature_values(features: Features) -> Tensor:
    """Return numbers, categories as shares of levels, counts of tokens, and small images.

    Of shape (rows, values), float16, on the CPU.
    """
    parts = []
    if features.numeric is not None:
        parts.append(features.numeric)
    if features.categorical is not None:
        parts += [_levels(column) for column in features.categorical.T]
    if features.tokens is not None:
        slots = features.tokens.clamp(max=_MOST_TOKENS)
        counts = torch.zeros(len(slots), _MOST_TOKENS + 1, device=slots.device)
        parts.append(counts.scatter_add_(1, slots, torch.ones_like(slots, dtype=counts.dtype)))
    if features.image is not None:
        parts.append(adaptive_avg_pool2d(image_as_float(features.image), _SIDE).flatten(1))
    largest = torch.finfo(torch.float16).max
    return torch.cat(parts, dim=1).clamp(-largest, largest).half().cpu()


def _levels(column: Tensor) -> Tensor:
    _, levels, counts = np.unique(column.cpu(), return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-counts, kind="stable"))
    return one_hot(torch.from_numpy(np.minimum(rank[levels], _MOST_LEVELS))).to(column.device)

"""Noise along each row, of any size per row: the common part of the defenses that align norms."""

from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.noise import NoiseSource


class RowNoise(NamedTuple):
    """Noise along each row."""

    directions: Tensor  # (batch, cut_dim), unit vectors; random where a row has none
    scalars: Tensor  # (batch, 1), how far along them
    norms: Tensor  # (batch,) float64, root-mean-square
    bare: Tensor  # (bare rows,) indices of the rows without a direction


def missing_norms(norms: Tensor) -> Tensor:
    """Return the root-mean-square noise norm that takes each row to the largest, (batch,)."""
    largest = norms.max()
    shares = norms / torch.where(largest > 0, largest, 1.0)
    return ((1 - shares) * (1 + shares)).clamp_(min=0).sqrt_().mul_(largest)


def stretch_rows(
    rows: Tensor, norms: Tensor, noise_norms: Tensor, scalars: Tensor, noise: NoiseSource
) -> RowNoise:
    """Draw noise along each row.

    Args:
        rows: raw gradients, (batch, cut_dim).
        norms: norms of the rows, (batch,) float64.
        noise_norms: root-mean-square noise norm of each row, (batch,) float64, on the rows' device.
            A row without a direction gets the batch's largest norm instead, without a random size.
        scalars: one standard normal number per row, (batch, 1), like the rows; overwritten.
        noise: the source of random directions.
    """
    scalars *= noise_norms[:, None].to(rows.dtype)
    directions = rows / norms[:, None].to(rows.dtype)
    bare = (norms < torch.finfo(rows.dtype).tiny).nonzero().squeeze(1)
    if len(bare):
        largest = norms.max()
        random = noise.standard_normal((len(bare), rows.shape[1]), rows)
        directions[bare] = random.div_(torch.linalg.vector_norm(random, dim=1, keepdim=True))
        scalars[bare] = largest.to(rows.dtype)
        noise_norms = noise_norms.index_fill(0, bare, float(largest))
    return RowNoise(directions, scalars, noise_norms, bare)

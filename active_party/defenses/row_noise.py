"""Noise of equal size in all directions, and noise along each row, of any size per row."""

from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import Defended, DefenseReport, LeakCharge, release
from splitveil.active_party.defenses.noise import NoiseSource


def isotropic_noise(rows: Tensor, noise_norm: float, noise: NoiseSource) -> Tensor:
    """Draw noise of the rows' shape whose expected squared norm per row is ``noise_norm``^2."""
    deviation = noise_norm / rows.shape[1] ** 0.5
    return noise.standard_normal(tuple(rows.shape), rows).mul_(deviation)


def noise_alone(rows: Tensor, gradients: Tensor, largest: float, noise: NoiseSource) -> Defended:
    """Answer with noise of the batch's largest norm without any signal, which reveals nothing.

    Args:
        rows: raw gradients, (batch, cut_dim).
        gradients: the same gradients in the shape of the answer.
        largest: their largest norm.
        noise: the only source of randomness.
    """
    report = DefenseReport(
        noise_power=largest * largest, sum_kl_after=0.0, leak_auc_bound=0.5, charge=LeakCharge(0.0)
    )
    return Defended(release(isotropic_noise(rows, largest, noise), gradients), report)


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

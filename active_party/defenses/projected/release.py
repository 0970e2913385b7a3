"""The release of a stage: noisy sums of labels, the only thing that is ever released of them.

    t = round(A^T y + sigma z)        z standard normal

Labels y are 0 and 1, one-hot, or numbers within 0 and 1: shares of a range, on a grid of their own
(`on_label_grid`). The sums are linear in y, so that any two values of one label move them by |A_i|
at most, as 0 and 1 do, and one bound covers them all.

A^T y is exact (see `design`). The sum with the noise is rounded to a grid of about sigma/16, which
changes its variance by 1/3000. This is post-processing of the Gaussian mechanism, and it is what
makes the claim hold for floating point (Mironov, CCS 2012, shows how low bits betray sums that were
not rounded). The argument: couple the computed z with a true normal number. Both come from the same
uniform numbers by the formula of Box and Muller; they differ by the uniform words' steps (2^-63
for the radius, 2^-63 of a turn for the angle) and by rounding errors, relatively 2^-50. Near u = 0
the radius sqrt(-2 ln u) changes by 2^-64/(u r) within a step, on average over u by less than 2^-57.
The expected distance of computed and true sigma z is therefore below 2^-47 sigma. Released values
differ only where an edge of the grid lies between the two, which has probability of at most
distance/step <= 2^-47 sigma / (sigma/32) = 2^-42. Words that would lead beyond 9.42 standard
deviations have probability 2^-63. So the computed release of r sums in S stages is within r S 2^-42
in total variation of the exact mechanism's: for 10,000 numbers no AUC is larger by more than 1e-8.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.projected.design import BLOCK_ROWS, Design


class Release(NamedTuple):
    """What one stage reveals about the labels."""

    sums: Tensor  # noisy A^T y, (r,) or (r, classes), float64, multiples of `release_grid`
    sigma: float  # standard deviation of the noise in each of them


def draw_release(design: Design, labels: Tensor, sigma: float, normals: NoiseSource) -> Release:
    """Add up the weighted labels and put noise on the sums.

    Labels are 0 and 1, or numbers within 0 and 1 on their grid, (N,), or one-hot rows, (N,
    classes). Sigma is that of `stage_sigma`. The normals are never to be asked twice for one stage.
    """
    if not 0 < sigma < math.inf:
        raise ValueError(f"expected a positive, finite sigma, got {sigma}")
    sums = exact_sums(design, labels)
    noise = sigma * normals.standard_normal(tuple(sums.shape), like=sums)
    grid = release_grid(sigma)
    return Release(((sums + noise) / grid).round() * grid, sigma)


def release_grid(sigma: float) -> float:
    """Return the step of released sums: the power of 2 within sigma/32 to sigma/16."""
    return 2.0 ** math.floor(math.log2(sigma / 16))


def on_label_grid(labels: Tensor) -> Tensor:
    """Round numbers within 0 and 1 so that sums of them are exact, (N,) float64.

    The grid has steps of 2^-16, and of more from 2^22 rows on, so that products with weights, of
    up to 2^14 steps, add up to less than 2^53. That rounding is far below any noise.
    """
    steps = 2.0 ** min(16, 38 - math.ceil(math.log2(max(1, len(labels)))))
    return (labels.double() * steps).round() / steps


def exact_sums(design: Design, labels: Tensor) -> Tensor:
    """Return A^T y, (r,) or (r, classes) float64, exactly."""
    labels = labels.detach().cpu()
    if labels.ndim not in (1, 2) or len(labels) != design.num_rows:
        raise ValueError(
            f"expected labels of {design.num_rows} rows, got shape {tuple(labels.shape)}"
        )
    _check_values(labels)
    sums = torch.zeros((design.rank, *labels.shape[1:]), dtype=torch.float64)
    for start in range(0, design.num_rows, BLOCK_ROWS):
        weights = design.block(start).double()
        sums += weights.T @ labels[start : start + BLOCK_ROWS].double()
    return sums


def _check_values(labels: Tensor) -> None:
    if labels.ndim == 1:
        is_within = bool(((labels >= 0) & (labels <= 1)).all())
        if not is_within or not torch.equal(on_label_grid(labels), labels.double()):
            raise ValueError("expected labels of 0 and 1, or numbers between on their grid")
        return
    is_binary = bool(((labels == 0) | (labels == 1)).all())
    if not is_binary or not bool((labels.sum(dim=1) == 1).all()):
        raise ValueError("expected labels of 0 and 1, one-hot for several classes")

"""Distributions of one batch's gradients by class, before and after a defense.

Two figures per example, as in Figure 2 of Li et al., "Label Leakage and Protection in Two-Party
Split Learning" (ICLR 2022), for the raw gradients and for the defended ones:

    log10_norm   log10 |g|
    cosine       cos(g, m) with the mean raw gradient m of the batch's positives

The paper uses one random positive as m, so that its figure depends on the draw. A positive's own
gradient is left out of its m: a mean that contains the example itself finds a resemblance in pure
noise. After a defense, m is still the mean of raw gradients, as in the ``cosine`` attack.

Bins are 0.05 wide and have the same edges in every batch and run, so that classes, sides of the
defense and steps can be compared. An example only leaves a count in a bin of its class.

The peer waits for this: the operations and their shapes depend on no label.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

LOG10_NORM, COSINE = "log10_norm", "cosine"

BINS_PER_UNIT = 20
"""A bin of ``log10_norm`` is a twentieth of a decade, about 12 %, and one of ``cosine`` 0.05."""

MIN_PER_CLASS = 5
"""With fewer examples of a class, counts would list examples instead of showing a distribution: all
counts are 0."""

_DECADES = 6
"""A norm more than this many decades below the largest is treated as this far below it."""


class Histogram(NamedTuple):
    """One figure of one batch: counts per bin, the bins shared by all series."""

    figure: str
    edges: tuple[float, ...]
    """Rising, one more than there are bins."""

    counts: Mapping[str, tuple[int, ...]]
    """``<before|after>/<negative|positive>`` -> examples in each bin."""


def gradient_distributions(
    raw: Tensor, defended: Tensor, labels: Tensor
) -> tuple[Histogram, Histogram] | None:
    """Count norms and cosines of a batch by class, before and after the defense.

    The counts are for the label owner's own files. They must not reach the peer: they would say
    how many examples of a batch are positive, and how to recognise them by their gradients.

    Both gradients are (batch, ...), labels 0 or 1, (batch,). Returns ``log10_norm`` and ``cosine``;
    None where a class has fewer than ``MIN_PER_CLASS`` rows, or all gradients are zero.
    """
    if len(labels) < 2 * MIN_PER_CLASS:
        return None
    positive = (labels.reshape(-1) == 1).long()
    rarer = torch.minimum(positive.sum(), (1 - positive).sum())
    counted = (rarer >= MIN_PER_CLASS).long()
    before = raw.detach().flatten(1).to(torch.float64)
    after = defended.detach().flatten(1).to(torch.float64)
    norms = {
        "before": torch.linalg.vector_norm(before, dim=1),
        "after": torch.linalg.vector_norm(after, dim=1),
    }
    largest = torch.stack([side.max() for side in norms.values()]).max()
    if not largest > 0:
        return None
    reference = _mean_of_other_positives(before, positive)
    log_norms = {
        side: torch.log10(norm.clamp_min(largest * 10.0**-_DECADES)) for side, norm in norms.items()
    }
    cosines = {"before": _cosine(before, reference), "after": _cosine(after, reference)}
    return (
        _histogram(LOG10_NORM, log_norms, positive, counted),
        _histogram(COSINE, cosines, positive, counted, -1, 1),
    )


def spread_epochs(num_epochs: int) -> frozenset[int]:
    """Return the epochs to count: 0, 1, 2, 4, 8, ... and the last, as most changes happen early."""
    doubling = (2**power for power in range(num_epochs.bit_length()))
    return frozenset({0, *doubling, num_epochs - 1} & set(range(num_epochs)))


def _mean_of_other_positives(gradients: Tensor, positive: Tensor) -> Tensor:
    """Return, for each example, the mean gradient of the positives without itself."""
    weight = positive.to(gradients.dtype)[:, None]
    others = (positive.sum() - weight).clamp_min(1.0)
    return ((weight * gradients).sum(dim=0) - weight * gradients) / others


def _cosine(gradients: Tensor, reference: Tensor) -> Tensor:
    """Return each row's cosine to its reference; 0 where either is zero."""
    norms = torch.linalg.vector_norm(gradients, dim=1) * torch.linalg.vector_norm(reference, dim=1)
    products = (gradients * reference).sum(dim=1)
    return torch.where(norms > 0, products / norms, 0.0)


def _histogram(
    figure: str,
    values: Mapping[str, Tensor],
    positive: Tensor,
    counted: Tensor,
    low: int | None = None,
    high: int | None = None,
) -> Histogram:
    """Count values in bins that cover all of them, or reach from ``low`` to ``high``."""
    bins = {side: (of_side * BINS_PER_UNIT).floor().long() for side, of_side in values.items()}
    everything = torch.cat(list(bins.values()))
    first = int(everything.min()) if low is None else low * BINS_PER_UNIT
    last = int(everything.max()) if high is None else high * BINS_PER_UNIT - 1
    num_bins = last - first + 1
    counts = {}
    for side, indices in bins.items():
        inside = indices.clamp(first, last) - first
        of_both = torch.bincount(inside + num_bins * positive, minlength=2 * num_bins) * counted
        counts[f"{side}/negative"] = tuple(of_both[:num_bins].tolist())
        counts[f"{side}/positive"] = tuple(of_both[num_bins:].tolist())
    edges = tuple(edge / BINS_PER_UNIT for edge in range(first, last + 2))
    return Histogram(figure, edges, counts)

"""Scores of one batch: functions of gradients and side information that score each example.

Scores are float64 on the gradients' device, (batch,), finite for finite gradients, and higher for
examples that look more like positives. Gradients and activations are (batch, ...), hints
(hints, ...), at least one. `splitveil.common.privacy.attacks` lists the functions.

``spectral`` does not centre the batch. With a logistic loss g = (p - y) w, centring removes the
part of w that the mean carries, which costs most where the classes are unbalanced and noise
covers the gradients (Li et al., "Label Leakage and Protection in Two-Party Split Learning", ICLR
2022, for the norm and cosine attacks; Sun et al., "Label Leakage and Protection from Forward
Embedding in Vertical Federated Learning", 2022, for the spectral attack).

The attacks that cluster compare gradients by their directions and activations by their distances
(Liu et al., "Clustering Label Inference Attack against Practical Split Learning", 2022, section 4;
"Similarity-based Label Inference Attack against Training and Inference of Split Learning", IEEE
TIFS 2024).

``residual_energy`` scores rows by their energy outside the directions in which the batch stretches
most. Gradients of a network hardly vary outside a few strong directions. Noise that only one class
gets, as that of fresh ``marvell`` across the gap of the class means (Li et al., ICLR 2022, theorem
1), is almost alone in the rest, so that the energy of a row there reveals its class, however strong
the noise is.

With right-singular vectors v_1, v_2, ... of the batch's rows g_i and their singular values s_j, the
score is

    log sum_j <g_i, v_j>^2 / (s_j^2 + r),  j beyond the strongest quarter,

where r is the mean of these s_j^2 times the number of columns over the number of rows. A batch of
many rows therefore counts each weak direction alike, by its own spread. A batch with fewer rows
than columns counts them by their energy: there, every row would lie in the span of its own
direction, and each would have the same share.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy import gradient_rows
from splitveil.common.privacy.gradient_rows import (
    gram,
    nearness,
    settled_centres,
    top_direction_of_rows,
    turned_by_skewness,
    two_clusters,
)

_MAX_VOTERS = 2048
_SMALLEST = torch.finfo(torch.float64).tiny

_NEGLIGIBLE = 1e-10  # a residual below this fraction of the batch's largest entry is rounding error


class KnownClasses(NamedTuple):
    """Gradients and labels of examples other than the ones to be scored."""

    negatives: Tensor  # (negatives, ...), at least one
    positives: Tensor  # (positives, ...), at least one


def norm(gradients: gradient_rows.Gradients) -> Tensor:
    """Score each example by the Euclidean norm of its gradient."""
    known = gradient_rows.prepared(gradients)
    return gradient_rows.in_unit(known.lengths, known.unit)


def cosine(gradients: gradient_rows.Gradients, reference: Tensor) -> Tensor:
    """Score each example by the cosine with a positive's gradient; 0 where either is zero."""
    known = gradient_rows.prepared(gradients)
    direction = gradient_rows.direction_of(reference, known.rows.device)
    lengths = known.lengths * torch.linalg.vector_norm(direction)
    inner = known.rows @ direction
    # A length of zero makes the product zero, too.
    cosines: Tensor = inner / lengths.clamp_(min=_SMALLEST)
    return cosines.clamp_(-1.0, 1.0)


def cosine_majority(gradients: gradient_rows.Gradients) -> Tensor:
    """Score each example by how few of up to 2,048 voters' gradients point in its direction.

    Values in [-1, 0]; -1/2 where the gradient is zero.
    """
    rows = gradient_rows.prepared(gradients).rows
    voters = rows[:: -(-len(rows) // _MAX_VOTERS)]
    agrees = (rows @ voters.T > 0).sum(dim=1)
    share = -agrees.double() / max(len(voters), 1)
    return torch.where((rows != 0).any(dim=1), share, -0.5)


def hint_inner_product(gradients: gradient_rows.Gradients, hints: Tensor) -> Tensor:
    """Score each example by its largest inner product with a known positive's gradient."""
    (rows, known), unit = gradient_rows.rows_together(gradients, hints)
    return gradient_rows.in_unit(gradient_rows.in_unit((rows @ known.T).amax(dim=1), unit), unit)


def hint_distance(gradients: gradient_rows.Gradients, hints: Tensor) -> Tensor:
    """Score each example by minus its smallest distance to a known positive's gradient."""
    (rows, known), unit = gradient_rows.rows_together(gradients, hints)
    return gradient_rows.in_unit(-_nearest(rows, known), unit)


def mean(gradients: gradient_rows.Gradients, classes: KnownClasses) -> Tensor:
    """Score each example by how much nearer it is to the positives' mean than the negatives'."""
    return _nearer_to_positives(gradients, classes, lambda rows: rows.mean(dim=0))


def median(gradients: gradient_rows.Gradients, classes: KnownClasses) -> Tensor:
    """Score as `mean` does, with the classes' coordinate-wise medians."""
    return _nearer_to_positives(gradients, classes, _medians)


def lda(gradients: gradient_rows.Gradients, classes: KnownClasses) -> Tensor:
    """Score each example by Fisher's linear discriminant: the best direction for normal noise.

    The pooled covariance S is shrunk towards its mean variance, by d / (n + d) for n gradients of
    dimension d, so that a discriminant exists for few gradients, and for gradients that all share
    one direction.

    Scores in a unit of their own.
    """
    (rows, negatives, positives), _ = gradient_rows.rows_together(gradients, *classes)
    centre_0, centre_1 = negatives.mean(dim=0), positives.mean(dim=0)
    within, _ = gradient_rows.scaled(torch.cat([negatives - centre_0, positives - centre_1]))
    between, _ = gradient_rows.scaled(centre_1 - centre_0)
    largest = torch.finfo(torch.float64).max
    return (rows @ _discriminant(within, between)).clamp(-largest, largest)


def spectral(gradients: gradient_rows.Gradients) -> Tensor:
    """Score each example by its projection on the top direction, with the long tail up."""
    return turned_by_skewness(gradient_rows.prepared(gradients).top.projections)


def regress_out(gradients: gradient_rows.Gradients, activations: Tensor) -> Tensor:
    """Score each example by `spectral`, on the residual of its gradient given its activation.

    The prediction of a model of the activations does not depend on the example's label; the
    residual does.

    Zeros if the activations, with a constant, explain everything.
    """
    rows, unit = gradient_rows.prepared(gradients).rows, gradient_rows.prepared(gradients).unit
    known, _ = gradient_rows.scaled(activations.detach().flatten(start_dim=1).to(rows))
    known = torch.cat([known, known.new_ones(len(known), 1)], dim=1)
    basis, strengths, _ = torch.linalg.svd(known, full_matrices=False)
    rounding = strengths.amax() * max(known.shape) * torch.finfo(known.dtype).eps
    basis = basis * (strengths > rounding)
    rest = rows - basis @ (basis.T @ rows)
    rest = torch.where(rest.abs() > _NEGLIGIBLE * rows.abs().amax(), rest, 0.0)
    return gradient_rows.in_unit(spectral(rest), unit)


def kmeans(gradients: gradient_rows.Gradients) -> Tensor:
    """Score each example by how much nearer its direction is to the smaller of two clusters."""
    return gradient_rows.prepared(gradients).clusters.projections


def activation_kmeans(activations: gradient_rows.Gradients) -> Tensor:
    """Score each example by how much nearer it is to the smaller of two clusters of activations."""
    rows, _ = gradient_rows.scaled(gradient_rows.prepared(activations).rows)
    centred = rows - rows.mean(dim=0)
    return two_clusters(centred, top_direction_of_rows(centred).projections).projections


def kmeans_hint(gradients: gradient_rows.Gradients, hints: Tensor, other_hints: Tensor) -> Tensor:
    """Score each example by how much nearer its direction is to the known positive's cluster.

    k-means begins at one hint of each class, which names the clusters (Basu, Banerjee and Mooney,
    "Semi-supervised Clustering by Seeding", ICML 2002).

    The first hint is used, and one gradient of each other class.
    """
    (rows, known, others), _ = gradient_rows.rows_together(gradients, hints[:1], other_hints)
    directions = gradient_rows.unit_rows(rows)
    near = nearness(
        directions, settled_centres(directions, gradient_rows.unit_rows(torch.cat([known, others])))
    )
    return near[:, 0] - near[:, 1:].amax(dim=1)


def nearest_hint(gradients: gradient_rows.Gradients, hints: Tensor, other_hints: Tensor) -> Tensor:
    """Score each example by its largest cosine with a known positive less that with others."""
    (rows, known, others), _ = gradient_rows.rows_together(gradients, hints, other_hints)
    directions = gradient_rows.unit_rows(rows)
    with_positives = (directions @ gradient_rows.unit_rows(known).T).amax(dim=1)
    return with_positives - (directions @ gradient_rows.unit_rows(others).T).amax(dim=1)


def activation_nearest_hint(
    activations: gradient_rows.Gradients, hints: Tensor, other_hints: Tensor
) -> Tensor:
    """Score each example by how much nearer its activation is to a known positive's."""
    (rows, known, others), unit = gradient_rows.rows_together(activations, hints, other_hints)
    return gradient_rows.in_unit(_nearest(rows, others) - _nearest(rows, known), unit)


def _discriminant(within: Tensor, between: Tensor) -> Tensor:
    """Return the direction x of (W'W + r I) x = b, from the smaller of the two Gram matrices."""
    num_rows, row_dim = within.shape
    ridge = within.square().sum() / num_rows
    if not ridge > 0:
        return between
    if row_dim <= num_rows:
        gram = within.T @ within
        gram.diagonal().add_(ridge)
        direction: Tensor = torch.linalg.solve(gram, between)
        return direction
    gram = within @ within.T
    gram.diagonal().add_(ridge)
    weights: Tensor = torch.linalg.solve(gram, within @ between)
    return (between - within.T @ weights) / ridge


def _nearer_to_positives(
    gradients: gradient_rows.Gradients, classes: KnownClasses, centre: Callable[[Tensor], Tensor]
) -> Tensor:
    (rows, negatives, positives), unit = gradient_rows.rows_together(gradients, *classes)
    nearer = _distances(rows, centre(negatives)) - _distances(rows, centre(positives))
    return gradient_rows.in_unit(nearer, unit)


def _nearest(rows: Tensor, hints: Tensor) -> Tensor:
    return torch.stack([_distances(rows, hint) for hint in hints]).amin(dim=0)


def _distances(rows: Tensor, centre: Tensor) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(rows - centre, dim=1)
    return distances


def _medians(rows: Tensor) -> Tensor:
    # torch's median is the lower one of an even number of values, and on CUDA refuses to repeat.
    ascending, count = rows.sort(dim=0).values, len(rows)
    return (ascending[(count - 1) // 2] + ascending[count // 2]) / 2


STRONGEST = 0.25  # share of a batch's directions that count as strong

_MAX_DIRECTIONS = 64
"""A batch with more rows and more columns than this is folded to this number of columns first: more
directions would cost several times as much, and reveal little more."""

_NEGLIGIBLE_ENERGY = 1e-12  # of the strongest direction's energy, below which it is rounding error

_LOWEST = 1e-30  # fraction of the batch's largest energy below which all energies count alike

_MAX_MOVES = 50


def residual_energy(gradients: gradient_rows.Gradients) -> Tensor:
    """Score each example by the log energy of its gradient outside the batch's strong directions.

    Finite scores, (batch,), whose smaller cluster is above 0: positives are the minority. Zeros if
    no example differs from the others outside the strong directions.
    """
    rows = _folded(gradient_rows.prepared(gradients).rows)
    if not rows.numel():
        return rows.new_zeros(len(rows))
    # Each row's energy in the weak directions, in units of these.
    num_rows, row_dim = rows.shape
    is_tall = num_rows >= row_dim
    powers, vectors = torch.linalg.eigh(gram(rows.T if is_tall else rows))  # ascending
    num_weak = len(powers) - min(round(STRONGEST * len(powers)), len(powers) - 1)
    weak = powers[:num_weak].clamp(min=0.0)
    if is_tall:
        shares = (rows @ vectors[:, :num_weak]).square_()
    else:
        shares = vectors[:, :num_weak].square() * weak
    ridge = weak.mean() * (row_dim / num_rows) + _NEGLIGIBLE_ENERGY * powers[-1].clamp(min=0.0)
    energies = shares @ torch.where(weak + ridge > 0, 1.0 / (weak + ridge), 0.0)
    largest = energies.amax()
    if not largest > 0:
        return torch.zeros_like(energies)
    return rare_cluster_up((energies / largest).clamp_(min=_LOWEST).log_())


def rare_cluster_up(scores: Tensor) -> Tensor:
    """Turn and shift scores so that the smaller of two clusters lies above 0."""
    values = np.sort(scores.cpu().numpy())
    if not len(values) or values[0] == values[-1]:
        return torch.zeros_like(scores)
    sums = np.concatenate(([0.0], values.cumsum()))
    border, below = (values[0] + values[-1]) / 2, 0
    for _ in range(_MAX_MOVES):
        before, below = below, int(np.searchsorted(values, border, side="right"))
        if below in (0, len(values), before):
            break
        above = (sums[-1] - sums[below]) / (len(values) - below)
        border = (sums[below] / below + above) / 2
    centred = scores - float(border)
    return centred if 2 * (len(values) - below) <= len(values) else -centred


def _folded(rows: Tensor) -> Tensor:
    """Add up columns with random signs where both sides of a batch are large.

    Directions that the rows share stay few, and noise in all directions stays that.
    """
    if min(rows.shape) <= _MAX_DIRECTIONS:
        return rows
    folded = rows.new_zeros(len(rows), _MAX_DIRECTIONS)
    signs = _signs(rows.shape[1]).to(rows.device)
    parts = torch.split(rows, _MAX_DIRECTIONS, dim=1)
    for part, of_part in zip(parts, torch.split(signs, _MAX_DIRECTIONS), strict=True):
        folded[:, : part.shape[1]].addcmul_(part, of_part)
    return folded


@lru_cache(maxsize=8)
def _signs(row_dim: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], row_dim))

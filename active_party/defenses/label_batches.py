"""Labels of a batch, told as noisy projections on what the batch's activations span.

LabelDP-Pro (Ghazi et al., "LabelDP-Pro: Learning with Label Differential Privacy via Projections",
ICLR 2024) adds Gaussian noise to the sum of a batch's gradients, as DP-SGD does, and projects the
noisy sum on what gradients of that batch could be at all, which the features determine. The peer of
a split model does not receive a sum but a gradient r_i J_i per example, and the active party does
not know the bottom model's weights. Neither is an obstacle: a noisy sum that was projected on the
span of the examples' gradients is a sum of those gradients with other residuals. So those residuals
can be told, example by example, instead of the sum: they are the same function of the same release.
Here directions at the cut take the place of the bottom model's gradients:

    F   (rows, m)   constant, logit and standardised activations, clipped to +-4
    U   (rows, r)   the `rank` leading left singular vectors of F
    A   (rows, r)   the rows of U divided by their lengths (at least sqrt(0.1 r/rows)), scaled so
                    that the longest is 1: (nearly) every row is charged alike
    t = A^T y + k z         the release; z standard normal, drawn again for every answer
    y^ = p + q A (q A^T A + k^2 I)^-1 (t - A^T p)        the targets

y^ is the mean of y given t if y were normal around the prediction p with variance q; q is the mean
of p (1 - p). It is clipped to between 0 and 1. F, U, A and p do not depend on the batch's labels
other than through earlier releases, whatever the peer sends, so the label of row i moves t by |A_i|
<= 1: the answer is a Gaussian mechanism with mu <= 1/k, and answers add up exactly, mu^2 = E/k^2
over E epochs (Dong, Roth and Su 2022, corollary 2). With more than two classes y is one-hot, a
label moves two columns, and the noise is k sqrt 2.

Floating point: A is rounded towards 0 to multiples of 2^-20 and the noise to the nearest such
multiple; the sums are exact, so that the release is that of an unrounded A^T y + k z, rounded.

The noise per direction is that of 1 label among the rows of a batch, and falls with their number;
projections of the whole table pay it once for all of its rows.
"""

import math

import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import (
    Defended,
    DefendedGradient,
    Defense,
    DefenseReport,
    LabelledRows,
    LabelMove,
    LeakCharge,
    RawBatch,
)
from splitveil.active_party.defenses.label_mechanisms import ProjectedBatches, label_leak
from splitveil.active_party.defenses.label_strength import leak_auc_of
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.common.privacy.covers import Covers

_GRID = 2.0**20
_LIMIT = 4.0
"""Size to which standardised values are clipped: no row carries a direction alone."""
_LOWEST_LEVERAGE = 0.1
"""In units of the mean leverage: rows below it would get weights without bound."""
_NEGLIGIBLE = 1e-10
"""Share of the largest squared singular value below which a direction is rounding."""


class BatchProjections(Defense):
    """Trains on targets rebuilt from noisy projections, and releases their gradients unchanged.

    Args:
        mechanism: strength and rank.
        noise: the only source of randomness.
        num_classes: number of classes.
    """

    def __init__(
        self, mechanism: ProjectedBatches, noise: NoiseSource, num_classes: int = 2
    ) -> None:
        self._mechanism = mechanism
        self._noise = noise
        self._num_classes = num_classes
        sum_kl, _ = label_leak(mechanism, num_classes)
        self._report = DefenseReport(
            noise_power=0.0,  # the noise is in the targets: nothing is added to the gradient
            sum_kl_after=sum_kl,
            leak_auc_bound=leak_auc_of(mechanism, num_classes),
            charge=LeakCharge(sum_kl, covers=Covers.ANYBODY, is_gaussian=True),
        )

    def targets(self, batch: LabelledRows, /) -> Tensor:
        """Return the targets of a batch, (batch,), or with several classes (batch, classes).

        Raises:
            ValueError: a prediction is not a number.
        """
        logits = batch.logits().double()
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model's predictions hold NaN or infinity")
        is_binary = logits.ndim == 1
        labels, predicted = batch.labels.long(), torch.sigmoid(logits)
        deviation = self._mechanism.noise_ratio
        if is_binary:
            truth, predicted = labels.double()[:, None], predicted[:, None]
        else:
            truth = torch.nn.functional.one_hot(labels, self._num_classes).double()
            predicted, deviation = torch.softmax(logits, dim=1), math.sqrt(2) * deviation
        design = design_of(features_of(batch.activation, logits), self._mechanism.rank)
        normal = self._noise.standard_normal((design.shape[1], truth.shape[1]), design)
        told = noisy_sums(design, truth, deviation * normal)
        targets = rebuild(design, told, predicted, deviation).float()
        return targets.squeeze(1) if is_binary else targets

    def defend(self, batch: RawBatch) -> Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        as_classes(batch.labels, as_rows(batch.gradients), self._num_classes)
        return Defended(DefendedGradient(batch.gradients.detach()), self._report)

    def charge_covering(self, move: LabelMove, /) -> LeakCharge:
        """Return the same charge: every gradient is a function of features and releases."""
        return move.report.charge


def features_of(activation: Tensor, logits: Tensor) -> Tensor:
    """Return what a batch's labels are projected on: constant, logits and activations.

    Args:
        activation: (rows, *cut_shape).
        logits: (rows,) or (rows, classes).

    Returns:
        (rows, features) float64: a column of ones, and standardised columns between -4 and 4, of
        which constant ones are 0.
    """
    columns = torch.cat(
        (logits.double().reshape(len(logits), -1), activation.double().flatten(start_dim=1)), dim=1
    )
    centred = columns - columns.mean(dim=0)
    # Measured by their largest, so that no square overflows; a constant column has rounding alone.
    size = centred.abs().amax(dim=0)
    is_constant = size <= 1e-12 * columns.abs().amax(dim=0)
    centred = centred / torch.where(is_constant, 1.0, size)
    spread = centred.square().mean(dim=0).sqrt()
    scaled = (centred / torch.where(is_constant, 1.0, spread)).clamp(-_LIMIT, _LIMIT)
    ones = torch.ones(len(columns), 1, dtype=torch.float64, device=columns.device)
    return torch.cat((ones, scaled.masked_fill(is_constant, 0.0)), dim=1)


def design_of(features: Tensor, rank: int) -> Tensor:
    """Return the weights of each row's label in each projection.

    Args:
        features: (rows, features) float64, finite, with a column of ones.
        rank: largest number of projections.

    Returns:
        (rows, projections) float64, multiples of 2^-20. No row is longer than 1.
    """
    num_rows, num_features = features.shape
    # The smaller of the two Gram matrices; both have the same eigenvalues above 0.
    is_tall = num_features <= num_rows
    gram = features.T @ features if is_tall else features @ features.T
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values[-rank:], vectors[:, -rank:]
    kept = values > _NEGLIGIBLE * values[-1]
    basis = vectors[:, kept]
    if is_tall:
        basis = features @ (basis / values[kept].sqrt())
    leverage = basis.square().sum(dim=1, keepdim=True)
    design = basis / leverage.clamp(min=_LOWEST_LEVERAGE * basis.shape[1] / num_rows).sqrt()
    longest = torch.linalg.vector_norm(design, dim=1).max()
    scaled: Tensor = design / longest * (1 - 2.0**-40)
    return (scaled * _GRID).trunc() / _GRID


def noisy_sums(design: Tensor, truth: Tensor, noise: Tensor) -> Tensor:
    """Return the release of a batch: the projections of its labels, plus noise.

    Args:
        design: A, (rows, projections) float64, as ``design_of`` returns it.
        truth: labels of 0 and 1, (rows, columns) float64.
        noise: (projections, columns) float64.
    """
    return design.T @ truth + (noise * _GRID).round() / _GRID


def rebuild(design: Tensor, told: Tensor, predicted: Tensor, deviation: float) -> Tensor:
    """Return the expected labels of a batch, given their noisy projections.

    Args:
        design: A, (rows, projections) float64.
        told: (projections, columns), A^T y plus noise; one column, or one per class.
        predicted: p, (rows, columns): the prior's mean.
        deviation: standard deviation of the noise.

    Returns:
        (rows, columns), between 0 and 1; several columns add up to 1.
    """
    gram = design.T @ design
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    surprise = told - design.T @ predicted
    targets = torch.empty_like(predicted)
    for column, p in enumerate(predicted.T):
        variance = float((p * (1 - p)).mean())
        weights = torch.linalg.solve(variance * gram + deviation**2 * identity, surprise[:, column])
        targets[:, column] = p + variance * (design @ weights)
    targets.clamp_(0.0, 1.0)
    if targets.shape[1] == 1:
        return targets
    total = targets.sum(dim=1, keepdim=True)
    return torch.where(total > 0, targets / total, predicted)

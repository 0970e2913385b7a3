"""The noise that leaves the classes the least divergence for its power (Li et al., ICLR 2022).

Each class k gets N(0, l2k I + (l1k - l2k) D D^T / c), where D is the gap between the class means
and c = |D|^2. It is sampled as one scalar along D and, where l2k > 0, an isotropic vector.

Across D only one class gets noise, whose energy distinguishes it from the other at every strength
where the gradients hardly vary. An answer is charged only for the gap, against the noise on it.
Three classes or more follow another law, square-root water-filling (below).

Forecasts of fresh noise for two classes are estimates: the ledger does not give credit to spread,
and an answer to classes without any (u = v = 0) is charged the K of that solution at the labels'
share of positives. The solver plans for the actual spreads and may move noise away from the gap,
shift it from one class to the other, or rely on the spread instead, which leaves a class bare. This
adds an amount of the order of K^2 to K as long as the spreads are not larger than the squared gap;
the forecast is K to K (1 + K). Late in training the spreads are larger, or one of them is: then the
charge is not bounded. A batch with fewer positives than their share may be charged less.

With several classes the charge belongs to the pair left furthest apart. Spread is then not given
credit when the noise is placed, so that charges are bounded as long as the noise is fitted to the
batch itself (``statistics: batch``): every batch meets the strengths other than a power ratio s,
and a ratio leaves a pair at most (K - 1)(1 + sqrt(K - 1))/(2 s) for any means of the K classes.
Noise fitted to earlier batches may meet a gap that did not exist before.

With more than two classes, one noise distribution serves all of them. An answer is charged as if
the classes had zero spread, see ``class_statistics``. Until every class has been seen, the answer
is noise without signal. The noise is placed by square-root water-filling. All classes get the same
weight: with the batch's shares, the pair of a rare class would be the worst one, and the shares
would show in the noise. Their spread does not get credit, because a peer may predict it from its
activations.

A power ratio s is noise power s c, with c the squared distance of the two classes furthest apart.
It has to cover up to K - 1 directions: of K classes the worst pair is left between 1/s and
(K - 1)(1 + sqrt(K - 1))/(2 s), and (K - 1)/s where all are equally far apart; for K = 2 all three
are 1/s. The other strengths bound what is left of the worst pair, and meet it exactly.

Square-root water-filling finds the shared noise covariance S that separates C classes the least.

All classes get the same noise, so that its covariance reveals nothing. With m_k the classes' means,
q_k their weights and m the mean of the m_k,

    B = sum_k q_k (m_k - m)(m_k - m)^T      rank at most C - 1, eigenvalues b_k > 0

minimise tr(S^-1 B), the sum over pairs of classes of the pair's symmetrised divergence weighted by
the product of their weights, subject to tr S = P. The best S has B's eigenvectors, and
S_k = h sqrt(b_k) along them, where h uses up the power. For two classes of the same weight this is
Marvell's solution without spread, u = v = 0.

What the noise leaves between one pair of classes is (m_i - m_j)^T S^-1 (m_i - m_j), which falls as
the reciprocal of the power, for every pair.

The strength is the noise power that is asked for, in four units.

    power_ratio s        P = s c, with c the squared gap of the class means (Li et al., ICLR 2022)
    sum_kl e             the least P that leaves a divergence of at most e
    detection_error L    e = (2 - 4 L)^2, from L >= 1/2 - V/2 and V <= sqrt(e)/2
    leak_auc A           e = 4 V artanh(V) with V = 1 - sqrt(2 (1 - A)), the inverse of
                         ``leak_auc_bound``

V is the total variation of the classes. For a leak AUC the papers take e = 4 V^2 instead, which
bounds the same and asks for more: 4 V artanh(V) is larger at every A, so that less power is
enough. It is also unbounded where theirs ends at 4.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, Tag
from torch import Tensor

from splitveil.active_party.defenses import interface, section
from splitveil.active_party.defenses.class_statistics import (
    ClassMoments,
    RunningClasses,
    longest_gap,
    measure_classes,
    squared_distances,
)
from splitveil.active_party.defenses.example_keys import key_name
from splitveil.active_party.defenses.noise import NoiseSource, isotropic_noise
from splitveil.active_party.defenses.persistent import moves_of, noisy_rows, repeated_answer
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.section import ChargeModel
from splitveil.active_party.defenses.sum_kl import (
    NoiseSolution,
    power_for_sum_kl,
    solve_noise,
    sum_kl_along_gap,
    sum_kl_for_leak_auc,
)
from splitveil.common.privacy.charge import Charge, noise_digest
from splitveil.common.settings import Section, kind_by_key


class PowerRatio(Section):
    """Strength given as power: P = power_ratio * |gap of the class means|^2."""

    power_ratio: float = Field(gt=0, le=1e6)
    """Noise power in units of the squared distance of the class means (the s of ICLR 2022)."""


class SumKl(Section):
    """Strength given as the divergence that may be left: the least power that leaves no more."""

    sum_kl: float = Field(ge=1e-9, le=1e6)
    """Symmetrised divergence of the classes in one answer; 0.16 to 0.64 in the technical report."""


class DetectionError(Section):
    """Strength given as the least error of a detector along the gap: sum_kl = (2 - 4L)^2."""

    detection_error: float = Field(gt=0, lt=0.5)
    """Mean of false positive and false negative rate on one answer, L; 0.5 is guessing."""


class LeakAuc(Section):
    """Strength given as a bound: the least power that keeps attacks on the gap below an AUC.

    The gap is that of the class means: the bound is for a peer that knows class means only.
    """

    leak_auc: float = Field(gt=0.5, lt=1)
    """Largest AUC that an attack along the gap may reach on one answer; 0.5 is guessing."""


Strength = Annotated[
    Annotated[PowerRatio, Tag("power_ratio")]
    | Annotated[SumKl, Tag("sum_kl")]
    | Annotated[DetectionError, Tag("detection_error")]
    | Annotated[LeakAuc, Tag("leak_auc")],
    kind_by_key(
        "power_ratio",
        "sum_kl",
        "detection_error",
        "leak_auc",
        error_type="strength_key",
        advice="; to replace another one, set the whole: strength={power_ratio: 4}",
    ),
]
"""The strength of marvell; the key that is present names the unit."""


def allowed_sum_kl(strength: SumKl | DetectionError | LeakAuc) -> float:
    """Return the divergence that a strength allows in one answer."""
    match strength:
        case SumKl():
            return strength.sum_kl
        case DetectionError():
            return (2 - 4 * strength.detection_error) ** 2
        case LeakAuc():
            return sum_kl_for_leak_auc(strength.leak_auc)


def repeated_sum_kl(strength: Strength) -> float:
    """Return the divergence that all answers of persistent marvell leave together, 1/k^2.

    A power ratio s is k^2. A leak AUC is taken as the bound for any distributions, as for fresh
    noise and in the run's budget; the estimate Phi(1/(k sqrt 2)), exact here, lies below it.
    """
    if isinstance(strength, PowerRatio):
        return 1 / strength.power_ratio
    return allowed_sum_kl(strength)


_ALONG_THE_GAP = (
    "The charges of fresh marvell compare the class means of a batch along their gap. They do not "
    "describe a peer that looks across the gap, where one class has all the noise, and reads the "
    "labels from the energy of single rows; nor one that can tell what the model predicts for an "
    f"example: see {section.SEE}."
)


class MarvellDefense(section.LabelMoveDefense):
    """The noise that leaves the classes the least divergence for its power."""

    name: Literal["marvell"] = "marvell"

    strength: Strength = PowerRatio(power_ratio=4.0)
    """The amount of noise."""

    statistics: Literal["batch", "running"] = "batch"
    """The statistics that the noise is fitted to: this batch's, or averages over earlier batches.

    The scale of noise that is fitted to a batch reveals something about the batch's share of
    positives. Choose ``running`` if batches hold few positives and the peer might count them.
    """

    if TYPE_CHECKING:  # also those of an inner section

        def __init__(self, **settings: Any) -> None: ...

    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        noise = self._noise_source(secrets)
        if self.noise == "persistent":
            key = section.require_key(secrets.noise_key, self.name)
            model = self.charge_model(context)
            identity = noise_digest(f"marvell {model.high!r} {key_name(key)}")
            return PersistentMarvell(replace(model.charge, noise_identity=identity))
        from_earlier = self.statistics == "running"
        return Marvell(self.strength, noise, context.num_classes, from_earlier=from_earlier)

    def noise_key_strength(self, _context: interface.DefenseContext, /) -> str | None:
        return f"marvell {repeated_sum_kl(self.strength)!r}" if self.noise == "persistent" else None

    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        """Return the charge of one answer: an estimate, or with several classes a bound.

        With several classes the ledger charges the largest entry of ``pair_divergences`` at a
        spread of 0. For a power ratio s, ``worst_pair_factor`` proves that no entry is above
        factor/s. The other strengths choose the power P as the power of a trial solution times its
        largest entry divided by the divergence that they allow, and without spread every entry
        falls as 1/P. An answer without signal is charged 0.
        """
        low = repeated_sum_kl(self.strength)
        if self.noise == "persistent":
            return self._repeated(low)
        ratio = self.strength.power_ratio if isinstance(self.strength, PowerRatio) else None
        if context.num_classes == 2:
            if ratio is not None:
                fraction = context.pos_fraction
                low = solve_noise(0.0, 0.0, 1.0, context.cut_dim, fraction, ratio).sum_kl
            said = (
                "An estimate, and no bound. The lower figure is that of classes without any "
                "spread. Where their spreads differ the charges are higher, most of all late in "
                "training; the upper figure allows for spreads about as large as the squared gap. "
                "A run may be charged more, up to infinity, where the model fits a batch well."
            )
            return ChargeModel(low, Charge(low * (1 + low)), "estimate", said, _ALONG_THE_GAP)
        high, said = low, "Met by every batch, whatever its class means."
        if ratio is not None:
            high = worst_pair_factor(context.num_classes) / ratio
            said = (
                "Bounds for every batch, whatever its class means: 1/ratio is charged for one "
                "long gap, (classes - 1)/ratio for classes all equally far apart, and nothing "
                "before every class was seen."
            )
        if self.statistics == "batch":
            return ChargeModel(low, Charge(high), "bound", said, _ALONG_THE_GAP)
        said = (
            f"{said} That is an estimate where statistics are of earlier batches: a gap that "
            "is longer than it was is charged more, and one that was not there without bound."
        )
        return ChargeModel(low, Charge(high), "estimate", said, _ALONG_THE_GAP)


def power_ratio_for(sum_kl: float, answers: int, cut_dim: int, pos_fraction: float) -> float:
    """Return the power ratio at which several fresh answers together leave this divergence.

    It holds for two classes without any spread.
    """
    return power_for_sum_kl(0.0, 0.0, 1.0, cut_dim, pos_fraction, sum_kl / answers)


class ClassEstimate(NamedTuple):
    """The best estimate of two classes, in units of ``unit``."""

    gap: Tensor  # mean of the positives minus mean of the negatives, (cut_dim,) float64
    gap_squared: float
    neg_variance: float
    pos_variance: float
    pos_fraction: float
    unit: float

    @classmethod
    def of(cls, classes: ClassMoments) -> Self:
        gap = classes.means[1] - classes.means[0]
        deviations = classes.deviations.tolist()
        unit = max(float(torch.linalg.vector_norm(gap, math.inf)), *deviations) or 1.0
        gap = gap / unit
        neg, pos = ((deviation / unit) ** 2 for deviation in deviations)
        pos_fraction = float(classes.counts[1] / classes.counts.sum())
        return cls(gap, float(gap.dot(gap)), neg, pos, pos_fraction, unit)

    @property
    def gap_length(self) -> float:
        """Distance of the class means, in the units of the gradient."""
        return math.sqrt(self.gap_squared) * self.unit


_Noise = tuple[Tensor, Charge, float, NoiseSolution | None]
"""Noise of the rows' shape, which may be overwritten; the rest as in ``Defended``."""


class Marvell(interface.RememberingDefense):
    """Adds the noise that a solver chose for the batch's classes.

    A batch that lacks a class uses its statistics of earlier batches. Before every class was seen,
    or where the solution would leave the labels bare (no gap, or one of two classes without any
    spread), the answer is noise of the batch's largest norm without any signal: a missing answer,
    or zeros, would show what the batch contained. Zeros are answered by zeros only with all
    classes, or before any statistics. With ``from_earlier`` the noise is fitted to the batches
    before this one, so that this batch's share of positives does not show in its scale.
    """

    def __init__(
        self,
        strength: Strength,
        noise: NoiseSource,
        num_classes: int = 2,
        *,
        from_earlier: bool = False,
    ) -> None:
        self._classes = RunningClasses(num_classes)
        super().__init__(self._classes)
        self._strength = strength
        self._noise = noise
        self._from_earlier = from_earlier

    def defend(self, batch: interface.Step) -> interface.Defended:
        rows = as_rows(batch.gradients)
        num_classes = self._classes.num_classes
        classes = as_classes(batch.labels, rows, num_classes)
        measured = measure_classes(rows, classes, num_classes, with_spreads=num_classes == 2)
        earlier = self._classes.earlier(measured) if self._from_earlier else None
        current = self._classes.take_in(measured)
        estimate = earlier if self._from_earlier else current
        found = None
        if estimate is not None and current is not None:
            if num_classes == 2:
                found = self._of_two(rows, classes, measured.counts, estimate, current)
            else:
                found = self._of_several(rows, estimate, current)
        if found is None:
            # Noise of the largest norm and no signal, which reveals nothing.
            noise = isotropic_noise(rows, measured.largest, self._noise)
            sent, power = interface.release(noise, batch.gradients), measured.largest**2
            return interface.Defended(sent, Charge(0.0), power)
        noise, charge, power, solution = found
        sent = interface.release(noise.add_(rows), batch.gradients)
        return interface.Defended(sent, charge, power, solution)

    def _of_two(
        self,
        rows: Tensor,
        classes: Tensor,
        counts: Tensor,
        fitted: ClassMoments,
        current: ClassMoments,
    ) -> _Noise | None:
        """Draw noise with each class's own variances; None if it would leave the labels bare."""
        estimate, cut_dim = ClassEstimate.of(fitted), rows.shape[1]
        _, gap_squared, neg, pos, pos_fraction, unit = estimate
        if isinstance(self._strength, PowerRatio):
            power = self._strength.power_ratio * gap_squared
        else:
            allowed = allowed_sum_kl(self._strength)
            power = power_for_sum_kl(neg, pos, gap_squared, cut_dim, pos_fraction, allowed)
        solution = solve_noise(neg, pos, gap_squared, cut_dim, pos_fraction, power)
        if math.isinf(solution.sum_kl):
            return None
        own = estimate if current is fitted else ClassEstimate.of(current)
        charge = Charge(0.0)
        if any((own.gap_squared, own.neg_variance, own.pos_variance)):
            deviations = math.sqrt(solution.neg_along), math.sqrt(solution.pos_along)
            # The gap is the longer of that fitted and this batch's.
            gap = max(estimate.gap_length, own.gap_length) / unit
            charge = Charge(sum_kl_along_gap(*deviations, gap))
        pos_share = float(counts[1] / counts.sum())
        of_pos = solution.pos_along + (cut_dim - 1) * solution.pos_across
        of_neg = solution.neg_along + (cut_dim - 1) * solution.neg_across
        power = (pos_share * of_pos + (1 - pos_share) * of_neg) * unit * unit
        in_units = NoiseSolution._make(
            (*(unit * unit * one for one in solution[:4]), solution.sum_kl)
        )
        return self._draw(solution, estimate, rows, classes), charge, power, in_units

    def _of_several(
        self, rows: Tensor, fitted: ClassMoments, current: ClassMoments
    ) -> _Noise | None:
        """Draw noise that is the same for all classes; None if they have one mean."""
        if longest_gap(fitted.means) == 0:
            return None
        # Scaled so that squares stay in range, whatever the size of the gradients.
        unit = max(current.largest, float(fitted.means.abs().max()))
        means = fitted.means / unit
        weights = torch.full((len(means),), 1 / len(means), dtype=means.dtype, device=means.device)
        if isinstance(self._strength, PowerRatio):
            power = self._strength.power_ratio * float(squared_distances(means).max())
        else:
            power = power_for_worst_pair(means, weights, allowed_sum_kl(self._strength))
        solution = solve_shared_noise(means, weights, power)
        left = pair_divergences(means, solution)
        if current is not fitted:
            # A gap that is longer than the fitted one is charged more, a new one without bound.
            gaps, fitted_gaps = squared_distances(current.means / unit), squared_distances(means)
            left = torch.where(
                fitted_gaps > 0,
                left * (gaps / fitted_gaps).clamp(min=1.0),
                torch.where(gaps > 0, math.inf, 0.0),
            )
        noise = draw_shared_noise(solution, rows, self._noise).mul_(unit)
        return noise, Charge(float(left.max())), power * unit * unit, None

    def _draw(
        self, solution: NoiseSolution, estimate: ClassEstimate, rows: Tensor, classes: Tensor
    ) -> Tensor:
        """Sample both classes' noise, in a time that does not depend on the labels."""
        neg_along = math.sqrt(max(solution.neg_along - solution.neg_across, 0.0))
        pos_along = math.sqrt(max(solution.pos_along - solution.pos_across, 0.0))
        deviations = torch.tensor(
            (
                (neg_along * estimate.unit, math.sqrt(solution.neg_across) * estimate.unit),
                (pos_along * estimate.unit, math.sqrt(solution.pos_across) * estimate.unit),
            ),
            dtype=rows.dtype,
            device=rows.device,
        )
        along, across = torch.split(deviations.index_select(0, classes), 1, dim=1)
        length = math.sqrt(estimate.gap_squared) or 1.0
        direction = (estimate.gap / length).to(rows.dtype)
        if solution.neg_across == 0 and solution.pos_across == 0:
            return self._noise.standard_normal((len(rows), 1), rows).mul_(along) * direction
        # One draw instead of two: at these sizes, what a draw begins with counts.
        sizes = [len(rows), rows.numel()]
        drawn = self._noise.standard_normal((sum(sizes),), rows)
        scalars, numbers = torch.split(drawn, sizes)
        noise = numbers.view(rows.shape).mul_(across)
        return noise.addcmul_(scalars[:, None].mul_(along), direction)


class PersistentMarvell(interface.Defense):
    """Adds to each row noise along its label's move, scaled by one number of its example."""

    def __init__(self, charge: Charge) -> None:
        self._norm_ratio = charge.sum_kl**-0.5
        self._charge = charge

    def defend(self, batch: interface.Step) -> interface.Defended:
        moves, norms = moves_of(batch)
        rows = noisy_rows(batch, moves, self._norm_ratio)
        return repeated_answer(batch, rows, norms, self._norm_ratio, self._charge)


def worst_pair_factor(num_classes: int) -> float:
    """Return the largest possible product of a power ratio and the worst pair's divergence.

    With Z the K class means around their centre, in rows and over sqrt K, and singular values r_k,
    the noise is h r_k along each direction, where h times the sum of the r_k is the power. A pair's
    gap is sqrt K r_k (u_ik - u_jk), and the sum over k of (u_ik - u_jk)^2 at most 2: the pair is
    left 2 K r_1 / h at most. The sum of the r_k^2 is at most c (K - 1)/(2 K), c the longest squared
    gap, and r_1 times the sum of K - 1 values r_k at most (1 + sqrt(K - 1))/2 times that.
    """
    return (num_classes - 1) * (1 + math.sqrt(num_classes - 1)) / 2


class SharedNoise(NamedTuple):
    """Noise that is the same for all classes."""

    directions: Tensor  # (rank, cut_dim) float64, orthonormal, by falling variance
    variances: Tensor  # (rank,) float64, noise along each direction; none in all others


def solve_shared_noise(class_means: Tensor, weights: Tensor, noise_power: float) -> SharedNoise:
    """Find the noise of a power (P) that separates the classes, (classes, cut_dim), the least.

    Weights are (classes,).
    """
    weights = weights.double() / weights.double().sum()
    largest = float(class_means.abs().max())
    unit = max(largest, math.sqrt(noise_power)) or 1.0
    scaled = class_means.double() / unit
    offsets = scaled - weights @ scaled
    _, roots, directions = torch.linalg.svd(weights.sqrt()[:, None] * offsets, full_matrices=False)
    # Rounding alone gives a length to directions that B does not have.
    rank = int((roots > 1e-12 * roots[0]).sum()) if roots[0] > 1e-14 * largest / unit else 0
    along = roots[: min(rank, len(weights) - 1)].tolist()
    level = noise_power / unit / unit / math.fsum(along) if along else 0.0
    variances = [level * root * unit * unit for root in along]
    on_device = torch.tensor(variances, dtype=torch.float64, device=class_means.device)
    return SharedNoise(directions[: len(along)], on_device)


def power_for_worst_pair(class_means: Tensor, weights: Tensor, sum_kl: float) -> float:
    """Find the least noise power that leaves every pair at most this divergence, above 0.

    The divergence falls as the reciprocal of the power.
    """
    if not sum_kl > 0:
        raise ValueError(f"sum_kl must be above 0, got {sum_kl}")
    largest = float(class_means.abs().max())
    power = largest * largest
    if power == 0:
        return 0.0
    solution = solve_shared_noise(class_means, weights, power)
    return power * float(pair_divergences(class_means, solution).max()) / sum_kl


def pair_divergences(class_means: Tensor, solution: SharedNoise) -> Tensor:
    """Return each pair's symmetrised divergence, (classes, classes); infinite without noise."""
    means = class_means.double()
    coordinates = means @ solution.directions.T
    gaps = (coordinates[:, None] - coordinates[None]).square()
    divergences = torch.where(gaps > 0, gaps / solution.variances, 0.0).sum(dim=2)
    # The part that the directions do not span; rounding alone leaves some of it.
    rest = means - coordinates @ solution.directions
    uncovered = (rest[:, None] - rest[None]).square().sum(dim=2)
    longest = (means[:, None] - means[None]).square().sum(dim=2).max()
    return divergences + torch.where(uncovered > 1e-20 * longest, math.inf, 0.0)


def draw_shared_noise(solution: SharedNoise, like: Tensor, noise: NoiseSource) -> Tensor:
    """Draw noise of the shape of ``like``, (batch, cut_dim), from one number per direction."""
    scalars = noise.standard_normal((like.shape[0], len(solution.variances)), like)
    axes = solution.variances.sqrt()[:, None] * solution.directions
    return scalars @ axes.to(like.dtype)

"""Estimates what columns say about the outcome, from a noisy release alone.

**Without a column.** In a linear model of the target by the codes x, of weights w and covariance S,
all columns together explain R = w' S w of the target's variance, and those but the ones of the
codes b explain L = w' M w less, where M = ((S^-1)_bb)^-1 is what the others leave of the covariance
of b. A release shows w with an error of covariance V (Gauss and Markov; of noisy sums: along the
directions that they show). With V's tr(M V) taken off, L / R is the share that is lost, and its
interval that of an information value below. Along directions that no sum shows, the upper end takes
weights to be as large as along others; it is 1 if they hold, less what the other columns explain,
more than half of a column's variance.

**By itself.** For an outcome of two classes:

Of a column's bins, bin b has the share w_b of the rows, the share r_b of its rows is positive, and
m = sum_b w_b r_b (Siddiqi, "Credit Risk Scorecards", 2006, chapter 6):

    weight of evidence  WoE_b = ln((pos_b / pos) / (neg_b / neg)) = logit r_b - logit m
    information value   IV = sum_b (pos_b / pos - neg_b / neg) WoE_b
                           = sum_b w_b (r_b - m) logit r_b / (m (1 - m))

The shares have errors of covariance V, from the noise and from sampling, which look like
information: with IV's gradient g and Hessian H, they add tr(H V) / 2 to its mean, which is taken
off. Its variance is g' V g + tr(H V H V) / 2 for normal errors. As g' V g grows in proportion to a
small IV, the interval holds the x with (IV - x)^2 <= z^2 (c x + tr(H V H V) / 2), as Wilson's does
for a share.

The mean of a row's noisy label is its label, and r_b the mean in the bin. Noisy sums are not over
the bins of a column: shares follow by the linear model of a score, with a normal prior by which a
column's IV is 0.3 on average. That makes them too equal where a column says that much, so that IV
lacks tr(H V) / 2, and adds as much where it says nothing: the estimate stands between both, and the
interval reaches over both. What no linear model of codes shows in the bits stays unseen.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.models.components import MOST_DENSE, ComponentsBottom
from splitveil.common.models.ridge import scales

if TYPE_CHECKING:
    from splitveil.common.data.features import FeatureEncoder, Features
    from splitveil.common.models.ridge import LabelStatistics
    from splitveil.passive_party.components_trainer import ComponentsTrainer

_Z = 1.96
_SURE = 3.0  # standard errors that a bin's share of either class has at least
_LEAST_ROWS = 50
_MOST_LEVELS = 32
_MISSING = "missing"
_PRIOR = 0.3  # a strong column's, by Siddiqi's rule of thumb
_SHOWN = 1e-3  # of the most information, along a direction that a release shows
SMALL_LOSS = 0.03  # of what all columns explain

_Numbers = npt.NDArray[np.float64]


class Binned(NamedTuple):
    name: str
    is_number: bool  # whose bins reach up to the next one's lower limit
    bins: Sequence[str]  # in an order in which neighbours may be joined; none is empty
    members: npt.NDArray[np.int64]  # each row's bin


@dataclass(frozen=True)
class Bin:
    name: str
    rows: int
    positives: float  # share of its rows
    positives_error: float  # standard error
    weight_of_evidence: float
    weight_of_evidence_error: float


@dataclass(frozen=True)
class ColumnValue:
    name: str
    information_value: float
    low: float  # of the 95 % interval
    high: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class ColumnLoss:
    """What is lost of all that columns explain without one of them; shares."""

    name: str
    loss: float
    low: float  # of the 95 % interval
    high: float

    @property
    def in_words(self) -> str:
        """Say how many of 100 are lost, and the interval, rounded outwards."""
        low, high = math.floor(100 * self.low), math.ceil(100 * self.high)
        return f"{100 * self.loss:.0f} ({low} to {high})"


def losses(trainer: "ComponentsTrainer", encoder: "FeatureEncoder") -> tuple[ColumnLoss, ...]:
    """Return what is lost without each column, largest first.

    Nothing without a release of one value a row, or if it does not show that columns say anything.
    """
    if trainer.released is None or trainer.released[1].shape[1] != 1:
        return ()
    model, (positions, values, sigma) = trainer.model, trainer.released
    if not isinstance(model, ComponentsBottom) or model.num_codes > MOST_DENSE:
        return ()
    rows = trainer.arrays(positions)
    if sigma:
        one = np.zeros((len(positions), 1), np.int64)
        statistics = model.statistics_of_groups(rows, one, values, sigma)[0]
    else:
        statistics = model.statistics_of_labels(rows, values.astype(np.float64))
    names = np.array(encoder.names, dtype=object)[model.column_of_code()]
    return losses_of(statistics, names)


def losses_of(
    statistics: "LabelStatistics", names: npt.NDArray[np.object_]
) -> tuple[ColumnLoss, ...]:
    """Return the same of statistics; ``names`` are the codes' columns, (codes,)."""
    count, covariance = statistics.num_rows, statistics.covariance
    scale = scales(covariance)
    covariance = covariance / np.outer(scale, scale)
    shown, directions = np.linalg.eigh(statistics.information / np.outer(scale, scale))
    is_shown = shown > _SHOWN * shown[-1]
    directions, unseen = directions[:, is_shown], directions[:, ~is_shown]
    along = directions.T @ (statistics.pull[:, 0] / scale) / shown[is_shown]
    variances = 1 / (count * shown[is_shown])
    weight, errors = directions @ along, (directions * variances) @ directions.T
    explaining = covariance @ weight
    bent = covariance @ errors
    explained = float(weight @ explaining - np.trace(bent))
    error = 4 * explaining @ errors @ explaining + 2 * np.sum(bent * bent.T)
    if not explained > _SURE * float(error) ** 0.5:
        return ()
    precision = np.linalg.inv(covariance + 1e-6 * np.eye(len(scale)))
    of_unseen = max(float(along @ along - variances.sum()), 0.0) / len(along)

    def without(column: str) -> ColumnLoss:
        codes = np.flatnonzero(names == column)
        left = np.linalg.inv(precision[np.ix_(codes, codes)]) / explained
        bent = left @ errors[np.ix_(codes, codes)]
        value = float(weight[codes] @ left @ weight[codes])
        gradient = -max(value - np.trace(bent), 0.0) * explaining / explained
        gradient[codes] += left @ weight[codes]
        found = _interval(
            value,
            4 * float(gradient @ errors @ gradient),
            float(np.trace(bent)),
            2 * float(np.sum(bent * bent.T)),
        )
        hidden = float(((left @ unseen[codes]) * unseen[codes]).sum())
        is_hidden = 2 * explained * hidden > covariance[codes, codes].sum()
        high = 1.0 if is_hidden else found[2] + of_unseen * hidden
        loss, low, high = np.minimum([*found[:2], high], 1.0).tolist()
        return ColumnLoss(column, loss, low, high)

    each = map(without, sorted({*names} - {""}))
    return tuple(sorted(each, key=lambda one: (-one.loss, -one.high)))


def information_values(
    trainer: "ComponentsTrainer", encoder: "FeatureEncoder"
) -> tuple[ColumnValue, ...]:
    """Return numbers and categories, most informative first; none without a release of two classes.

    Left out are columns whose bins are all too small for the noise.
    """
    if trainer.released is None or trainer.released[1].shape[1] != 1:
        return ()
    positions, values, sigma = trainer.released
    rows = trainer.arrays(positions)
    columns = [*_binned(rows, encoder)]
    if sigma:
        shares = _shares_of_sums(trainer.score, rows, columns, values, sigma)
    else:
        shares = (shares_of_labels(one.members, values[:, 0].astype(np.float64)) for one in columns)
    pairs = zip(columns, shares, strict=True)
    found = [column_value(one, *each, is_fitted=sigma > 0) for one, each in pairs]
    return tuple(sorted(filter(None, found), key=lambda one: (-one.low, -one.information_value)))


def column_value(
    column: Binned, shares: _Numbers, covariance: _Numbers, *, is_fitted: bool = False
) -> ColumnValue | None:
    """Join bins of too few rows of either class with a neighbour; None if a single one is left."""
    rows, names = np.bincount(column.members).astype(float), [*column.bins]
    while True:
        errors = np.sqrt(covariance.diagonal())
        sure = np.minimum(shares, 1 - shares) / errors * (rows >= _LEAST_ROWS)
        weakest = int(sure.argmin())
        if len(shares) == 1 or sure[weakest] >= _SURE:
            break
        near = [one for one in (weakest - 1, weakest + 1) if 0 <= one < len(shares)]
        first = min(weakest, *sorted(near, key=lambda one: rows[one])[:1])
        pair = slice(first, first + 2)
        joined = np.delete(np.eye(len(rows)), first + 1, axis=0)
        joined[first, pair] = rows[pair] / rows[pair].sum()
        shares, covariance = joined @ shares, joined @ covariance @ joined.T
        rows = (joined > 0) @ rows
        is_said = column.is_number and names[first] != _MISSING
        names[pair] = [names[first] if is_said else ", ".join(names[pair])]
    if len(shares) == 1:
        return None
    weights = rows / rows.sum()
    mean = weights @ shares
    evidence = np.log(shares / (1 - shares)) - np.log(mean / (1 - mean))
    slopes = np.diag(1 / (shares * (1 - shares))) - weights / (mean * (1 - mean))
    of_evidence = np.sqrt((slopes @ covariance @ slopes.T).diagonal())
    figures = np.stack([shares, errors, evidence, of_evidence], axis=1).tolist()
    found = zip(names, rows.astype(int).tolist(), figures, strict=True)
    value = _value(weights, shares, covariance, is_fitted=is_fitted)
    return ColumnValue(column.name, *value, tuple(Bin(*one, *each) for *one, each in found))


def _value(
    weights: _Numbers, shares: _Numbers, covariance: _Numbers, *, is_fitted: bool
) -> tuple[float, float, float]:
    """Return an information value and its interval."""
    mean, logits = weights @ shares, np.log(shares / (1 - shares))
    spread, tilt, slope = mean * (1 - mean), 1 - 2 * mean, 1 / (shares * (1 - shares))
    # IV is top / spread.
    top = weights @ ((shares - mean) * logits)
    of_top = weights * (logits - weights @ logits + (shares - mean) * slope)
    bend = weights * slope * (2 - (shares - mean) * (1 - 2 * shares) * slope)
    both = np.outer(weights * slope, weights) + tilt / spread * np.outer(of_top, weights)
    gradient = (of_top - top * tilt / spread * weights) / spread
    hessian = (np.diag(bend) - both - both.T) / spread
    hessian += 2 * top * (1 / spread**2 + tilt**2 / spread**3) * np.outer(weights, weights)
    bent = hessian @ covariance
    bias, of_errors = float(np.trace(bent)) / 2, float(np.trace(bent @ bent)) / 2
    value = float(top / spread)
    found = _interval(value, float(gradient @ covariance @ gradient), bias, of_errors)
    if is_fitted:
        return value, min(found[1], value), max(found[2] + 2 * max(bias, 0.0), value)
    return found


def _interval(
    value: float, of_slope: float, bias: float, of_errors: float
) -> tuple[float, float, float]:
    """Return a square less its bias, and its interval, from both parts of its variance."""
    growth = of_slope / max(value, 1e-12) * _Z**2 / 2
    middle = value - bias + growth
    half = max(2 * growth * (value - bias) + growth**2 + _Z**2 * of_errors, 0.0) ** 0.5
    return max(value - bias, 0.0), max(middle - half, 0.0), max(middle + half, 0.0)


def shares_of_labels(members: npt.NDArray[np.int64], noisy: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return bins' shares and their covariance; the noise's variance is read from the labels."""
    rows, sums = np.bincount(members), np.bincount(members, noisy)
    mean = min(max(sums.sum() / len(members), 0.0), 1.0)
    noise = max(noisy.var() - mean * (1 - mean), 0.0)
    likely = np.clip((sums + 1) / (rows + 2), 0.0, 1.0)  # few rows of one class are not sure
    return sums / rows, np.diag((noise + likely * (1 - likely) + 1e-12) / rows)


def _shares_of_sums(
    score: "ComponentsBottom",
    rows: "Features",
    columns: Sequence[Binned],
    sums: _Numbers,
    sigma: float,
) -> Iterator[tuple[_Numbers, _Numbers]]:
    starts = np.cumsum([0, *(len(one.bins) for one in columns)])
    groups = np.stack([one.members for one in columns], axis=1) + starts[:-1]
    statistics, *given = score.statistics_of_groups(rows, groups, sums, sigma)
    (scales, codes), count = given, len(groups)
    mean = min(max(float(sums[-1, 0]) / count, 0.5 / count), 1 - 0.5 / count)
    variance = mean * (1 - mean)
    # IV is near the shares' variance by that of a label, squared.
    mean_square = np.bincount(groups.ravel()) / count @ ((codes / scales) ** 2).sum(1)
    strength = mean_square / (len(columns) * count * variance * _PRIOR)
    precision = count * (statistics.information + strength * np.diag(scales**2))
    posterior = np.linalg.inv(precision)
    shares = mean + variance**0.5 * codes @ (posterior @ statistics.pull[:, 0] * count)
    common = (sigma / count) ** 2 + variance / count
    for first, last in pairwise(starts):
        of_bins = codes[first:last]
        yield shares[first:last], variance * of_bins @ posterior @ of_bins.T + common


def _binned(features: "Features", encoder: "FeatureEncoder") -> Iterator[Binned]:
    """Yield numbers with the bins of their codes and one for gaps, and categories' levels."""
    numbers = np.empty((0, 0)) if features.numeric is None else features.numeric
    for place, (scaler, edges) in enumerate(zip(encoder.numeric, encoder.bins, strict=False)):
        bins = 1 + np.floor(numbers[:, place]).astype(np.int64)
        if scaler.name in encoder.indicators:
            gap = len(encoder.numeric) + encoder.indicators.index(scaler.name)
            bins[numbers[:, gap] > 0] = 0
        limits = np.array(edges) * scaler.scale + scaler.shift
        if encoder.signed_log1p:
            limits = np.sign(limits) * np.expm1(np.abs(limits))
        limits[np.abs(limits) < 1e-9 * np.abs(limits).max(initial=0)] = (
            0  # what rounding leaves of 0
        )
        four_digits = (f"{float(f'{one:.4g}'):,}".removesuffix(".0") for one in limits.tolist())
        texts = [_MISSING, *(f"from {one}" for one in four_digits)]
        kept, members = np.unique(bins, return_inverse=True)
        yield Binned(scaler.name, True, [texts[one] for one in kept], members)
    columns = () if features.categorical is None else features.categorical.T
    for vocabulary, slots in zip(encoder.categorical, columns, strict=True):
        levels, members, counts = np.unique(slots, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        texts = ["other values", _MISSING, *vocabulary.categories]
        named = [texts[one] for one in levels[order[:_MOST_LEVELS]]]
        if len(levels) > _MOST_LEVELS:
            named[-1] = "rarer values"
        ranks = np.minimum(np.argsort(order), _MOST_LEVELS - 1)
        yield Binned(vocabulary.name, False, named, ranks[members])

"""The covariate-adjusted leak AUC: how well a score reveals labels that features do not reveal.

    strata                       rows with nearly the same prediction q of a model that has not seen
                                 their labels
    placement of a positive i    share of the negatives of its stratum that score lower, ties half;
                                 a negative weighs q / (1 - q)
    adjusted AUC                 mean placement of the positives

That is the area under the covariate-adjusted ROC curve (Janes and Pepe, "Adjusting for covariate
effects on classification accuracy using the covariate-adjusted ROC curve", Biometrika 96, 2009,
sections 2 and 4). A score that only repeats what features reveal has an adjusted AUC of 1/2,
however well it reveals the labels of all rows together; one that knows the labels has 1. The
weights give the negatives of a stratum the positives' distribution of q: without them, the rest of
its width counts as a leak, up to .01 for 100 strata and .06 for 20.

The interval takes the variance of the placements within and between strata (DeLong, DeLong and
Clarke-Pearson, Biometrics 44, 1988), on the logit scale, where an area close to 1 keeps its
interval below 1.

What an attack is worth to whoever runs it:

    advantage        AUC of the attack minus AUC of a model of the attacker's own features that was
                     fitted to the same known labels; 1/2 for an attack that knows none
    TPR at an FPR    share of the positives found while at most that share of negatives is accused
                     (Carlini et al., "Membership Inference Attacks From First Principles", 2022)
    precision        share of positives among the rows with the highest scores
"""

from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.leakage import Floats, OneClass

MAX_STRATA = 100
MIN_PER_STRATUM = 10
"""Rows of the rarer class per stratum, on average: fewer positives make fewer strata."""

_FEWEST = 2
"""Rows of each class in every stratum: neighbouring strata are merged until they have them."""

TOP_ROWS = 100
_NORMAL_975 = 1.959963984540054

Mask = npt.NDArray[np.bool_]
Strata = npt.NDArray[np.int64]


class AdjustedLeak(NamedTuple):
    """A covariate-adjusted leak AUC with its 95 % interval."""

    value: float
    """``max(auc, 1 - auc)``: an inverted score is a leak, too."""
    low: float
    """Below 1/2 where the sign of the score may have come out by chance."""
    high: float


class Advantage(NamedTuple):
    """By how much an attack does better than the attacker's own features."""

    value: float
    low: float
    high: float
    prior: float
    """Leak AUC of the attacker's own model."""


class OperatingPoints(TypedDict):
    """How many labels an attack finds where it is most certain."""

    tpr_at_per_mille: float
    """True positive rate where at most 0.1 % of the negatives are accused."""
    tpr_at_percent: float
    """True positive rate where at most 1 % of the negatives are accused."""
    precision_at_100: float | None
    """Share of positives among the 100 highest scores; None for 100 rows or fewer."""


class Placements(NamedTuple):
    """The AUC of a score, row by row (DeLong et al. 1988, section 3)."""

    positives: Floats
    """Share of the negatives, by weight, below each positive, ties half."""
    negatives: Floats
    """Share of the positives above each negative, ties half."""
    weights: Floats
    """Of the negatives; their sum is 1."""

    @property
    def auc(self) -> float:
        """Their mean, the AUC."""
        return float(self.positives.mean())

    def variance_of_negatives(self) -> float:
        """Return the part of the AUC's variance that the choice of the negatives brings."""
        number = len(self.negatives)
        moves = self.weights * (self.negatives - self.auc)
        return float(moves @ moves) * number / (number - 1) if number > 1 else 1.0


def placements(scores: Floats, positive: Mask, weights: Floats | None = None) -> Placements:
    """Return the placements of all rows; the weights of the negatives count, equal by default.

    Raises:
        OneClass: there is no positive, or no negative.
        ValueError: a score is NaN, or the shapes differ.
    """
    if scores.shape != positive.shape or np.isnan(scores).any():
        raise ValueError("expected one score per label, none of them NaN")
    of_positives, of_negatives = scores[positive], scores[~positive]
    if not len(of_positives) or not len(of_negatives):
        raise OneClass(f"{len(scores)} labels of one class have no AUC")
    counted = np.ones(len(of_negatives)) if weights is None else weights[~positive]
    counted = counted / counted.sum()
    even = np.full(len(of_positives), 1.0 / len(of_positives))
    return Placements(
        _share_below(of_positives, of_negatives, counted),
        1.0 - _share_below(of_negatives, of_positives, even),
        counted,
    )


def strata_of(predictions: Floats, positive: Mask, max_strata: int = MAX_STRATA) -> Strata:
    """Divide rows into strata of nearly equal predictions.

    Half the limits are quantiles of the positives' predictions, as the predictions themselves have
    it, and half of the negatives', so that strata are narrow wherever either class has many rows.
    There are at most ``max_strata``, and one for every ``MIN_PER_STRATUM`` rows of the rarer class;
    neighbours are merged until each has two rows of both classes.

    Returns:
        The number of each row's stratum from 0, ascending with the predictions, (rows,).
    """
    rarer = min(int(positive.sum()), int((~positive).sum()))
    number = max(1, min(max_strata, rarer // MIN_PER_STRATUM))
    inner = np.arange(1, number // 2 + 1) / (number // 2 + 1)
    # Not the labels' own quantiles: a limit that lies at a positive reveals labels by itself.
    limits = [_quantiles(predictions, weights, inner) for weights in (predictions, 1 - predictions)]
    edges = np.unique(np.concatenate(limits))
    strata = np.searchsorted(edges, predictions, side="right")
    counts = np.stack(
        [np.bincount(strata[chosen], minlength=len(edges) + 1) for chosen in (positive, ~positive)]
    )
    return _merged(counts)[strata]


def adjusted_leak_auc(
    scores: Floats, positive: Mask, predictions: Floats, max_strata: int = MAX_STRATA
) -> AdjustedLeak:
    """Return the leak AUC among rows with nearly the same prediction, with its 95 % interval.

    Args:
        predictions: of the positive class, by a model that has not seen the row's label, (rows,),
            above 0 and below 1.

    Raises:
        OneClass: a class has fewer than two rows.
    """
    rarer = min(int(positive.sum()), int((~positive).sum()))
    if rarer < _FEWEST:
        raise OneClass(f"expected two rows of each class, got {rarer} of one")
    strata = strata_of(predictions, positive, max_strata)
    order = np.argsort(strata, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(strata[order])) + 1)
    odds = predictions / (1.0 - predictions)
    by_stratum = [placements(scores[part], positive[part], odds[part]) for part in parts]
    of_positives = np.concatenate([stratum.positives for stratum in by_stratum])
    auc = float(of_positives.mean())
    variance = float(of_positives.var(ddof=1)) / len(of_positives)
    for stratum in by_stratum:
        share = len(stratum.positives) / len(of_positives)
        variance += share**2 * stratum.variance_of_negatives()
    low, high = _interval(auc, variance, rarer)
    return AdjustedLeak(auc, low, high) if auc >= 0.5 else AdjustedLeak(1 - auc, 1 - high, 1 - low)


def advantage_over(prior: Floats, scores: Floats, positive: Mask) -> Advantage:
    """Compare an attack with ``prior``, the scores of the attacker's own model, or a constant.

    Raises:
        OneClass: there is no positive, or no negative.
    """
    attack, own = placements(scores, positive), placements(prior, positive)
    signs = [1.0 if of.auc >= 0.5 else -1.0 for of in (attack, own)]
    variance = 0.0
    for of_attack, of_own in zip(attack, own, strict=True):
        difference = signs[0] * of_attack - signs[1] * of_own
        variance += float(difference.var(ddof=1)) / len(difference) if len(difference) > 1 else 1.0
    folded = [max(of.auc, 1 - of.auc) for of in (attack, own)]
    value, reach = folded[0] - folded[1], _NORMAL_975 * variance**0.5
    return Advantage(value, value - reach, value + reach, folded[1])


def operating_points(scores: Floats, positive: Mask) -> OperatingPoints:
    """Return what an attack finds with few errors; a score with an AUC below 1/2 is inverted.

    A tie with the first negative too many counts as not found. Ties at the end of the highest
    scores count with their share of positives.

    Raises:
        OneClass: there is no positive, or no negative.
    """
    if placements(scores, positive).auc < 0.5:
        scores = -scores
    negatives = np.sort(scores[~positive])[::-1]
    per_mille, percent = (
        float((scores[positive] > negatives[int(rate * len(negatives))]).mean())
        for rate in (0.001, 0.01)
    )
    return OperatingPoints(
        tpr_at_per_mille=per_mille,
        tpr_at_percent=percent,
        precision_at_100=_precision(scores, positive),
    )


def _interval(auc: float, variance: float, rarer: int) -> tuple[float, float]:
    # Half a pair of the rarer class in the wrong order: at an area of 1 the variance found is 0.
    inside = min(max(auc, 0.5 / rarer), 1 - 0.5 / rarer)
    variance = max(variance, inside * (1 - inside) / (3 * rarer))
    centre = np.log(inside / (1 - inside))
    reach = _NORMAL_975 * variance**0.5 / (inside * (1 - inside))
    low, high = 1 / (1 + np.exp(-(centre + np.array([-reach, reach]))))
    return min(float(low), auc), max(float(high), auc)


def _quantiles(values: Floats, weights: Floats, shares: Floats) -> Floats:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    quantiles: Floats = values[order][np.searchsorted(reached, shares * reached[-1])]
    return quantiles


def _share_below(values: Floats, others: Floats, weights: Floats) -> Floats:
    """Return the weight of the others below each value, ties half; the weights' sum is 1."""
    order = np.argsort(others)
    ranked, below = others[order], np.concatenate([[0.0], np.cumsum(weights[order])])
    first, last = (np.searchsorted(ranked, values, side) for side in ("left", "right"))
    shares: Floats = (below[first] + below[last]) / 2.0
    return shares


def _merged(counts: npt.NDArray[np.int64]) -> Strata:
    """Return the new number of each stratum, so that each has enough rows of both classes."""
    numbers = np.zeros(counts.shape[1], dtype=np.int64)
    held, number = np.zeros(2, dtype=np.int64), 0
    for index, of_both in enumerate(counts.T):
        numbers[index] = number
        held = held + of_both
        if held.min() >= _FEWEST:
            held, number = np.zeros(2, dtype=np.int64), number + 1
    if held.min() < _FEWEST and number > 0:  # the rest joins the stratum before it
        numbers[numbers == number] = number - 1
    return numbers


def _precision(scores: Floats, positive: Mask) -> float | None:
    if len(scores) <= TOP_ROWS:
        return None
    last = np.sort(scores)[-TOP_ROWS]
    above, tied = scores > last, scores == last
    missing = TOP_ROWS - int(above.sum())
    return float((positive[above].sum() + missing * positive[tied].mean()) / TOP_ROWS)

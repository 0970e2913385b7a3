"""The feature-adjusted leak AUC: how well a score reveals labels that features do not reveal.

    q            probability of a row's positive label, by a model that has not seen that label
    rest         an attack's score less what features explain of it
    strata       rows with nearly the same q
    adjusted AUC share of the pairs of a positive and a negative of one stratum in which the rest
                 of the positive is higher, ties half; a positive weighs 1 - q, a negative q

It is the area under the covariate-adjusted ROC curve (Janes and Pepe, Biometrika 96, 2009) with
overlap weights (Li, Morgan and Zaslavsky, JASA 113, 2018): a row counts as much as features leave
its label open, and either order of a pair of unequal q is equally likely where the rest knows
nothing, so that the width of a stratum does not count as a leak. Whoever knows the features can
subtract what they explain: a bound on the AUC of any score of one example bounds this one, too.

Neither q nor what features explain is known. An error in q counts only by its product with an error
in the rest (Chernozhukov et al., 2018, "Double/debiased machine learning"; Shah and Peters, 2020,
"The Hardness of Conditional Independence Testing"). So that a score that repeats features better
than q does is no leak, q is fitted once more with what features explain of the score (`informed`),
as targeted learning does (van der Laan and Rose 2011).

The interval takes the variance of the placements within strata (DeLong, DeLong and Clarke-Pearson,
Biometrics 44, 1988), on the logit scale, where an area close to 1 keeps its interval below 1. It
reaches ``STANDARD_ERRORS`` on either side: every statement about a figure is about its interval.

The value of an attack to the attacker:

    advantage        AUC of the attack minus AUC of a model of the attacker's own features that was
                     fitted to the same known labels; 1/2 for an attack that knows none
    TPR at an FPR    share of the positives found while at most that share of negatives is accused
                     (Carlini et al., "Membership Inference Attacks From First Principles", 2022)
    precision        share of positives among the rows with the highest scores
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.figures import STANDARD_ERRORS, AdjustedFigures, AdvantageFigures
from splitveil.common.privacy.leakage import Floats, OneClass

MAX_STRATA = 100
MIN_PER_STRATUM = 10  # sum of q (1 - q): fewer rows left open make fewer strata

_FEWEST = 2  # rows of each class in every stratum, or neighbours are merged

_COST_OF_PREDICTIONS, _COST_OF_FEW_ROWS = 0.25, 7.0
"""Relative additions to the variance for the errors of q and of what features explain, so that
intervals cover the truth as often as they say (`tests/privacy/test_adjusted_auc.py`)."""

TOP_ROWS = 100
RESOLUTION = 0.2  # deviation of the rest, of the score's own, below which it is no leak
_SMALLEST = 1e-6  # predictions stay this far from 0 and 1
_NORMAL_975 = 1.959963984540054

Mask = npt.NDArray[np.bool_]
Strata = npt.NDArray[np.int64]


class Placements(NamedTuple):
    """The AUC of a score, row by row (DeLong et al. 1988, section 3)."""

    positives: Floats  # share of the negatives, by weight, below each positive, ties half
    negatives: Floats  # share of the positives, by weight, above each negative, ties half
    weights: tuple[Floats, Floats]  # of the positives and of the negatives; the sum of either is 1

    @property
    def auc(self) -> float:
        return min(1.0, float(self.weights[0] @ self.positives))  # rounding may exceed 1

    @property
    def variance(self) -> float:
        """Of the AUC."""
        total = 0.0
        for placed, weights in zip(self[:2], self.weights, strict=True):
            moves = weights * (placed - self.auc)
            total += float(moves @ moves) * len(placed) / (len(placed) - 1)
        return total


def placements(scores: Floats, positive: Mask, weights: Floats | None = None) -> Placements:
    """Return the placements of all rows, which weigh the same by default.

    Raises OneClass without both classes, and ValueError for NaN or other shapes.
    """
    if scores.shape != positive.shape or np.isnan(scores).any():
        raise ValueError("expected one score per label, none of them NaN")
    of_positives, of_negatives = scores[positive], scores[~positive]
    if not len(of_positives) or not len(of_negatives):
        raise OneClass(f"{len(scores)} labels of one class have no AUC")
    counted = np.ones(len(scores)) if weights is None else weights
    above, below = (counted[rows] / counted[rows].sum() for rows in (positive, ~positive))
    return Placements(
        _share_below(of_positives, of_negatives, below),
        1.0 - _share_below(of_negatives, of_positives, above),
        (above, below),
    )


def strata_of(predictions: Floats, positive: Mask, max_strata: int = MAX_STRATA) -> Strata:
    """Divide rows into strata of nearly equal predictions q, which leave equally much open.

    The sum of q (1 - q) is the same in each, ``MIN_PER_STRATUM`` or more; there are at most
    ``max_strata``, and neighbours are merged until each has two rows of both classes.

    The number of each row's stratum from 0, ascending with the predictions, (rows,).
    """
    left_open = predictions * (1 - predictions)
    number = max(1, min(max_strata, int(left_open.sum() / MIN_PER_STRATUM)))
    # Not the labels' own quantiles: a limit that lies at a positive reveals labels by itself.
    order = np.argsort(predictions)
    reached = np.cumsum(left_open[order])
    limits = np.searchsorted(reached, np.arange(1, number) / number * reached[-1])
    edges = np.unique(predictions[order][limits])
    strata = np.searchsorted(edges, predictions, side="right")
    counts = np.stack(
        [np.bincount(strata[chosen], minlength=len(edges) + 1) for chosen in (positive, ~positive)]
    )
    return _merged(counts)[strata]


def rest_of(scores: Floats, explained: Floats) -> Floats:
    """Return the rest of an attack's scores that features do not explain, (rows,).

    Noise fills up a rest below ``RESOLUTION``: for a score that is nearly a function of features,
    the rest is the part of that function that no regression has learned.
    """
    rest = scores - explained
    missing = max(RESOLUTION**2 * float(scores.var()) - float(rest.var()), 0.0) ** 0.5
    filled: Floats = rest + missing * np.random.default_rng(0).normal(size=len(rest))
    return filled


def informed(predictions: Floats, explained: Floats, positive: Mask) -> Floats:
    """Return predictions that also know what features explain of a score, (rows,)."""
    # Importing it takes time that only a run that is measured should pay.
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    values = np.column_stack([np.log(predictions / (1 - predictions)), explained])
    model = LogisticRegression(C=100.0, max_iter=200).fit(values, positive)
    known: Floats = model.predict_proba(values)[:, 1].clip(_SMALLEST, 1 - _SMALLEST)
    return known


def adjusted_leak_auc(
    rest: Floats, positive: Mask, predictions: Floats, max_strata: int = MAX_STRATA
) -> AdjustedFigures:
    """Return the leak AUC among rows with nearly the same prediction, with its interval.

    ``rest`` is a score less what features explain of it, (rows,); predictions, (rows,), are of the
    positive class, above 0 and below 1, by a model that has not seen the row's label. Raises
    OneClass if a class has fewer than two rows.
    """
    rarer = min(int(positive.sum()), int((~positive).sum()))
    if rarer < _FEWEST:
        raise OneClass(f"expected two rows of each class, got {rarer} of one")
    strata = strata_of(predictions, positive, max_strata)
    order = np.argsort(strata, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(strata[order])) + 1)
    left_open = predictions * (1.0 - predictions)
    overlap = np.where(positive, 1.0 - predictions, predictions)
    by_stratum = [placements(rest[part], positive[part], overlap[part]) for part in parts]
    shares = np.array([left_open[part].sum() for part in parts]) / left_open.sum()
    auc = round(float(shares @ [stratum.auc for stratum in by_stratum]), 12)
    variance = float(shares**2 @ [stratum.variance for stratum in by_stratum])
    low, high = _interval(auc, variance, float(left_open.sum()))
    # An inverted score is a leak, too.
    return AdjustedFigures(*((auc, low, high) if auc >= 0.5 else (1 - auc, 1 - high, 1 - low)))


def advantage_over(prior: Floats, scores: Floats, positive: Mask) -> AdvantageFigures:
    """Compare an attack with ``prior``, the scores of the attacker's own model, or a constant.

    Raises OneClass.
    """
    attack, own = placements(scores, positive), placements(prior, positive)
    signs = [1.0 if of.auc >= 0.5 else -1.0 for of in (attack, own)]
    variance = 0.0
    for of_attack, of_own in zip(attack[:2], own[:2], strict=True):
        difference = signs[0] * of_attack - signs[1] * of_own
        variance += float(difference.var(ddof=1)) / len(difference) if len(difference) > 1 else 1.0
    folded = [max(of.auc, 1 - of.auc) for of in (attack, own)]
    value, reach = folded[0] - folded[1], _NORMAL_975 * variance**0.5
    return AdvantageFigures(value, value - reach, value + reach, folded[1])


def operating_points(scores: Floats, positive: Mask) -> tuple[float, float, float | None]:
    """Return an attack's findings with few errors; a score with an AUC below 1/2 is inverted.

    True positive rates where at most 0.1 % and 1 % of the negatives are accused, and the precision
    of the 100 highest scores, None for no more rows. A tie with the first negative too many counts
    as not found. Ties at the end of the highest scores count with their share of positives.

    Raises OneClass if there is no positive, or no negative.
    """
    if placements(scores, positive).auc < 0.5:
        scores = -scores
    negatives = np.sort(scores[~positive])[::-1]
    per_mille, percent = (
        float((scores[positive] > negatives[int(rate * len(negatives))]).mean())
        for rate in (0.001, 0.01)
    )
    if len(scores) <= TOP_ROWS:
        return per_mille, percent, None
    last = np.sort(scores)[-TOP_ROWS]
    above, tied = scores > last, scores == last
    missing = TOP_ROWS - int(above.sum())
    found = float(positive[above].sum() + missing * positive[tied].mean())
    return per_mille, percent, found / TOP_ROWS


def _interval(auc: float, variance: float, left_open: float) -> tuple[float, float]:
    # Half a pair in the wrong order: at an area of 1 the variance found is 0.
    half = min(0.25 / left_open, 0.5)
    inside = min(max(auc, half), 1 - half)
    # The variance of a random score without ties, whose AUC is 1/2: few rows may show less.
    variance = max(variance, inside * (1 - inside) / (3 * left_open))
    variance *= 1 + _COST_OF_PREDICTIONS + _COST_OF_FEW_ROWS / left_open
    # Importing it takes time that only a run that is measured should pay.
    from scipy.special import expit, logit  # noqa: PLC0415

    reach = _NORMAL_975 * variance**0.5 / (inside * (1 - inside))
    ends = expit(logit(inside) + np.array([-reach, reach]))
    # Of 95 % up to here: at an area of 1, the logit scale stretches further errors too far.
    low, high = (auc + STANDARD_ERRORS / _NORMAL_975 * (ends - auc)).clip(0, 1)
    return (0.0 if auc <= half else float(low)), (1.0 if auc >= 1 - half else float(high))


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

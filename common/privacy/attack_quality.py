"""What an attack is worth to whoever runs it: beyond the area under the ROC curve.

    advantage        AUC of the attack minus AUC of a model of the attacker's own features that was
                     fitted to the same known labels; 1/2 for an attack that knows none
    TPR at an FPR    share of the positives found while at most that share of negatives is accused
                     (Carlini et al., "Membership Inference Attacks From First Principles", 2022)
    precision        share of positives among the rows with the highest scores

The interval of a difference of two AUCs on the same rows is that of DeLong, DeLong and
Clarke-Pearson (Biometrics 44, 1988).
"""

from typing import NamedTuple

import numpy as np

from splitveil.common.privacy.adjusted_auc import Mask, placements
from splitveil.common.privacy.pair_aucs import Floats

TOP_ROWS = 100
_NORMAL_975 = 1.959963984540054


class Advantage(NamedTuple):
    """By how much an attack does better than the attacker's own features."""

    value: float
    low: float
    high: float
    prior: float
    """Leak AUC of the attacker's own model."""


class OperatingPoints(NamedTuple):
    """How many labels an attack finds where it is most certain."""

    tpr_at_per_mille: float
    """True positive rate where at most 0.1 % of the negatives are accused."""
    tpr_at_percent: float
    """True positive rate where at most 1 % of the negatives are accused."""
    precision_at_100: float | None
    """Share of positives among the 100 highest scores; None for 100 rows or fewer."""


def advantage_over(prior: Floats, scores: Floats, positive: Mask) -> Advantage:
    """Compare an attack with what the attacker knew before.

    Args:
        prior: the scores of the attacker's own model, (rows,); any constant if it has none.
        scores: the attack's, (rows,).
        positive: (rows,).

    Raises:
        OneClass: there is no positive, or no negative.
    """
    attack, own = placements(scores, positive), placements(prior, positive)
    signs = [1.0 if one.auc >= 0.5 else -1.0 for one in (attack, own)]
    variance = 0.0
    for of_attack, of_own in zip(attack, own, strict=True):
        difference = signs[0] * of_attack - signs[1] * of_own
        variance += float(difference.var(ddof=1)) / len(difference) if len(difference) > 1 else 1.0
    folded = [max(one.auc, 1 - one.auc) for one in (attack, own)]
    value, reach = folded[0] - folded[1], _NORMAL_975 * variance**0.5
    return Advantage(value, value - reach, value + reach, folded[1])


def operating_points(scores: Floats, positive: Mask) -> OperatingPoints:
    """Return what an attack finds with few errors; a score with an AUC below 1/2 is inverted.

    A tie with the first negative too many counts as not found. Ties at the end of the highest
    scores count with their share of positives.

    Args:
        scores: (rows,).
        positive: (rows,).

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
    return OperatingPoints(per_mille, percent, _precision(scores, positive))


def _precision(scores: Floats, positive: Mask) -> float | None:
    if len(scores) <= TOP_ROWS:
        return None
    last = np.sort(scores)[-TOP_ROWS]
    above, tied = scores > last, scores == last
    missing = TOP_ROWS - int(above.sum())
    return float((positive[above].sum() + missing * positive[tied].mean()) / TOP_ROWS)

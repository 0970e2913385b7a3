"""How much noise power a strength asks for, in each of the units that it can be given in.

    power_ratio s        P = s c, with c the squared gap of the class means (Li et al., ICLR 2022)
    sum_kl e             the least P that leaves a divergence of at most e
    detection_error L    e = (2 - 4 L)^2, from L >= 1/2 - V/2 and V <= sqrt(e)/2
    leak_auc A           e = 4 V artanh(V) with V = 1 - sqrt(2 (1 - A)), the inverse of
                         ``leak_auc_bound``

V is the total variation of the classes. For a leak AUC the papers take e = 4 V^2 instead, which
guarantees the same and asks for more: 4 V artanh(V) is larger at every A, so that less power is
enough. It is also unbounded where theirs ends at 4.
"""

from collections.abc import Callable

from splitveil.active_party.defenses.class_statistics import ClassEstimate
from splitveil.active_party.defenses.settings import (
    DetectionError,
    LeakAuc,
    PowerRatio,
    Strength,
    SumKl,
)
from splitveil.active_party.defenses.sum_kl import power_for_sum_kl, sum_kl_for_leak_auc

PowerRule = Callable[[ClassEstimate, int], float]
"""From the classes and ``cut_dim`` to the noise power, in units of the estimate's ``unit``^2."""


def power_rule(strength: Strength) -> PowerRule:
    """Build the rule by which a strength chooses each batch's noise power."""
    if isinstance(strength, PowerRatio):
        power_ratio = strength.power_ratio
        return lambda estimate, _: power_ratio * estimate.gap_squared
    allowed = allowed_sum_kl(strength)
    return lambda estimate, cut_dim: power_for_sum_kl(
        neg_variance=estimate.neg_variance,
        pos_variance=estimate.pos_variance,
        gap_squared=estimate.gap_squared,
        cut_dim=cut_dim,
        pos_fraction=estimate.pos_fraction,
        sum_kl=allowed,
    )


def allowed_sum_kl(strength: SumKl | DetectionError | LeakAuc) -> float:
    """Return the divergence that a strength allows in one answer."""
    match strength:
        case SumKl():
            return strength.sum_kl
        case DetectionError():
            return (2 - 4 * strength.detection_error) ** 2
        case LeakAuc():
            return sum_kl_for_leak_auc(strength.leak_auc)

"""The strength of ``marvell``: the noise power that it asks for, in four units.

    power_ratio s        P = s c, with c the squared gap of the class means (Li et al., ICLR 2022)
    sum_kl e             the least P that leaves a divergence of at most e
    detection_error L    e = (2 - 4 L)^2, from L >= 1/2 - V/2 and V <= sqrt(e)/2
    leak_auc A           e = 4 V artanh(V) with V = 1 - sqrt(2 (1 - A)), the inverse of
                         ``leak_auc_bound``

V is the total variation of the classes. For a leak AUC the papers take e = 4 V^2 instead, which
bounds the same and asks for more: 4 V artanh(V) is larger at every A, so that less power is
enough. It is also unbounded where theirs ends at 4.
"""

from typing import Annotated

from pydantic import Field, Tag

from splitveil.active_party.defenses.sum_kl import sum_kl_for_leak_auc
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

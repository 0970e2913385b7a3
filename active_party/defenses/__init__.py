"""What the active party does to a gradient before it leaves, so that it tells little of the labels.

Every defense takes the raw gradient and the labels of one batch. All but ``none`` scale with the
gradient: k g is answered as k times the answer to g.
"""

import logging

from active_party.defenses.iso import Isotropic
from active_party.defenses.marvell import Marvell
from active_party.defenses.max_norm import MaxNorm
from active_party.defenses.max_norm_positive import MaxNormPositive
from active_party.defenses.noise import (
    DefaultNoise,
    EntropyNoise,
    InsecureSeededNoise,
    NoiseSource,
    SecureNoise,
)
from active_party.defenses.none import Undefended
from active_party.defenses.report import DefendedGradient, Defense, DefenseReport
from active_party.defenses.settings import (
    DefenseSettings,
    IsoDefense,
    MarvellDefense,
    MaxNormDefense,
    MaxNormPositiveDefense,
    NoDefense,
    NoisyDefense,
)
from active_party.defenses.strength import power_rule
from active_party.defenses.sum_kl import NoiseSolution

__all__ = [
    "DefendedGradient",
    "Defense",
    "DefenseReport",
    "DefenseSettings",
    "NoiseSolution",
    "build_defense",
]


def build_defense(settings: DefenseSettings) -> Defense:
    """Build the defense that the settings name, with a noise source of its own."""
    match settings:
        case NoDefense():
            return Undefended()
        case IsoDefense():
            return Isotropic(settings.amplitude, _noise_source(settings))
        case MaxNormDefense():
            return MaxNorm(_noise_source(settings))
        case MaxNormPositiveDefense():
            return MaxNormPositive(_noise_source(settings))
        case MarvellDefense():
            return Marvell(
                power_rule(settings.strength),
                _noise_source(settings),
                from_earlier=settings.statistics == "running",
            )


def _noise_source(settings: NoisyDefense) -> NoiseSource:
    if settings.insecure_noise_seed is None:
        if settings.secure_noise is None:
            return DefaultNoise()
        return SecureNoise() if settings.secure_noise else EntropyNoise()
    logging.getLogger(__name__).warning(
        "INSECURE: insecure_noise_seed is set; whoever knows it subtracts the noise and reads the "
        "labels. It is for tests only."
    )
    return InsecureSeededNoise(settings.insecure_noise_seed)

"""The settings of the defenses: which one, and how strong."""

from typing import Annotated, Literal

from pydantic import Field

from common.settings import Section


class NoDefense(Section):
    """Send the raw gradient: to measure the leak, not to train with."""

    name: Literal["none"] = "none"


class NoisyDefense(Section):
    """What every defense with random noise can be told."""

    insecure_noise_seed: int | None = Field(default=None, ge=0, lt=2**63)
    """For tests only: whoever knows the seed subtracts the noise. Absent: unpredictable noise."""


class IsoDefense(NoisyDefense):
    """The same Gaussian noise on every example, whatever its label."""

    name: Literal["iso"] = "iso"

    noise_ratio: float = Field(default=1.0, ge=0, le=1e6)
    """Root-mean-square noise norm r, in units of the batch's largest gradient norm.

    The papers' power ratio t is its square: t = r^2.
    """


class MaxNormDefense(NoisyDefense):
    """Noise along each gradient that brings it to the batch's largest norm."""

    name: Literal["max_norm"] = "max_norm"


class PowerRatio(Section):
    """Strength given as power: P = power_ratio * |gap of the class means|^2."""

    power_ratio: float = Field(gt=0, le=1e6)
    """Noise power in units of the squared distance of the class means (the s of ICLR 2022)."""


Strength = PowerRatio
"""How strong marvell is; the key that is present says in which unit."""


class MarvellDefense(NoisyDefense):
    """The noise that leaves the classes the least divergence for its power."""

    name: Literal["marvell"] = "marvell"

    strength: Strength = PowerRatio(power_ratio=4.0)
    """How much noise."""


DefenseSettings = Annotated[
    NoDefense | IsoDefense | MaxNormDefense | MarvellDefense, Field(discriminator="name")
]

"""Defenses for programs: their settings, and the parts of a custom defense.

    from splitveil import defenses, simulate

    simulate("breast_cancer", defense=defenses.Iso(noise_ratio=2))
    answer = defenses.Marvell(power_ratio=4)(gradients, labels)   # in a training loop of one's own

    class Half(defenses.Defense):
        def __init__(self, context, noise):
            self._noise = noise

        def defend(self, batch):
            return defenses.Defended(defenses.release(batch.gradients / 2, batch.gradients))

    simulate("breast_cancer", defense=Half)

``own`` gives a class arguments, or turns a function into a defense. An answer without a charge is
charged without bound; ``docs/defenses.md`` says how a defense states one.
"""

from typing import get_args

from splitveil.active_party.defenses import (
    Adversary,
    Charge,
    Defended,
    DefendedGradient,
    Defense,
    DefenseContext,
    DefenseSettings,
    NoDefense,
    NoiseSource,
    Step,
    noise_digest,
    release,
)
from splitveil.active_party.defenses import CustomDefense as Custom
from splitveil.active_party.defenses import GafmDefense as Gafm
from splitveil.active_party.defenses import IsoDefense as Iso
from splitveil.active_party.defenses import MarvellDefense as Marvell
from splitveil.active_party.defenses import MaxNormDefense as MaxNorm
from splitveil.active_party.defenses import MaxNormPositiveDefense as MaxNormPositive
from splitveil.active_party.defenses import NoisyLabelDefense as NoisyLabel
from splitveil.library.choices import own_defense as own

__all__ = [
    "NAMES",
    "Adversary",
    "Charge",
    "Custom",
    "Defended",
    "DefendedGradient",
    "Defense",
    "DefenseContext",
    "Gafm",
    "Iso",
    "Marvell",
    "MaxNorm",
    "MaxNormPositive",
    "NoDefense",
    "NoiseSource",
    "NoisyLabel",
    "Step",
    "noise_digest",
    "own",
    "release",
]

NAMES: tuple[str, ...] = tuple(
    str(section.model_fields["name"].default) for section in get_args(get_args(DefenseSettings)[0])
)
"""The names of defenses in settings and ``simulate``."""

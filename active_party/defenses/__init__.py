"""The active party's defenses, which limit what a gradient reveals about the labels.

Every defense takes the raw gradient and the labels of one batch. All but ``none`` scale with the
gradient: the answer to k g is k times the answer to g. Most defend the gradient of the cross
entropy; ``noisy_label`` replaces the labels of the loss, and ``gafm`` the loss itself.

A defense is one module: its settings class answers every question about it (see ``section``) and is
a member of the union below.
"""

from typing import Annotated

from pydantic import Field

from splitveil.active_party.defenses.custom import CustomDefense
from splitveil.active_party.defenses.gafm import GafmDefense
from splitveil.active_party.defenses.interface import (
    Defended,
    DefendedGradient,
    Defense,
    DefenseContext,
    Secrets,
    Step,
    release,
)
from splitveil.active_party.defenses.iso import IsoDefense
from splitveil.active_party.defenses.marvell import MarvellDefense
from splitveil.active_party.defenses.max_norm import MaxNormDefense, MaxNormPositiveDefense
from splitveil.active_party.defenses.noise import AnswerKeys, NoiseSource
from splitveil.active_party.defenses.noisy_label import NoisyLabelDefense
from splitveil.active_party.defenses.none import NoDefense
from splitveil.common.privacy.charge import Adversary, Charge, noise_digest

__all__ = [
    "Adversary",
    "AnswerKeys",
    "Charge",
    "CustomDefense",
    "Defended",
    "DefendedGradient",
    "Defense",
    "DefenseContext",
    "DefenseSettings",
    "GafmDefense",
    "IsoDefense",
    "MarvellDefense",
    "MaxNormDefense",
    "MaxNormPositiveDefense",
    "NoDefense",
    "NoiseSource",
    "NoisyLabelDefense",
    "Secrets",
    "Step",
    "noise_digest",
    "release",
]

DefenseSettings = Annotated[
    NoDefense
    | IsoDefense
    | MaxNormDefense
    | MaxNormPositiveDefense
    | MarvellDefense
    | NoisyLabelDefense
    | GafmDefense
    | CustomDefense,
    Field(discriminator="name"),
]
"""The settings of a defense; ``name`` selects the defense."""

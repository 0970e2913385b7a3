"""The facts about a run from which a defense is built."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.example_keys import NoiseKey
from splitveil.active_party.defenses.noise import DrawKeys
from splitveil.common.data.label_range import ONE_NUMBER


class DefenseContext(NamedTuple):
    """The facts about a run that a defense depends on."""

    cut_shape: tuple[int, ...]
    """Shape of one row of the gradient that is defended."""

    num_classes: int = 2
    """``ONE_NUMBER`` where labels are numbers, as shares of their range within 0 and 1."""

    pos_fraction: float = 0.5
    """Share of positives among the training rows, above 0 and below 1; with several classes and
    with numbers, charges do not depend on it. For numbers: the share with which 0 and 1 would have
    the labels' variance."""

    epochs: int = 1
    """Number of epochs of the run."""

    label_bounds: tuple[float, float] | None = None
    """The bounds of labels that are numbers, in their unit; None for classes."""

    labels: str = ""
    """Says what the labels are: their column, and what 0, 1 or a class in it stands for."""

    @property
    def is_number(self) -> bool:
        """Whether labels are numbers."""
        return self.num_classes == ONE_NUMBER

    @property
    def cut_dim(self) -> int:
        """Number of values in one row of the gradient."""
        return math.prod(self.cut_shape)


class NoiseSecrets(NamedTuple):
    """The secrets from which a defense draws its noise."""

    noise_key: NoiseKey | None = None
    """The key of persistent noise and noisy labels; None where the defense needs none."""

    draw_keys: DrawKeys | None = None
    """The source of the keys of fresh noise. If it is None, they come from the operating system,
    or in tests from the settings' ``insecure_noise_seed``."""


NO_SECRETS = NoiseSecrets()


class Examples(NamedTuple):
    """The aligned examples of a run, in the common order."""

    ids: Sequence[str]
    """Canonical ids; empty if the defense does not have a noise key."""

    labels: Tensor
    """True labels, (aligned,)."""

    device: torch.device
    """The device on which the top model is trained."""

    training: Tensor | None = None
    """Positions of the training rows, (training rows,) int64, ascending; None for all rows."""

    subjects: Tensor | None = None
    """A number for each person, (aligned,) int64; None if every row has a person of its own."""

    known_targets: Tensor | None = None
    """Targets that earlier runs released, (aligned,) or (aligned, classes), NaN where there is
    none; None if there are none at all."""


class BuildInputs(NamedTuple):
    """Everything from which a defense is built, beside its settings."""

    context: DefenseContext

    secrets: NoiseSecrets = NO_SECRETS
    """The secrets from which noise is drawn."""

    examples: Examples | None = None
    """The examples of the run; a defense that replaces their labels needs them for
    ``Defense.targets``."""

"""Builds defenses for tests from their settings and a few secrets, without a run."""

from splitveil.active_party.defenses import Defense, DefenseContext, DefenseSettings, NoiseSecrets
from splitveil.active_party.defenses.example_keys import NoiseKey
from splitveil.active_party.defenses.noise import DrawKeys


def context_of(cut_dim: int = 8, num_classes: int = 2, pos_fraction: float = 0.5) -> DefenseContext:
    return DefenseContext((cut_dim,), num_classes, pos_fraction)


def build_defense(
    settings: DefenseSettings,
    noise_key: NoiseKey | None = None,
    draw_keys: DrawKeys | None = None,
    num_classes: int = 2,
) -> Defense:
    """Build the defense that the settings name, for a batch of any width."""
    context = context_of(num_classes=num_classes)
    return settings.build(context, NoiseSecrets(noise_key, draw_keys))

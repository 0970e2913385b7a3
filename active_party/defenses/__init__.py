"""What the active party does to a gradient before it leaves, so that it tells little of the labels.

Every defense takes the raw gradient and the labels of one batch. All but ``none`` scale with the
gradient: k g is answered as k times the answer to g. ``gafm`` and ``noisy_label`` shape what the
raw gradient is; what is built here for them is what comes after.
"""

import logging
from pathlib import Path

from splitveil.active_party.defenses.example_keys import (
    NoiseKey,
    key_for,
    key_from_insecure_seed,
    key_name,
    load_or_create_key,
)
from splitveil.active_party.defenses.interface import DefendedGradient, Defense, DefenseReport
from splitveil.active_party.defenses.iso import Isotropic
from splitveil.active_party.defenses.label_noise import NoisyLabel
from splitveil.active_party.defenses.marvell import Marvell
from splitveil.active_party.defenses.max_norm import MaxNorm
from splitveil.active_party.defenses.max_norm_positive import MaxNormPositive
from splitveil.active_party.defenses.multi_class_defenses import (
    MultiClassIsotropic,
    MultiClassMarvell,
    MultiClassMaxNorm,
)
from splitveil.active_party.defenses.noise import (
    AnswerKeys,
    DefaultNoise,
    DrawKeys,
    EntropyNoise,
    InsecureSeededNoise,
    NoiseSource,
    SecureNoise,
    fresh_key,
)
from splitveil.active_party.defenses.none import Undefended
from splitveil.active_party.defenses.persistent import (
    KeyedScalars,
    PersistentIsotropic,
    PersistentMarvell,
    PersistentMaxNorm,
    repeated_sum_kl,
)
from splitveil.active_party.defenses.settings import (
    DefenseSettings,
    GafmDefense,
    IsoDefense,
    MarvellDefense,
    MaxNormDefense,
    MaxNormPositiveDefense,
    NoDefense,
    NoisyDefense,
    NoisyLabelDefense,
    refusal_of_several_classes,
)
from splitveil.active_party.defenses.strength import power_rule
from splitveil.active_party.defenses.sum_kl import NoiseSolution

__all__ = [
    "AnswerKeys",
    "DefendedGradient",
    "Defense",
    "DefenseReport",
    "DefenseSettings",
    "NoiseKey",
    "NoiseSolution",
    "build_defense",
    "open_noise_key",
]

_AddsNoise = IsoDefense | MaxNormDefense | MaxNormPositiveDefense | MarvellDefense


def build_defense(
    settings: DefenseSettings,
    noise_key: NoiseKey | None = None,
    draw_keys: DrawKeys | None = None,
    num_classes: int = 2,
) -> Defense:
    """Build the defense that the settings name, with a noise source of its own.

    Args:
        settings: which defense, and how strong.
        noise_key: what persistent noise and noisy labels are drawn from.
        draw_keys: gives the keys of fresh noise; by default the operating system does, or for tests
            the settings' ``insecure_noise_seed``.
        num_classes: how many classes there are.

    Raises:
        ValueError: the defense needs a noise key and there is none, or it is not for so many
            classes.
    """
    refusal = refusal_of_several_classes(settings) if num_classes > 2 else None
    if refusal is not None:
        raise ValueError(refusal)
    match settings:
        case NoDefense():
            return Undefended(num_classes)
        case NoisyLabelDefense():
            return NoisyLabel(settings, _present(noise_key, settings.name), num_classes)
        case GafmDefense():
            if settings.insecure_noise_seed is not None:
                _warn_of_seed()
            return build_defense(settings.composed_with, noise_key, draw_keys)
        case _ if settings.noise == "persistent":
            noise = _noise_source(settings, draw_keys)
            key = _present(noise_key, settings.name)
            return _build_persistent(settings, key, noise, num_classes)
        case _ if num_classes > 2:
            return _build_for_several(settings, _noise_source(settings, draw_keys), num_classes)
        case _:
            return _build_fresh(settings, _noise_source(settings, draw_keys))


def open_noise_key(
    settings: DefenseSettings, cut_dim: int, path: Path, num_classes: int = 2
) -> NoiseKey | None:
    """Return the key that a defense draws its noise from; None if the defense needs none.

    The file at ``path``, made if there is none, gives every strength a key of its own. The same
    noise at two strengths would be two equations for noise and label; so another strength draws
    other noise, of which no more is known than of fresh noise.

    Raises:
        SettingsError: the file is not a key, or others may know it.
        StorageError: there is none, and none can be written.
    """
    match settings:
        case NoDefense():
            return None
        case NoisyLabelDefense():
            strength = f"noisy_label {settings.mechanism!r}"
            strength += f" of {num_classes}" if num_classes > 2 else ""
        case GafmDefense(composed_with=NoisyLabelDefense() as behind):
            # The key of noisy_label by itself: a label's flip is drawn once, whatever it is in.
            strength = f"noisy_label {behind.mechanism!r}"
        case GafmDefense(response="fresh"):
            return None
        case GafmDefense():
            strength = f"gafm {settings.response_width!r}"
        case _ if settings.noise == "fresh":
            return None
        case IsoDefense():
            strength = f"iso {settings.amplitude!r} in {cut_dim}"
        case MarvellDefense():
            strength = f"marvell {repeated_sum_kl(settings.strength)!r}"
        case _:
            strength = f"{settings.name} to the largest norm"
    if settings.insecure_noise_seed is None:
        key = load_or_create_key(path)
    else:
        _warn_of_seed()
        key = key_from_insecure_seed(settings.insecure_noise_seed)
    return key_for(key, strength)


def _present(noise_key: NoiseKey | None, name: str) -> NoiseKey:
    if noise_key is None:
        raise ValueError(f"{name} as it is set needs a noise key")
    return noise_key


def _build_fresh(settings: _AddsNoise, noise: NoiseSource) -> Defense:
    match settings:
        case IsoDefense():
            return Isotropic(settings.amplitude, noise)
        case MaxNormDefense():
            return MaxNorm(noise)
        case MaxNormPositiveDefense():
            return MaxNormPositive(noise)
        case MarvellDefense():
            return Marvell(
                power_rule(settings.strength),
                noise,
                from_earlier=settings.statistics == "running",
            )


def _build_for_several(settings: _AddsNoise, noise: NoiseSource, num_classes: int) -> Defense:
    match settings:
        case IsoDefense():
            return MultiClassIsotropic(settings.amplitude, noise, num_classes)
        case MaxNormDefense():
            return MultiClassMaxNorm(noise, num_classes)
        case MarvellDefense():
            return MultiClassMarvell(
                settings.strength,
                noise,
                num_classes,
                from_earlier=settings.statistics == "running",
            )
        case MaxNormPositiveDefense():
            raise ValueError("max_norm_positive is for two classes")


def _build_persistent(
    settings: _AddsNoise, noise_key: NoiseKey, noise: NoiseSource, num_classes: int
) -> Defense:
    match settings:
        case IsoDefense():
            return PersistentIsotropic(settings.amplitude, noise, key_name(noise_key))
        case MaxNormDefense():
            keyed = KeyedScalars(noise)
            if num_classes > 2:
                return PersistentMaxNorm(MultiClassMaxNorm(keyed, num_classes), keyed)
            return PersistentMaxNorm(MaxNorm(keyed), keyed)
        case MaxNormPositiveDefense():
            keyed = KeyedScalars(noise)
            return PersistentMaxNorm(MaxNormPositive(keyed), keyed)
        case MarvellDefense():
            return PersistentMarvell(repeated_sum_kl(settings.strength), key_name(noise_key))


def _noise_source(settings: NoisyDefense, draw_keys: DrawKeys | None) -> NoiseSource:
    if settings.insecure_noise_seed is not None:
        _warn_of_seed()
        if draw_keys is None:
            return InsecureSeededNoise(settings.insecure_noise_seed)
    keys = draw_keys or fresh_key
    if settings.secure_noise is None:
        return DefaultNoise(keys)
    return SecureNoise(keys) if settings.secure_noise else EntropyNoise(keys)


def _warn_of_seed() -> None:
    logging.getLogger(__name__).warning(
        "INSECURE: insecure_noise_seed is set; whoever knows it subtracts the noise and reads the "
        "labels. It is for tests only."
    )

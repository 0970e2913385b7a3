"""The attacks on received gradients that a party without any label can run."""

from splitveil.common.privacy.attacks import ATTACKS, AttackName

LABEL_FREE: tuple[AttackName, ...] = (
    *(
        name
        for name, attack in ATTACKS.items()
        if attack.is_free and attack.reads_gradients  # the others tell what features tell
    ),
    "accumulated_spectral",
    "accumulated_residual_energy",
)

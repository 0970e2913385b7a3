"""The attacks whose scores a party can compute that knows no label: those an audit is about."""

from common.privacy.attacks import ATTACKS, AttackName, SideInformation

LABEL_FREE: tuple[AttackName, ...] = (
    *(
        name
        for name, attack in ATTACKS.items()
        if attack.needs <= {SideInformation.POSITIVES_ARE_FEWER, SideInformation.ACTIVATIONS}
    ),
    "accumulated_spectral",
)

"""What the attacker needs to know, by attack."""

from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS, SideInformation


def needs_of(attack: str) -> str:
    """Describe the side information that an attacker needs besides the gradients."""
    kinds = _kinds(attack)
    if kinds is None:
        return "not known here"
    needs = [f"{one.words} (evaluation only)" if one.is_oracle else one.words for one in kinds]
    labels = {str(name): one.labels for name, one in RUN_ATTACKS.items()}.get(attack)
    return "; ".join(sorted(needs + ([] if labels is None else [labels]))) or "nothing"


def is_oracle(attack: str) -> bool:
    """Return whether an attack uses knowledge that only an evaluation has."""
    return any(one.is_oracle for one in _kinds(attack) or ())


def _kinds(attack: str) -> frozenset[SideInformation] | None:
    needs = {str(name): one.needs for name, one in ATTACKS.items()}
    needs |= {str(name): one.needs for name, one in RUN_ATTACKS.items()}
    return needs.get(attack)

"""What has no meaning where labels are numbers: settings about AUCs of attacks on classes."""

from typing import NamedTuple


class ClassUses(NamedTuple):
    has_leak_gate: bool
    has_min_test_auc: bool
    allows_audits: bool
    names_attacks: bool
    """Whether the leak monitor's attacks are others than by default."""


def refusal_of_class_uses(uses: ClassUses) -> str | None:
    """Explain which setting cannot be used with labels that are numbers; None if none is set."""
    if uses.has_leak_gate:
        return (
            "leak_gate: it judges AUCs of attacks on classes; with data.label_range set it to null"
        )
    if uses.has_min_test_auc:
        return "report.min_test_auc: with data.label_range there is no AUC; set it to null"
    if uses.allows_audits:
        return (
            "allow_audits: audits measure AUCs of attacks on classes; with data.label_range set it "
            "to false"
        )
    if uses.names_attacks:
        return (
            "leak_monitor.attacks: they tell classes apart; with data.label_range the leak monitor "
            "always runs those on numbers: leave the list out, or set leak_monitor to null for none"
        )
    return None

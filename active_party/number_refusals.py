"""What has no meaning where labels are numbers: settings about AUCs of attacks on classes."""

from typing import NamedTuple


class ClassUses(NamedTuple):
    """Settings that are about classes."""

    has_leak_gate: bool
    has_min_test_auc: bool
    allows_audits: bool


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
    return None

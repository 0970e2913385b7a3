"""States the peers for whom the ledger's guarantee does not hold, for reports and plans."""

from collections.abc import Mapping
from typing import Any

SEE = "docs/defenses.md, section 'Which bounds do not hold'"


def limit_of_guarantee(defense: Mapping[str, Any]) -> str:
    """Return a sentence about the limits of a guarantee, empty if it holds for every peer.

    Args:
        defense: the settings of the defense, as plain values.
    """
    match defense:
        case {"name": "noisy_label", "top_labels": "true"}:
            return (
                "With top_labels true the guarantee is not proved: what the top model learns of "
                "the labels is not charged."
            )
        case {"name": "noisy_label"} | {"name": "gafm", "composed_with": {"name": "noisy_label"}}:
            return ""
        case {"name": "marvell", "noise": "fresh"}:
            return (
                "The guarantee does not hold for every peer: charges of fresh noise describe "
                "attacks on the class means of a batch. They may be too low against a peer that "
                "looks across the gap of the means, and late in training against one that can tell "
                f"what the model predicts for an example: see {SEE}."
            )
        case {"name": "marvell" | "iso", "noise": "persistent"}:
            return (
                "The guarantee does not hold for every peer: charges of persistent noise describe "
                "one that sends its model's activations. They are too low against a peer that "
                f"chooses its activations: see {SEE}."
            )
        case {"noise": "fresh"}:
            return (
                "The guarantee does not hold for every peer: charges of fresh noise describe "
                "attacks on the class means of a batch. They are too low late in training against "
                "a peer that can tell what the model predicts for an example."
            )
        case _:
            return (
                "The guarantee holds for attacks that the charges describe, and not for every "
                f"peer: see {SEE}."
            )

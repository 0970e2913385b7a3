"""Whom the charges of a defense describe, and why not everybody."""

from typing import NamedTuple

from splitveil.common.privacy.covers import Covers

SEE = "docs/defenses.md, section 'Which bounds do not hold'"


class Coverage(NamedTuple):
    """The peers whom all charges of a defense describe, and the reason."""

    covers: Covers
    """The widest circle that every charge describes."""

    why: str
    """A sentence about who is described, and who is not."""


COVERS_CLASS_MEANS = Coverage(
    Covers.CLASS_MEANS,
    "The charges of fresh noise compare the class means of a batch. They do not describe a peer "
    "that looks at anything else, such as the energy of single rows or what the model predicts "
    f"for an example: see {SEE}.",
)
COVERS_PASSIVE_AND_HONEST = Coverage(
    Covers.PASSIVE_AND_HONEST,
    "The charges of persistent noise describe a peer that sends its model's activations. They do "
    f"not describe one that chooses its activations: see {SEE}.",
)

"""The adversary classes that a bound holds for: a charge of the ledger describes one of them."""

from enum import StrEnum


class Adversary(StrEnum):
    """The peers whom a charge describes, from the strongest adversary class to the narrowest."""

    ANYBODY = "anybody"
    """Every peer: it may choose its activations, and know everything but the one label."""

    HONEST_BUT_CURIOUS = "honest-but-curious"
    """A peer that sends its model's activations, whatever it knows of features and predictions. The
    bound is about the label beyond what the predictions themselves reveal of it."""

    CLASS_MEANS = "knows class means only"
    """A peer that follows the protocol and compares gradients with the class means of a batch."""

    @property
    def column(self) -> str:
        """The name of a column that holds the bound for these peers."""
        return f"bound_{self.replace(' ', '_')}"

    @property
    def in_words(self) -> str:
        """The peers, as a sentence names them."""
        return _IN_WORDS[self]

    def includes(self, peers: "Adversary") -> bool:
        """Return whether a charge that describes these peers describes the others, too."""
        return _ORDER[self] <= _ORDER[peers]


_IN_WORDS = {
    Adversary.ANYBODY: "anybody",
    Adversary.HONEST_BUT_CURIOUS: "an honest-but-curious peer",
    Adversary.CLASS_MEANS: "a peer that knows class means only",
}
_ORDER = {adversary: rank for rank, adversary in enumerate(Adversary)}


def narrowest(*charges: Adversary) -> Adversary:
    """Return the peers whom all of several charges describe."""
    return max(charges, key=_ORDER.__getitem__, default=Adversary.ANYBODY)

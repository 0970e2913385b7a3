"""The charge of an answer: what it adds to the account of each example in it, and against whom."""

import hashlib
import math
import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self


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


_FORM = struct.Struct("<dddd32sB?")
_ADVERSARIES = tuple(Adversary)
_DIGEST_BYTES = 32

NOT_GAUSSIAN = 1
_NOT_AGAINST = {adversary: 2 << rank for rank, adversary in enumerate(Adversary)}
ALL_CAVEATS = NOT_GAUSSIAN + sum(_NOT_AGAINST.values())


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of a defense; the log of answers records it, and accounts add it up.

    A figure that is not a number, or out of its range, counts as unknown. Raises ValueError for a
    noise identity that is no digest.
    """

    sum_kl: float
    """Divergence of the classes along their gap, computed as if the classes had zero spread,
    because the peer may predict the spread from its activations. Infinite for a bare gradient.
    """
    noise_identity: bytes = b""
    """Empty for fresh noise, whose charges add up. Answers with the same identity, a `noise_digest`
    of 32 bytes, repeat the same noise for each example: the largest of their charges counts, not
    the sum."""
    epsilon: float = math.inf  # label-DP of all answers of this identity together; infinite: none
    adversary: Adversary = Adversary.CLASS_MEANS  # the peers whom the charge describes
    is_gaussian: bool = False
    """True if the answers are a Gaussian mechanism with mu^2 = ``sum_kl``. Then the best AUC is
    Phi(mu / sqrt 2), exactly (Dong, Roth and Su 2022); otherwise only a bound for any distributions
    is known."""
    leak_auc: float = 1.0
    """Upper bound on the AUC of any score of all answers of this identity together, 1 if unknown;
    mostly smaller than the bound from ``sum_kl``. It bounds an account that is charged nothing
    else. The bound from ``epsilon`` need not be stated."""
    dominating_mu: float = math.inf
    """mu of a Gaussian mechanism that reveals no less than all answers of this identity together,
    infinite if none is known: with it the charge adds up to other charges. The mu from
    ``is_gaussian`` or ``epsilon`` need not be stated."""

    def __post_init__(self) -> None:
        if len(self.noise_identity) not in (0, _DIGEST_BYTES):
            raise ValueError("noise_identity: expected noise_digest(name), or b'' for fresh noise")
        for name in ("sum_kl", "epsilon", "dominating_mu"):
            if not getattr(self, name) >= 0:
                object.__setattr__(self, name, math.inf)
        if not 0.5 <= self.leak_auc <= 1:
            object.__setattr__(self, "leak_auc", 1.0)

    @property
    def caveats(self) -> int:
        """Caveats of the charge, as bits below 256."""
        narrow = sum(bit for to, bit in _NOT_AGAINST.items() if not self.adversary.includes(to))
        # Nothing is added to a Gaussian mechanism by an answer that reveals nothing.
        return narrow | (0 if self.is_gaussian or self.sum_kl == 0 else NOT_GAUSSIAN)

    def narrowed(self, peers: Adversary) -> Self:
        """Return the same charge for no more peers than these."""
        return replace(self, adversary=narrowest(self.adversary, peers))

    def to_bytes(self) -> bytes:
        """Return `CHARGE_BYTES` bytes; ``from_bytes`` restores the charge exactly."""
        return _FORM.pack(
            self.sum_kl,
            self.epsilon,
            self.leak_auc,
            self.dominating_mu,
            self.noise_identity,
            _ADVERSARIES.index(self.adversary),
            self.is_gaussian,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Restore a charge; raises ValueError for bytes that ``to_bytes`` does not return."""
        sum_kl, epsilon, leak_auc, mu, noise, rank, is_gaussian = _FORM.unpack(data)
        identity = noise if any(noise) else b""
        if rank >= len(_ADVERSARIES):
            raise ValueError("a charge for unknown peers")
        charge = cls(sum_kl, identity, epsilon, _ADVERSARIES[rank], is_gaussian, leak_auc, mu)
        if charge.to_bytes() != data:
            raise ValueError("a figure of a charge is out of range")
        return charge


CHARGE_BYTES = _FORM.size
NO_CHARGE = Charge(0.0, adversary=Adversary.ANYBODY, is_gaussian=True)
UNBOUNDED = Charge(math.inf)


def noise_digest(name: str) -> bytes:
    """Return the identity of repeated noise, 32 bytes, from a name of the noise's source."""
    return hashlib.sha256(name.encode()).digest()


def holds_against(caveats: int, peers: Adversary) -> bool:
    """Return whether a charge with these caveats describes an adversary class."""
    return not caveats & _NOT_AGAINST[peers]


def strongest_adversary(caveats: int) -> Adversary:
    """Return the strongest adversary class that a charge with these caveats describes."""
    return next(peers for peers in Adversary if holds_against(caveats, peers))

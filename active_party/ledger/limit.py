"""The limit to what a run may reveal, and for which peers it has to hold.

A limit in divergences is the same for every account. A limit in AUCs allows a Gaussian mechanism a
larger divergence than an account of unknown distributions, because its bound is exact.
"""

import math
from dataclasses import dataclass

import numpy as np

from splitveil.active_party.defenses.sum_kl import (
    estimated_auc,
    leak_auc_bound,
    sum_kl_for_estimated_auc,
    sum_kl_for_leak_auc,
)
from splitveil.active_party.ledger.bounds import NOT_GAUSSIAN, widest_covered
from splitveil.active_party.ledger.ledger import Exposure
from splitveil.common.privacy.covers import Covers, narrowest
from splitveil.common.text.upper_bounds import at_most, auc_at_most

ROUNDING = 1e-6
"""Relative excess of a sum that a budget allows, so that ten times a strength pays for ten answers.
"""


@dataclass(frozen=True)
class Limit:
    """Divergences that no account may exceed, and the peers whom all charges have to describe."""

    max_sum_kl: float
    """For accounts of any distributions."""
    max_gaussian_sum_kl: float
    """For accounts of Gaussian mechanisms."""
    peers: Covers = Covers.ANYBODY

    @classmethod
    def of_sum_kl(cls, sum_kl: float, peers: Covers = Covers.ANYBODY) -> "Limit":
        """Return the limit to a divergence."""
        return cls(sum_kl, sum_kl, peers)

    @classmethod
    def of_leak_auc(cls, leak_auc: float, peers: Covers = Covers.ANYBODY) -> "Limit":
        """Return the limit to an AUC, above 0.5 and below 1."""
        return cls(sum_kl_for_leak_auc(leak_auc), sum_kl_for_estimated_auc(leak_auc), peers)

    def of(self, caveats: int) -> float:
        """Return the divergence allowed to an account with these caveats."""
        return self.max_sum_kl if caveats & NOT_GAUSSIAN else self.max_gaussian_sum_kl

    def objection(self, reached: Exposure) -> str | None:
        """Say by how much some accounts would exceed the limit; None if they are within it."""
        allowed = np.where(
            reached.caveats & NOT_GAUSSIAN, self.max_sum_kl, self.max_gaussian_sum_kl
        )
        described = [widest_covered(kind) for kind in np.unique(reached.caveats).tolist()]
        narrow = narrowest(*described)
        if not narrow.includes(self.peers):
            return (
                f"would leave an example without a bound for {self.peers.in_words}: what was told "
                f"about it is bounded for {narrow.in_words}"
            )
        excess = reached.sum_kl / allowed
        worst = int(excess.argmax())
        if excess[worst] <= 1 + ROUNDING:
            return None
        kind = int(reached.caveats[worst])
        return (
            f"would take an example to {in_words(float(reached.sum_kl[worst]), kind)} for "
            f"{self.peers.in_words}; the budget is {in_words(self.of(kind), kind)}"
        )


def in_words(sum_kl: float, caveats: int) -> str:
    """Describe a divergence, and the leak AUC that it allows the peers whom it describes."""
    exact = not caveats & NOT_GAUSSIAN
    leak_auc = estimated_auc(sum_kl) if exact else leak_auc_bound(sum_kl)
    return f"sum_kl {at_most(sum_kl)}, a leak AUC of at most {auc_at_most(leak_auc)}"


def num_answers_within(max_sum_kl: float, charge: float) -> float:
    """Return the number of answers of equal charge that a budget pays for; infinite for no charge.

    Args:
        max_sum_kl: the rest of the budget; a negative rest pays for no answer.
        charge: divergence that each answer adds.
    """
    return math.inf if charge == 0 else max(max_sum_kl, 0.0) * (1 + ROUNDING) // charge

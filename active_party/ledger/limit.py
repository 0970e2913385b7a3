"""The limit to what a run may reveal, and for which peers it has to hold.

A limit in divergences is the same for every account. A limit in AUCs allows an account the larger
a divergence, the more is known of it: its exact figure where all its charges are a Gaussian
mechanism, and any divergence where another bound (``odds``) is within the limit.
"""

import math
from dataclasses import dataclass

import numpy as np

from splitveil.active_party.defenses.exact_auc import auc_of_epsilon
from splitveil.active_party.defenses.sum_kl import (
    sum_kl_for_estimated_auc,
    sum_kl_for_leak_auc,
)
from splitveil.active_party.ledger.bounds import widest_covered
from splitveil.active_party.ledger.ledger import Exposure
from splitveil.active_party.ledger.odds import Odds
from splitveil.common.privacy.covers import Covers, narrowest
from splitveil.common.text.upper_bounds import at_most, auc_at_most

ROUNDING = 1e-6
"""Relative excess of a sum that a budget allows, so that ten times a strength pays for ten answers.
"""


@dataclass(frozen=True)
class Limit:
    """What no account may exceed, and the peers whom all charges have to describe."""

    max_sum_kl: float
    """Divergence allowed to accounts of any distributions."""
    max_gaussian_sum_kl: float
    """Divergence allowed to accounts of Gaussian mechanisms."""
    peers: Covers = Covers.ANYBODY
    max_leak_auc: float | None = None
    """AUC up to which accounts may have any divergence; None for a limit to the divergence."""

    @classmethod
    def of_sum_kl(cls, sum_kl: float, peers: Covers = Covers.ANYBODY) -> "Limit":
        """Return the limit to a divergence."""
        return cls(sum_kl, sum_kl, peers)

    @classmethod
    def of_leak_auc(cls, leak_auc: float, peers: Covers = Covers.ANYBODY) -> "Limit":
        """Return the limit to an AUC, above 0.5 and below 1."""
        general, gaussian = sum_kl_for_leak_auc(leak_auc), sum_kl_for_estimated_auc(leak_auc)
        return cls(general, gaussian, peers, leak_auc)

    def of(self, odds: Odds) -> float:
        """Return the divergence allowed to an account of which this is known."""
        if self.max_leak_auc is None:
            return self.max_sum_kl
        known = min(odds.leak_auc, auc_of_epsilon(odds.epsilon))
        if known - 0.5 <= (self.max_leak_auc - 0.5) * (1 + ROUNDING):
            return math.inf
        return max(self.max_sum_kl, self.max_gaussian_sum_kl - odds.excess)

    def objection(self, reached: Exposure) -> str | None:
        """Say by how much some accounts would exceed the limit; None if they are within it."""
        described = [widest_covered(kind) for kind in np.unique(reached.caveats).tolist()]
        narrow = narrowest(*described)
        if not narrow.includes(self.peers):
            return (
                f"would leave an example without a bound for {self.peers.in_words}: what was told "
                f"about it is bounded for {narrow.in_words}"
            )
        allowed = np.array([self.of(odds) for odds in reached.odds.table])[reached.odds.kinds]
        excess = reached.sum_kl / allowed
        worst = int(excess.argmax())
        if excess[worst] <= 1 + ROUNDING:
            return None
        odds = reached.odds.table[reached.odds.kinds[worst]]
        return (
            f"would take an example to {in_words(float(reached.sum_kl[worst]), odds)} for "
            f"{self.peers.in_words}; the budget is {self.in_words(odds)}"
        )

    def in_words(self, odds: Odds) -> str:
        """Describe what is allowed to an account of which this is known."""
        allowed = self.of(odds)
        if self.max_leak_auc is None:
            return in_words(allowed, odds._replace(leak_auc=1.0, epsilon=math.inf))
        leak_auc = f"a leak AUC of at most {auc_at_most(self.max_leak_auc)}"
        return f"sum_kl {at_most(allowed)}, {leak_auc}" if math.isfinite(allowed) else leak_auc


def in_words(sum_kl: float, odds: Odds) -> str:
    """Describe a divergence, and the leak AUC that it allows the peers whom it describes."""
    leak_auc = odds.auc_bound(sum_kl)
    return f"sum_kl {at_most(sum_kl)}, a leak AUC of at most {auc_at_most(leak_auc)}"


def num_answers_within(max_sum_kl: float, charge: float) -> float:
    """Return the number of answers of equal charge that a budget pays for; infinite for no charge.

    Args:
        max_sum_kl: the rest of the budget; a negative rest pays for no answer, an infinite one for
            all of them.
        charge: divergence that each answer adds.
    """
    if charge == 0 or max_sum_kl == math.inf:
        return math.inf
    return max(max_sum_kl, 0.0) * (1 + ROUNDING) // charge

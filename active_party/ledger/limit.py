"""The limit to what a run may reveal, and for which peers it has to hold.

A limit in divergences is the same for every account. A limit in AUCs allows an account the larger
a divergence, the more is known of it: its exact figure where all its charges are a Gaussian
mechanism, and any divergence where another bound (``known_bounds``) is within the limit.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitveil.active_party.defenses.sum_kl import sum_kl_for_estimated_auc, sum_kl_for_leak_auc
from splitveil.active_party.ledger.bounds import strongest_adversary
from splitveil.active_party.ledger.known_bounds import KnownBounds, auc_bound
from splitveil.active_party.ledger.ledger import Exposure
from splitveil.common.privacy.adversary import Adversary, narrowest
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
    peers: Adversary = Adversary.ANYBODY
    max_leak_auc: float | None = None
    """AUC up to which accounts may have any divergence; None for a limit to the divergence."""

    @classmethod
    def of_sum_kl(cls, sum_kl: float, peers: Adversary = Adversary.ANYBODY) -> "Limit":
        """Return the limit to a divergence."""
        return cls(sum_kl, sum_kl, peers)

    @classmethod
    def of_leak_auc(cls, leak_auc: float, peers: Adversary = Adversary.ANYBODY) -> "Limit":
        """Return the limit to an AUC, above 0.5 and below 1."""
        general, gaussian = sum_kl_for_leak_auc(leak_auc), sum_kl_for_estimated_auc(leak_auc)
        return cls(general, gaussian, peers, leak_auc)

    def of(self, known: KnownBounds) -> npt.NDArray[np.float64]:
        """Return the divergence allowed to each account of which this is known, (accounts,)."""
        leak_auc, epsilon, excess = known
        if self.max_leak_auc is None:
            return np.full(leak_auc.shape, self.max_sum_kl)
        bound = np.minimum(leak_auc, 0.5 + np.tanh(epsilon / 2) / 2)  # `exact_auc.auc_of_epsilon`
        is_within = bound - 0.5 <= (self.max_leak_auc - 0.5) * (1 + ROUNDING)
        allowed = np.maximum(self.max_sum_kl, self.max_gaussian_sum_kl - excess)
        return np.where(is_within, math.inf, allowed)

    def objection(self, reached: Exposure) -> str | None:
        """Say by how much some accounts would exceed the limit; None if they are within it."""
        narrow = narrowest(*map(strongest_adversary, np.unique(reached.caveats).tolist()))
        if not narrow.includes(self.peers):
            return (
                f"would leave an example without a bound for {self.peers.in_words}: what was told "
                f"about it is bounded for {narrow.in_words}"
            )
        excess = reached.sum_kl / self.of(reached.known)
        worst = int(excess.argmax())
        if excess[worst] <= 1 + ROUNDING:
            return None
        known, sum_kl = reached.known[:, worst], float(reached.sum_kl[worst])
        return (
            f"would take an example to {_in_words(sum_kl, auc_bound(sum_kl, known))} for "
            f"{self.peers.in_words}; the budget is {self.in_words(known)}"
        )

    def in_words(self, known: KnownBounds) -> str:
        """Describe what is allowed to an account of which this is known, (3,)."""
        allowed = float(self.of(known))
        if self.max_leak_auc is None:
            of_any_epsilon = np.array([1.0, math.inf, known[2]])
            return _in_words(allowed, auc_bound(allowed, of_any_epsilon))
        if math.isfinite(allowed):
            return _in_words(allowed, self.max_leak_auc)
        return f"a leak AUC of at most {auc_at_most(self.max_leak_auc)}"


def _in_words(sum_kl: float, leak_auc: float) -> str:
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

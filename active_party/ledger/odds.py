"""What is known of accounts besides their divergence, from which smaller bounds follow.

An account may be a single release of which the best AUC is known, such as one noisy label, and it
may consist of releases whose odds are bounded. Each of these bounds on the AUC of every score holds
where it is finite, and so does the smallest of them:

    a                      all charges are one release, and no score of it passes a
    1/2 + tanh(e/2)/2      all charges are label-DP, e in total (`exact_auc.auc_of_epsilon`)
    Phi(mu / sqrt 2)       no charge tells more than some Gaussian mechanism; mu^2 adds up

The last one holds for mixtures. A label of each mechanism tells no more than some Gaussian
mechanism (`exact_auc`), and neither does any e-label-DP release (`exact_auc.gaussian_of_epsilon`).
Releases that follow each other, however the later ones depend on the earlier ones, tell no more
than the Gaussian mechanisms in their places (Dong, Roth and Su 2022, "Gaussian differential
privacy", theorem 3.2). For a Gaussian mechanism mu^2 is the divergence itself, so an account
remembers by how much mu^2 exceeds it.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.active_party.defenses.exact_auc import auc_of_epsilon, gaussian_of_epsilon
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound

Kinds = npt.NDArray[np.int32]


class Odds(NamedTuple):
    """What is known of one account besides its divergence."""

    leak_auc: float
    """AUC that no score passes, if all charges are one release: 0.5 before the first one, 1 if it
    is unknown or there are several."""
    epsilon: float
    """Label differential privacy of all charges together; infinite for none."""
    excess: float
    """mu^2 of a Gaussian mechanism that tells no less, minus the divergence; infinite if unknown.
    0 for a Gaussian mechanism."""

    def and_also(self, other: "Odds") -> "Odds":
        """Return what is known of two accounts' charges together."""
        if NOTHING in (self, other):
            return other if self == NOTHING else self
        return Odds(1.0, self.epsilon + other.epsilon, self.excess + other.excess)

    def or_more(self, other: "Odds") -> "Odds":
        """Return what is known of charges of which either this or the other is known."""
        return Odds(*map(max, self, other))

    def auc_bound(self, sum_kl: float) -> float:
        """Return the AUC that no score passes.

        Args:
            sum_kl: the account's divergence.
        """
        return min(
            self.leak_auc,
            leak_auc_bound(sum_kl),
            estimated_auc(sum_kl + self.excess),
            auc_of_epsilon(self.epsilon),
        )


NOTHING = Odds(0.5, 0.0, 0.0)
"""The odds of an account without charges."""
GAUSSIAN = Odds(1.0, math.inf, 0.0)
OF_ANY_KIND = Odds(1.0, math.inf, math.inf)


def odds_of(sum_kl: float, epsilon: float, leak_auc: float = 1.0, mu: float = math.inf) -> Odds:
    """Return what is known of one release.

    Args:
        sum_kl: its divergence.
        epsilon: its label differential privacy; infinite for none.
        leak_auc: AUC that no score of it passes; 1 if none is known.
        mu: of a Gaussian mechanism that tells no less; infinite if none is known.
    """
    if sum_kl == 0:
        return NOTHING
    if not math.isfinite(sum_kl):
        return OF_ANY_KIND
    mu = min(mu, gaussian_of_epsilon(epsilon))
    # Of a Gaussian mechanism nothing but rounding may be left: mu is the root of sum_kl.
    excess = 0.0 if mu == math.sqrt(sum_kl) else max(mu**2 - sum_kl, 0.0)
    return Odds(min(auc_of_epsilon(epsilon), leak_auc), epsilon, excess)


class ManyOdds(NamedTuple):
    """The odds of many accounts, most of which are alike."""

    kinds: Kinds
    """Index in the table for each account, (accounts,)."""
    table: tuple[Odds, ...]
    """Each of them once."""

    @classmethod
    def alike(cls, odds: Odds, number: int) -> "ManyOdds":
        """Return the same odds for each of a number of accounts."""
        return cls(np.zeros(number, dtype=np.int32), (odds,))

    @classmethod
    def where(cls, chosen: npt.NDArray[np.bool_], odds: Odds) -> "ManyOdds":
        """Return odds for the chosen accounts, and those of no charge for the others."""
        return cls(chosen.astype(np.int32), (NOTHING, odds))

    def at(self, positions: npt.NDArray[np.int64]) -> "ManyOdds":
        """Return the odds of some accounts."""
        return ManyOdds(self.kinds[positions], self.table)

    def and_also(self, other: "ManyOdds") -> "ManyOdds":
        """Return what is known of the charges of both together, account by account.

        The table of the result begins with this one's.
        """
        if other.table == (NOTHING,):
            return self
        width = len(other.table)
        pairs = self.kinds.astype(np.int64) * width + other.kinds
        indices = {odds: index for index, odds in enumerate(self.table)}
        becomes = np.zeros(len(self.table) * width, dtype=np.int32)
        for pair in np.flatnonzero(np.bincount(pairs)).tolist():
            both = self.table[pair // width].and_also(other.table[pair % width])
            becomes[pair] = indices.setdefault(both, len(indices))
        return ManyOdds(becomes[pairs], tuple(indices))

    def contains(self, odds: Odds) -> bool:
        """Return whether a charge with these odds would change nothing that is known."""
        present = np.flatnonzero(np.bincount(self.kinds)).tolist()
        known = (self.table[kind] for kind in present)
        return all(found.and_also(odds) == found for found in known)

    def charged(self, positions: npt.NDArray[np.int64], more: "ManyOdds") -> "ManyOdds":
        """Return the odds after charges to some accounts; this object must not be used any more.

        Args:
            positions: accounts, each once.
            more: the odds of the charges, in the order of the positions.
        """
        part = self.at(positions)
        if len(more.table) == 1 and part.contains(more.table[0]):
            return self
        part = part.and_also(more)
        self.kinds[positions] = part.kinds
        return ManyOdds(self.kinds, part.table)

    def worst(self) -> Odds:
        """Return what is known of every account."""
        present = np.flatnonzero(np.bincount(self.kinds)).tolist()
        found = NOTHING
        for kind in present:
            found = found.or_more(self.table[kind])
        return found

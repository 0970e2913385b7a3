"""The bounds that follow from the accounts of many examples, for each circle of peers.

Two figures follow from the divergence K of all answers about an example:

    estimate    Phi(sqrt(K/2))                          AUC of the best score, if the classes are
                                                        Gaussian with equal variances
    bound       1/2 + V - V^2/2 with 4 V artanh V = K   AUC of every score, under any distributions
                                                        (Gilardoni 2010 for the total variation V)

Where all answers together are one Gaussian mechanism, mu^2 = K, the estimate is exact, and so the
bound is the same number: Phi(mu / sqrt 2) (Dong, Roth and Su 2022, "Gaussian differential privacy",
theorem 3 and corollary 2). For noisy labels of other kinds ``odds`` has bounds of their own, down
to the exact AUC of a label that was drawn once; the smallest one counts, and caps the estimate. A
bound holds for the peers whom every charge of the account describes, and for no others: for them it
is 1.
"""

import math
from collections.abc import Callable, Iterator
from operator import ge
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.defenses.sum_kl import estimated_auc
from splitveil.active_party.ledger.odds import Kinds, ManyOdds, Odds, odds_of
from splitveil.common.privacy.covers import Covers
from splitveil.common.storage.answer_log import ChargedAnswer
from splitveil.common.text.upper_bounds import auc_at_most

Divergences = npt.NDArray[np.float64]
Caveats = npt.NDArray[np.uint8]
"""What does not hold of each account, as bits."""

NOT_GAUSSIAN = 1
"""The bit of an account that has a charge other than of a Gaussian mechanism."""
_DOES_NOT_COVER = {covers: 2 << rank for rank, covers in enumerate(Covers)}

_SATURATED = 75.0
"""Divergence above which both AUCs are 1 to nine digits."""
_CELLS_PER_UNIT = 4096
"""Mean AUCs are rounded up by less than the inverse of this: millions of roots take seconds."""


class Spread(NamedTuple):
    """One figure over the training examples."""

    max: float
    q95: float
    """Figure that 95 % of the examples do not exceed."""
    mean: float


class PeerBound(NamedTuple):
    """The bound for one circle of peers."""

    leak_auc: Spread
    """AUC that no score of such a peer exceeds; 1 for an example without a bound."""
    mu: float | None
    """Parameter of the Gaussian mechanism that all answers are together, of the most exposed
    example; None if they are not one, or not for these peers."""


class LeakBounds(NamedTuple):
    """Bounds on the information about the labels that a run may have revealed so far."""

    sum_kl: Spread
    estimate: Spread
    """AUC of the best score under the Gaussian model."""
    by_peers: tuple[PeerBound, ...]
    """One for each circle of peers, in the order of ``Covers``."""
    epsilon: float | None
    """Label differential privacy of all answers together; None if an answer had none."""

    def against(self, peers: Covers) -> PeerBound:
        """Return the bound for a circle of peers."""
        return self.by_peers[list(Covers).index(peers)]

    @property
    def guarantee(self) -> Spread:
        """AUC that no score of anybody exceeds."""
        return self.against(Covers.ANYBODY).leak_auc

    def in_words(self) -> str:
        """Return the bounds of the most exposed example, for the log."""
        found = [self.against(peers).leak_auc.max for peers in Covers]
        words = ("none" if auc >= 1 else auc_at_most(auc) for auc in found)
        parts = (f"{peers} {word}" for peers, word in zip(Covers, words, strict=True))
        return "bounds on the leak AUC: " + ", ".join(parts)

    def or_more(self, other: "LeakBounds | None") -> "LeakBounds":
        """Return the larger of these bounds and others, figure by figure.

        The result bounds what either of two sets of answers revealed if one contains the other.
        """
        # Bit for bit where possible: AUCs of nearly equal divergences may differ in either way.
        if other is None or self._is_at_least(other):
            return self
        bounded = self.epsilon is not None and other.epsilon is not None
        return LeakBounds(
            _larger(self.sum_kl, other.sum_kl),
            _larger(self.estimate, other.estimate),
            tuple(
                PeerBound(
                    _larger(one.leak_auc, another.leak_auc),
                    None if one.mu is None or another.mu is None else max(one.mu, another.mu),
                )
                for one, another in zip(self.by_peers, other.by_peers, strict=True)
            ),
            max(self.epsilon or 0.0, other.epsilon or 0.0) if bounded else None,
        )

    def _is_at_least(self, other: "LeakBounds") -> bool:
        return all(map(ge, self.sum_kl, other.sum_kl)) and all(
            mine >= theirs - _ROUNDING
            for ours, others in zip(self.by_peers, other.by_peers, strict=True)
            for mine, theirs in zip(ours.leak_auc, others.leak_auc, strict=True)
        )


_ROUNDING = 1e-9
"""Difference of two AUCs below which rounding may have made them differ."""


def caveats_of(charge: LeakCharge) -> int:
    """Return what does not hold of a charge, as bits."""
    narrow = sum(bit for peers, bit in _DOES_NOT_COVER.items() if not charge.covers.includes(peers))
    # Nothing is added to a Gaussian mechanism by an answer that tells nothing.
    return narrow | (0 if charge.is_gaussian or charge.sum_kl == 0 else NOT_GAUSSIAN)


UNKNOWN = caveats_of(LeakCharge(math.inf))
"""The caveats of an account that does not say whom it describes: the narrowest circle of peers."""


def covers(caveats: int, peers: Covers) -> bool:
    """Return whether an account with these caveats describes a circle of peers."""
    return not caveats & _DOES_NOT_COVER[peers]


def widest_covered(caveats: int) -> Covers:
    """Return the widest circle of peers that an account with these caveats describes."""
    return next(peers for peers in Covers if covers(caveats, peers))


def odds_of_entry(entry: ChargedAnswer) -> Odds:
    """Return what is known of a charge besides its divergence."""
    mu = entry.dominating_mu if entry.caveats & NOT_GAUSSIAN else math.sqrt(entry.sum_kl)
    return odds_of(entry.sum_kl, entry.epsilon, entry.leak_auc, mu)


def auc_bound(sum_kl: float, odds: Odds, caveats: int, peers: Covers) -> float:
    """Return the AUC that no score of some peers exceeds; 1 if the account says nothing of them."""
    return odds.auc_bound(sum_kl) if covers(caveats, peers) else 1.0


def estimate_of(sum_kl: float, odds: Odds) -> float:
    """Return the AUC of the best score under the Gaussian model, or what bounds every score."""
    return min(estimated_auc(sum_kl), odds.auc_bound(sum_kl))


def bounds_of(sums: Divergences, caveats: Caveats, odds: ManyOdds, epsilon: float) -> LeakBounds:
    """Return the bounds on what some examples' answers revealed.

    Args:
        sums: each example's divergence, (examples,), not empty.
        caveats: what does not hold of each, (examples,).
        odds: what else is known of each.
        epsilon: label differential privacy of all answers together; infinite for none.
    """
    groups = list(_groups(sums, caveats, odds))
    sum_kl = _spread(sums)
    return LeakBounds(
        sum_kl,
        _auc_spread(groups, sum_kl, lambda of_one, group: estimate_of(of_one, group.odds)),
        tuple(_bound_for(peers, groups, sum_kl) for peers in Covers),
        epsilon if math.isfinite(epsilon) else None,
    )


class _Group(NamedTuple):
    """The examples of which the same is known, and the same does not hold."""

    caveats: int
    odds: Odds
    most: float
    """The largest divergence."""
    by_root: npt.NDArray[np.int64]
    """Number of examples in each cell of the square root of their divergence."""

    @classmethod
    def of(cls, sums: Divergences, caveats: int, odds: Odds) -> "_Group":
        # Both AUCs are smooth in the root.
        most = float(sums.max())
        roots = np.minimum(sums, _SATURATED)
        np.sqrt(roots, out=roots)
        roots *= _CELLS_PER_UNIT
        return cls(caveats, odds, most, np.bincount(roots.astype(np.int32)))

    def cells(self) -> Iterator[tuple[float, int]]:
        """Yield an upper bound on the divergence in each cell, and the number of examples."""
        for cell in np.flatnonzero(self.by_root).tolist():
            yield min(((cell + 1) / _CELLS_PER_UNIT) ** 2, self.most), int(self.by_root[cell])


def _groups(sums: Divergences, caveats: Caveats, odds: ManyOdds) -> Iterator[_Group]:
    first = int(odds.kinds[0])
    kinds: Caveats | Kinds = caveats
    if (odds.kinds == first).all():  # mostly so, and of millions that saves most of the time
        first *= UNKNOWN + 1
    else:
        kinds, first = odds.kinds * (UNKNOWN + 1) + caveats, 0
    present = np.flatnonzero(np.bincount(kinds)).tolist()
    for kind in present:
        of_kind = sums if len(present) == 1 else sums[kinds == kind]
        known, caveat = divmod(first + kind, UNKNOWN + 1)
        yield _Group.of(of_kind, caveat, odds.table[known])


def _bound_for(peers: Covers, groups: list[_Group], sum_kl: Spread) -> PeerBound:
    spread = _auc_spread(
        groups,
        sum_kl,
        lambda of_one, group: auc_bound(of_one, group.odds, group.caveats, peers),
    )
    exact = all(
        covers(group.caveats, peers) and not group.caveats & NOT_GAUSSIAN for group in groups
    )
    mu = math.sqrt(sum_kl.max)
    return PeerBound(spread, mu if exact and math.isfinite(mu) else None)


def _auc_spread(
    groups: list[_Group], sum_kl: Spread, auc: Callable[[float, _Group], float]
) -> Spread:
    """Return the spread of an AUC that rises with the divergence; its mean is rounded up."""
    cells = [(auc(sum_kl, group), count) for group in groups for sum_kl, count in group.cells()]
    cells.sort()
    aucs, counts = np.array([one for one, _ in cells]), np.array([count for _, count in cells])
    largest = max(auc(group.most, group) for group in groups)
    mean = min(float(np.average(aucs, weights=counts)), largest)
    if len(groups) == 1:  # then the quantile of the AUCs is the AUC of the quantile
        return Spread(largest, auc(sum_kl.q95, groups[0]), mean)
    rank = math.ceil(0.95 * (int(counts.sum()) - 1))
    q95 = float(aucs[np.searchsorted(np.cumsum(counts), rank, side="right")])
    return Spread(largest, min(q95, largest), mean)


def _spread(sums: Divergences) -> Spread:
    """Summarise the accounts, and leave them in another order: that saves a copy."""
    largest, mean = float(sums.max()), float(sums.mean())
    rank = math.ceil(0.95 * (len(sums) - 1))
    sums.partition(rank)
    return Spread(max=largest, q95=float(sums[rank]), mean=mean)


def _larger(one: Spread, other: Spread) -> Spread:
    return Spread(*map(max, one, other))

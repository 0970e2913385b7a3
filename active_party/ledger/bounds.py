"""The bounds that follow from the accounts of many examples, for each adversary class.

Two figures follow from the divergence K of all answers about an example:

    estimate    Phi(sqrt(K/2))                          AUC of the best score, if the classes are
                                                        Gaussian with equal variances
    bound       1/2 + V - V^2/2 with 4 V artanh V = K   AUC of every score, under any distributions
                                                        (Gilardoni 2010 for the total variation V)

Where all answers together are one Gaussian mechanism, mu^2 = K, the estimate is exact, and so the
bound is the same number (Dong, Roth and Su 2022, "Gaussian differential privacy", theorem 3 and
corollary 2). Three more bounds hold where they are finite; the smallest of all counts, and caps the
estimate. A bound holds for the peers whom every charge of the account describes; for all others it
is 1.

    a                      all charges are one release, such as one noisy label; no score passes a
    1/2 + tanh(e/2)/2      all charges are label-DP, e in total (`dp_bounds.auc_of_epsilon`)
    Phi(mu / sqrt 2)       no charge reveals more than some Gaussian mechanism; mu^2 adds up

The last one holds for mixtures (`dp_bounds`): releases that follow each other, however the later
ones depend on the earlier ones, reveal no more than the Gaussian mechanisms in their places
(theorem 3.2 there). For a Gaussian mechanism mu^2 is the divergence itself, so an account remembers
by how much mu^2 exceeds it.
"""

import math
from collections.abc import Callable, Iterator
from operator import ge
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from splitveil.active_party.defenses.dp_bounds import auc_of_epsilon, gaussian_of_epsilon
from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.answer_log import ChargedAnswer
from splitveil.common.text.upper_bounds import auc_at_most

KnownBounds = npt.NDArray[np.float64]
"""Three columns, (3, accounts), or the three numbers of one account, (3,):

    leak_auc    AUC that no score passes if all charges are one release: 0.5 before the first one,
                1 if it is unknown or there are several
    epsilon     label differential privacy of all charges together; infinite for none
    excess      mu^2 of a Gaussian mechanism that reveals no less, minus the divergence; infinite if
                unknown, 0 for a Gaussian mechanism
"""

NOTHING: KnownBounds = np.array([0.5, 0.0, 0.0])  # of an account without charges
OF_ANY_KIND: KnownBounds = np.array([1.0, math.inf, math.inf])


def known_of(
    sum_kl: float, epsilon: float, leak_auc: float = 1.0, mu: float = math.inf
) -> KnownBounds:
    """Return what is known of one release, (3,); mu as in `LeakCharge.dominating_mu`."""
    if sum_kl == 0:
        return NOTHING
    if not math.isfinite(sum_kl):
        return OF_ANY_KIND
    mu = min(mu, gaussian_of_epsilon(epsilon))
    # Of a Gaussian mechanism nothing but rounding may be left: mu is the root of sum_kl.
    excess = 0.0 if mu == math.sqrt(sum_kl) else max(mu**2 - sum_kl, 0.0)
    return np.array([min(auc_of_epsilon(epsilon), leak_auc), epsilon, excess])


def compose(some: KnownBounds, more: KnownBounds) -> KnownBounds:
    """Return what is known of the charges of both together, account by account."""
    both = some + more
    both[0] = 1.0
    for one, other in ((some, more), (more, some)):
        is_nothing = one[0] == NOTHING[0]
        if is_nothing.any():
            np.copyto(both, other, where=is_nothing & (one[1] == 0) & (one[2] == 0))
    return both


def where_charged(charged: npt.NDArray[np.bool_], known: KnownBounds) -> KnownBounds:
    """Return what is known of the charged accounts, (3,), and of no charge for the others."""
    return np.where(charged, known[:, None], NOTHING[:, None])


def auc_bound(sum_kl: float, known: KnownBounds) -> float:
    """Return the AUC that no score of one account passes, of which ``known``, (3,), is known."""
    leak_auc, epsilon, excess = map(float, known)
    return min(
        leak_auc, leak_auc_bound(sum_kl), estimated_auc(sum_kl + excess), auc_of_epsilon(epsilon)
    )


def estimate_of(sum_kl: float, known: KnownBounds) -> float:
    """Return the AUC of the best score under the Gaussian model, or what bounds every score."""
    return min(estimated_auc(sum_kl), auc_bound(sum_kl, known))


Divergences = npt.NDArray[np.float64]
Caveats = npt.NDArray[np.uint8]  # what does not hold of each account, as bits

_NOT_GAUSSIAN = 1
_NOT_AGAINST = {adversary: 2 << rank for rank, adversary in enumerate(Adversary)}
ALL_CAVEATS = _NOT_GAUSSIAN + sum(_NOT_AGAINST.values())

_SATURATED = 75.0  # divergence above which both AUCs are 1 to nine digits
_CELLS_PER_UNIT = 4096  # for mean AUCs, rounded up: millions of roots take seconds
_ROUNDING = 1e-9  # difference of two AUCs below which rounding may have made them differ


class Spread(NamedTuple):
    """One figure over the training examples."""

    max: float
    q95: float  # that 95 % of the examples do not exceed
    mean: float


class PeerBound(NamedTuple):
    """The bound for one adversary class."""

    leak_auc: Spread  # AUC that no score of such a peer exceeds; 1 for an example without a bound
    mu: float | None
    """Parameter of the Gaussian mechanism that all answers are together, of the most exposed
    example; None if they are not one, or not for these peers."""


class LeakBounds(NamedTuple):
    """Bounds on the information about the labels that a run may have revealed so far."""

    sum_kl: Spread
    estimate: Spread  # AUC of the best score under the Gaussian model
    by_peers: tuple[PeerBound, ...]  # one for each adversary class, in the order of ``Adversary``
    epsilon: float | None  # label-DP of all answers together; None if one had none

    def against(self, peers: Adversary) -> PeerBound:
        """Return the bound for an adversary class."""
        return self.by_peers[list(Adversary).index(peers)]

    @property
    def guarantee(self) -> Spread:
        """AUC that no score of anybody exceeds."""
        return self.against(Adversary.ANYBODY).leak_auc

    def in_words(self) -> str:
        """Return the bounds of the most exposed example, for the log."""
        aucs = {peers: self.against(peers).leak_auc.max for peers in Adversary}
        parts = (f"{who} {'none' if auc >= 1 else auc_at_most(auc)}" for who, auc in aucs.items())
        return "bounds on the leak AUC: " + ", ".join(parts)

    def or_more(self, other: "LeakBounds | None") -> "LeakBounds":
        """Return the larger bounds: of two sets of answers of which one contains the other."""
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


def caveats_of(charge: LeakCharge) -> int:
    """Return what does not hold of a charge, as bits."""
    narrow = sum(bit for peers, bit in _NOT_AGAINST.items() if not charge.adversary.includes(peers))
    # Nothing is added to a Gaussian mechanism by an answer that reveals nothing.
    return narrow | (0 if charge.is_gaussian or charge.sum_kl == 0 else _NOT_GAUSSIAN)


def holds_against(caveats: int, peers: Adversary) -> bool:
    """Return whether an account with these caveats describes an adversary class."""
    return not caveats & _NOT_AGAINST[peers]


def strongest_adversary(caveats: int) -> Adversary:
    """Return the strongest adversary class that an account with these caveats describes."""
    return next(peers for peers in Adversary if holds_against(caveats, peers))


def known_of_entry(entry: ChargedAnswer) -> KnownBounds:
    """Return what is known of a charge besides its divergence, (3,)."""
    mu = entry.dominating_mu if entry.caveats & _NOT_GAUSSIAN else math.sqrt(entry.sum_kl)
    return known_of(entry.sum_kl, entry.epsilon, entry.leak_auc, mu)


def bounds_of(
    sums: Divergences, caveats: Caveats, known: KnownBounds, epsilon: float
) -> LeakBounds:
    """Return the bounds on some examples' answers, whose divergences it reorders."""
    groups = list(_groups(sums, caveats, known))
    largest, mean = float(sums.max()), float(sums.mean())
    rank = math.ceil(0.95 * (len(sums) - 1))
    sums.partition(rank)
    sum_kl = Spread(largest, float(sums[rank]), mean)
    return LeakBounds(
        sum_kl,
        _auc_spread(groups, sum_kl, lambda of_one, group: estimate_of(of_one, group.known)),
        tuple(_bound_for(peers, groups, sum_kl) for peers in Adversary),
        epsilon if math.isfinite(epsilon) else None,
    )


class _Group(NamedTuple):
    """The examples of which the same is known, and the same does not hold."""

    caveats: int
    known: KnownBounds
    most: float  # the largest divergence
    by_root: npt.NDArray[np.int64]  # number of examples in each cell of the divergence's root

    def cells(self) -> Iterator[tuple[float, int]]:
        """Yield an upper bound on the divergence in each cell, and the number of examples."""
        for cell in np.flatnonzero(self.by_root).tolist():
            yield min(((cell + 1) / _CELLS_PER_UNIT) ** 2, self.most), int(self.by_root[cell])


def _groups(sums: Divergences, caveats: Caveats, known: KnownBounds) -> Iterator[_Group]:
    """Yield the examples by what is the same of them; mostly that is a single group."""
    kinds = np.zeros(len(sums), dtype=np.int64)
    for column in (caveats, *known):
        if (column != column[0]).any():  # of millions, looking first saves most of the time
            values = pa.array(column).dictionary_encode()
            kinds = kinds * len(values.dictionary) + values.indices.to_numpy()
            kinds = pa.array(kinds).dictionary_encode().indices.to_numpy().astype(np.int64)
    for kind in range(int(kinds.max()) + 1):
        members = np.flatnonzero(kinds == kind) if kinds.any() else slice(None)
        first = 0 if isinstance(members, slice) else members[0]
        # Both AUCs are smooth in the root.
        roots = np.minimum(sums[members], _SATURATED)
        most = float(sums[members].max())
        np.sqrt(roots, out=roots)
        roots *= _CELLS_PER_UNIT
        yield _Group(
            int(caveats[first]), known[:, first], most, np.bincount(roots.astype(np.int32))
        )


def _bound_for(peers: Adversary, groups: list[_Group], sum_kl: Spread) -> PeerBound:
    spread = _auc_spread(
        groups,
        sum_kl,
        lambda of_one, group: (
            auc_bound(of_one, group.known) if holds_against(group.caveats, peers) else 1.0
        ),
    )
    exact = all(
        holds_against(group.caveats, peers) and not group.caveats & _NOT_GAUSSIAN
        for group in groups
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


def _larger(one: Spread, other: Spread) -> Spread:
    return Spread(*map(max, one, other))

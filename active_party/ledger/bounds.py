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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from splitveil.active_party.defenses.dp_bounds import auc_of_epsilon, gaussian_of_epsilon
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound
from splitveil.common.privacy.charge import (
    NOT_GAUSSIAN,
    Adversary,
    Charge,
    holds_against,
    strongest_adversary,
)
from splitveil.common.privacy.figures import LeakBounds, Spread
from splitveil.common.run.sample_order import Positions

Figures = npt.NDArray[Any]
_NONE_YET = 0.5  # leak AUC of an account without charges


class Accounts(NamedTuple):
    """Total leakage of all answers about each example, (examples,), or about one example, ()."""

    sum_kl: Figures  # divergence
    leak_auc: Figures
    """AUC that no score passes if all charges are one release: 0.5 before the first one, 1 if it is
    unknown or there are several."""
    epsilon: Figures  # label differential privacy; infinite for none
    excess: Figures
    """mu^2 of a Gaussian mechanism that reveals no less, minus the divergence; infinite if unknown,
    0 for a Gaussian mechanism."""
    caveats: Figures  # uint8: what does not hold, as bits of `Charge.caveats`

    @classmethod
    def empty(cls, shape: int | tuple[()] = ()) -> "Accounts":
        zeros, caveats = np.zeros(shape), np.zeros(shape, dtype=np.uint8)
        return cls(zeros, np.full(shape, _NONE_YET), zeros.copy(), zeros.copy(), caveats)

    @classmethod
    def of_charge(cls, charge: Charge) -> "Accounts":
        """Return the account that is charged a single release, ()."""
        sum_kl, leak_auc, epsilon, excess = charge.sum_kl, 1.0, math.inf, math.inf
        if sum_kl == 0:
            leak_auc, epsilon, excess = _NONE_YET, 0.0, 0.0
        elif math.isfinite(sum_kl):
            epsilon = charge.epsilon
            leak_auc = min(auc_of_epsilon(epsilon), charge.leak_auc)
            mu = min(charge.dominating_mu, gaussian_of_epsilon(epsilon))
            # Of a Gaussian mechanism nothing but rounding may be left: mu is the root of sum_kl.
            is_exact = not charge.caveats & NOT_GAUSSIAN or mu == math.sqrt(sum_kl)
            excess = 0.0 if is_exact else max(mu**2 - sum_kl, 0.0)
        figures = map(np.asarray, (sum_kl, leak_auc, epsilon, excess))
        return cls._make([*figures, np.asarray(charge.caveats, dtype=np.uint8)])

    def at(self, positions: Positions | int) -> "Accounts":
        return Accounts._make(figure[positions] for figure in self)

    def put(self, positions: Positions, accounts: "Accounts") -> None:
        """Replace some of the accounts; writing costs more than looking what has changed."""
        for figure, new in zip(self, accounts, strict=True):
            if not np.array_equal(figure[positions], new):
                figure[positions] = new

    def together(self, more: "Accounts") -> "Accounts":
        """Return the accounts that are charged both, by answers with independent noise."""
        alone = np.where(self.sum_kl == 0, more.leak_auc, self.leak_auc)
        return Accounts(
            self.sum_kl + more.sum_kl,
            np.where((self.sum_kl == 0) | (more.sum_kl == 0), alone, 1.0),
            self.epsilon + more.epsilon,
            self.excess + more.excess,
            self.caveats | more.caveats,
        )

    def largest(self, other: "Accounts") -> "Accounts":
        """Return the accounts that are charged the larger of both, by answers with one noise."""
        figures = map(np.maximum, self[:4], other[:4])
        return Accounts._make([*figures, self.caveats | other.caveats])

    def of_groups(self, group_of: Positions, count: int) -> "Accounts":
        """Return what all examples of each group reveal if their labels change together, (count,).

        Label after label, mu of the Gaussian mechanisms that reveal no less add up (Dong, Roth and
        Su, theorem 2.14), and so does epsilon; the divergence is mu^2 at most. A group with one
        charged example has its account.
        """
        largest = Accounts.empty(count)
        for figure, own in zip(largest, self, strict=True):
            larger = np.bitwise_or if figure.dtype == np.uint8 else np.maximum
            larger.at(figure, group_of, own)
        mu = np.bincount(group_of, np.sqrt(self.sum_kl + self.excess), count)
        several = np.bincount(group_of, self.sum_kl > 0, count) > 1
        return Accounts(
            np.where(several, mu**2, largest.sum_kl),
            np.where(several, 1.0, largest.leak_auc),
            np.bincount(group_of, self.epsilon, count),
            np.where(several, 0.0, largest.excess),
            largest.caveats,
        )

    @property
    def adversary(self) -> Adversary:
        """The strongest adversary class that every one of these accounts describes."""
        return strongest_adversary(int(np.bitwise_or.reduce(self.caveats, axis=None)))

    def worst(self) -> "Accounts":
        """Return one account, (), that reveals as much as any of these, at least one."""
        figures = (figure.max() for figure in self[:4])
        return Accounts._make([*figures, np.bitwise_or.reduce(self.caveats)])


def auc_bound(one: Accounts) -> float:
    """Return an upper bound on the AUC of any score of this account, for the peers it describes."""
    sum_kl, leak_auc, epsilon, excess = map(float, one[:4])
    return min(
        leak_auc, leak_auc_bound(sum_kl), estimated_auc(sum_kl + excess), auc_of_epsilon(epsilon)
    )


def estimate_of(one: Accounts) -> float:
    """Return the AUC of the best score under the Gaussian model, or what bounds every score."""
    return min(estimated_auc(float(one.sum_kl)), auc_bound(one))


_SATURATED = 75.0  # divergence above which both AUCs are 1 to nine digits
_CELLS_PER_UNIT = 4096  # for mean AUCs, rounded up: millions of roots take seconds


def bounds_of(accounts: Accounts) -> LeakBounds:
    """Return the bounds on some examples' answers, whose divergences it reorders."""
    groups, sums = list(_groups(accounts)), accounts.sum_kl
    largest, mean = float(sums.max()), float(sums.mean())
    rank = math.ceil(0.95 * (len(sums) - 1))
    sums.partition(rank)
    sum_kl = Spread(largest, float(sums[rank]), mean)
    epsilon = max(float(one.most.epsilon) for one in groups)
    caveats = int(np.bitwise_or.reduce([int(one.most.caveats) for one in groups]))
    anybody, honest, class_means = (holds_against(caveats, peers) for peers in Adversary)
    mu = math.sqrt(largest) if math.isfinite(largest) and not caveats & NOT_GAUSSIAN else None
    return LeakBounds(
        sum_kl,
        _auc_spread(groups, sum_kl, estimate_of),
        _bound_for(Adversary.ANYBODY, groups, sum_kl),
        _bound_for(Adversary.HONEST_BUT_CURIOUS, groups, sum_kl),
        _bound_for(Adversary.CLASS_MEANS, groups, sum_kl),
        epsilon if anybody and math.isfinite(epsilon) else None,
        mu if anybody else None,
        mu if honest else None,
        mu if class_means else None,
    )


class _Group(NamedTuple):
    """The examples whose accounts have the same figures, but for the divergence."""

    most: Accounts  # with the largest divergence, ()
    by_root: npt.NDArray[np.int64]  # number of examples in each cell of the divergence's root

    def cells(self) -> Iterator[tuple[float, int]]:
        """Yield an upper bound on the divergence in each cell, and the number of examples."""
        largest = float(self.most.sum_kl)
        for cell in np.flatnonzero(self.by_root).tolist():
            yield min(((cell + 1) / _CELLS_PER_UNIT) ** 2, largest), int(self.by_root[cell])

    def with_sum_kl(self, sum_kl: float) -> Accounts:
        return self.most._replace(sum_kl=np.asarray(sum_kl))


def _groups(accounts: Accounts) -> Iterator[_Group]:
    """Group examples by all figures but the divergence; there is usually one group."""
    kinds = np.zeros(len(accounts.sum_kl), dtype=np.int64)
    for column in accounts[1:]:
        if (column != column[0]).any():  # of millions, looking first saves most of the time
            values = pa.array(column).dictionary_encode()
            kinds = kinds * len(values.dictionary) + values.indices.to_numpy()
            kinds = pa.array(kinds).dictionary_encode().indices.to_numpy().astype(np.int64)
    for kind in range(int(kinds.max()) + 1):
        members = np.flatnonzero(kinds == kind) if kinds.any() else np.s_[:]
        of_kind = accounts.sum_kl[members]
        first = 0 if isinstance(members, slice) else int(members[0])
        # Both AUCs are smooth in the root.
        roots = np.minimum(of_kind, _SATURATED)
        np.sqrt(roots, out=roots)
        roots *= _CELLS_PER_UNIT
        most = accounts.at(first)._replace(sum_kl=of_kind.max())
        yield _Group(most, np.bincount(roots.astype(np.int32)))


def _bound_for(peers: Adversary, groups: list[_Group], sum_kl: Spread) -> Spread:
    return _auc_spread(
        groups,
        sum_kl,
        lambda one: auc_bound(one) if holds_against(int(one.caveats), peers) else 1.0,
    )


def _auc_spread(groups: list[_Group], sum_kl: Spread, auc: Callable[[Accounts], float]) -> Spread:
    """Return the spread of an AUC that rises with the divergence; its mean is rounded up."""
    cells = [
        (auc(group.with_sum_kl(each)), count) for group in groups for each, count in group.cells()
    ]
    cells.sort()
    aucs, counts = np.array([one for one, _ in cells]), np.array([count for _, count in cells])
    largest = max(auc(group.most) for group in groups)
    mean = min(float(np.average(aucs, weights=counts)), largest)
    if len(groups) == 1:  # then the quantile of the AUCs is the AUC of the quantile
        return Spread(largest, auc(groups[0].with_sum_kl(sum_kl.q95)), mean)
    rank = math.ceil(0.95 * (int(counts.sum()) - 1))
    q95 = float(aucs[np.searchsorted(np.cumsum(counts), rank, side="right")])
    return Spread(largest, min(q95, largest), mean)

"""The leak ledger: how much all answers about an example may together reveal about its label.

Each answer comes with a charge, the divergence K between the classes that it leaves. Fresh noise is
independent from answer to answer, so divergences add up (the chain rule). A charge may depend on
earlier answers; that changes nothing as long as the sum that counts is the one that was really
charged. Repeated noise gives the same answer again: for one noise identity, only the largest charge
counts.

No charge is ever forgotten.

The bounds on the answers about many examples follow from their accounts, for each adversary class.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from splitveil.active_party.defenses.dp_bounds import auc_of_epsilon, gaussian_of_epsilon
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound
from splitveil.common.privacy.charge import (
    ALL_CAVEATS,
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
        known = {"sum_kl": sum_kl, "leak_auc": leak_auc, "epsilon": epsilon, "excess": excess}
        caveats = np.asarray(charge.caveats, dtype=np.uint8)
        return cls(**{name: np.asarray(one) for name, one in known.items()}, caveats=caveats)

    def at(self, positions: Positions | int) -> "Accounts":
        return Accounts(*(figure[positions] for figure in self))

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
        return Accounts(*(_larger(own)(own, more) for own, more in zip(self, other, strict=True)))

    def of_groups(self, group_of: Positions, count: int) -> "Accounts":
        """Return what all examples of each group reveal if their labels change together, (count,).

        Label after label, mu of the Gaussian mechanisms that reveal no less add up (Dong, Roth and
        Su, theorem 2.14), and so does epsilon; the divergence is mu^2 at most. A group with one
        charged example has its account.
        """
        largest = Accounts.empty(count)
        for figure, own in zip(largest, self, strict=True):
            _larger(figure).at(figure, group_of, own)
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
        return Accounts(*(_larger(figure).reduce(figure) for figure in self))


def _larger(figure: Figures) -> np.ufunc:
    """Return what makes of two values of a figure the one that reveals no less than either."""
    return np.bitwise_or if figure.dtype == np.uint8 else np.maximum


def auc_bound(one: Accounts) -> float:
    """Return an upper bound on the AUC of any score of this account, for the peers it describes."""
    sum_kl = float(one.sum_kl)
    return min(
        float(one.leak_auc),
        leak_auc_bound(sum_kl),
        estimated_auc(sum_kl + float(one.excess)),
        auc_of_epsilon(float(one.epsilon)),
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
    epsilon = max(float(most.epsilon) for most, _ in groups)
    caveats = int(np.bitwise_or.reduce([int(most.caveats) for most, _ in groups]))
    mu = math.sqrt(largest) if math.isfinite(largest) and not caveats & NOT_GAUSSIAN else None

    def bound_for(peers: Adversary) -> Spread:
        def auc(one: Accounts) -> float:
            return auc_bound(one) if holds_against(int(one.caveats), peers) else 1.0

        return _auc_spread(groups, sum_kl, auc)

    anybody, honest, class_means = (holds_against(caveats, peers) for peers in Adversary)
    return LeakBounds(
        sum_kl,
        _auc_spread(groups, sum_kl, estimate_of),
        bound_for(Adversary.ANYBODY),
        bound_for(Adversary.HONEST_BUT_CURIOUS),
        bound_for(Adversary.CLASS_MEANS),
        epsilon if anybody and math.isfinite(epsilon) else None,
        mu if anybody else None,
        mu if honest else None,
        mu if class_means else None,
    )


_Group = tuple[Accounts, list[tuple[float, int]]]
"""The account, (), with the largest divergence of some examples whose other figures are equal, and
upper bounds on their divergences, each with its number of examples."""


def _groups(accounts: Accounts) -> Iterator[_Group]:
    """Group examples by all figures but the divergence; there is usually one group."""
    kinds = np.zeros(len(accounts.sum_kl), dtype=np.int64)
    for column in (accounts.leak_auc, accounts.epsilon, accounts.excess, accounts.caveats):
        if (column != column[0]).any():  # of millions, looking first saves most of the time
            values = pa.array(column).dictionary_encode()
            kinds = kinds * len(values.dictionary) + values.indices.to_numpy()
            kinds = pa.array(kinds).dictionary_encode().indices.to_numpy().astype(np.int64)
    for kind in range(int(kinds.max()) + 1):
        members = np.flatnonzero(kinds == kind) if kinds.any() else np.s_[:]
        of_kind = accounts.sum_kl[members]
        largest = of_kind.max()
        # Both AUCs are smooth in the root.
        roots = np.minimum(of_kind, _SATURATED)
        np.sqrt(roots, out=roots)
        roots *= _CELLS_PER_UNIT
        counts = np.bincount(roots.astype(np.int32))
        cells = [
            (min(((cell + 1) / _CELLS_PER_UNIT) ** 2, float(largest)), int(counts[cell]))
            for cell in np.flatnonzero(counts).tolist()
        ]
        first = 0 if isinstance(members, slice) else int(members[0])
        yield accounts.at(first)._replace(sum_kl=largest), cells


def _auc_spread(groups: list[_Group], sum_kl: Spread, auc: Callable[[Accounts], float]) -> Spread:
    """Return the spread of an AUC that rises with the divergence; its mean is rounded up."""
    cells = sorted(
        (auc(most._replace(sum_kl=np.asarray(each))), count)
        for most, of_group in groups
        for each, count in of_group
    )
    aucs, counts = np.array([one for one, _ in cells]), np.array([count for _, count in cells])
    largest = max(auc(most) for most, _ in groups)
    mean = min(float(np.average(aucs, weights=counts)), largest)
    if len(groups) == 1:  # then the quantile of the AUCs is the AUC of the quantile
        most, _ = groups[0]
        return Spread(largest, auc(most._replace(sum_kl=np.asarray(sum_kl.q95))), mean)
    rank = math.ceil(0.95 * (int(counts.sum()) - 1))
    q95 = float(aucs[np.searchsorted(np.cumsum(counts), rank, side="right")])
    return Spread(largest, min(q95, largest), mean)


class LeakLedger:
    """One account per aligned example, in addition to what ``earlier`` has of the same examples.

    Memory stays at two accounts per example, however often the noise changes: the charge of the
    current noise identity is kept apart from the sum of all earlier charges. An identity that comes
    back after another one is charged again, which is never too little.
    """

    def __init__(self, num_examples: int, earlier: "LeakLedger | None" = None) -> None:
        self.earlier = earlier  # counted in all figures; no charge and no state changes it
        # Settled: charges of fresh noise, and of earlier noise identities. Current: the largest
        # under the current identity, which is empty before the first one.
        self.settled = Accounts.empty(num_examples)
        self.current = Accounts.empty(num_examples)
        self.noise_identity = b""

    def __len__(self) -> int:
        return len(self.settled.sum_kl)

    def charge(self, positions: Positions, charge: Charge) -> None:
        """Charge one answer about these examples, each once, before it leaves."""
        charged = Accounts.of_charge(charge)
        if not (charge.sum_kl or charge.caveats):
            return  # it reveals nothing, as each answer that was computed from releases
        if not charge.noise_identity:
            self.settled.put(positions, self.settled.at(positions).together(charged))
            return
        if charge.noise_identity != self.noise_identity:
            self.settled = self.settled.together(self.current)
            self.current, self.noise_identity = Accounts.empty(len(self)), charge.noise_identity
        self.current.put(positions, self.current.at(positions).largest(charged))

    def after(self, positions: Positions, charge: Charge) -> Accounts:
        """Return the accounts that the examples of a batch would have with an answer."""
        charged = Accounts.of_charge(charge)
        if self.earlier is not None:
            return self.whole(positions).after(np.arange(len(positions)), charge)
        if not charge.noise_identity or charge.noise_identity != self.noise_identity:
            return self.accounts(positions).together(charged)
        current = self.current.at(positions).largest(charged)
        return self.settled.at(positions).together(current)

    def accounts(self, positions: Positions) -> Accounts:
        """Return the accounts of some examples, with the earlier ones."""
        if self.earlier is not None:
            return self.whole(positions).accounts(np.arange(len(positions)))
        return self.settled.at(positions).together(self.current.at(positions))

    def whole(self, positions: Positions) -> "LeakLedger":
        """Return a ledger of some examples that has the earlier accounts among its own."""
        whole, every = LeakLedger(len(positions)), np.arange(len(positions))
        whole.add(every, self, positions)  # first: its noise is the current one
        if self.earlier is not None:
            whole.add(every, self.earlier, positions)
        return whole

    def of_groups(self, positions: Positions, group_of: Positions, count: int) -> "LeakLedger":
        """Return a ledger of groups of examples, without ``earlier``; see `Accounts.of_groups`."""
        found = LeakLedger(count)
        found.settled = self.settled.at(positions).of_groups(group_of, count)
        found.current = self.current.at(positions).of_groups(group_of, count)
        found.noise_identity = self.noise_identity
        return found

    def add(self, positions: Positions, other: "LeakLedger", other_positions: Positions) -> None:
        """Add the charges of another ledger for some of its examples, without its ``earlier``.

        If both have the same noise identity the larger charge counts, as within one run. Each
        example is given once, by its positions in both ledgers.
        """
        settled = self.settled.at(positions).together(other.settled.at(other_positions))
        current = other.current.at(other_positions)
        self.noise_identity = self.noise_identity or other.noise_identity
        if other.noise_identity == self.noise_identity:
            self.current.put(positions, self.current.at(positions).largest(current))
        else:
            settled = settled.together(current)
        self.settled.put(positions, settled)

    def num_charged(self, positions: Positions) -> int:
        """Return the number of examples, among those given, that have been charged anything."""
        return int(np.count_nonzero(self.accounts(positions).sum_kl))

    @property
    def reveals_nothing(self) -> bool:
        """True if only the charges of ``earlier`` reveal anything about any example."""
        both = (self.settled, self.current)
        return not any(one.sum_kl.any() or one.caveats.any() for one in both)

    def bounds(self, positions: Positions) -> LeakBounds:
        """Bound how much the run may have revealed so far about some examples, at least one."""
        return bounds_of(self.accounts(positions))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the accounts in the common order, without any ids and ``earlier``."""
        parts = {"settled": self.settled, "current": self.current}
        if not self.noise_identity:
            del parts["current"]
        return {
            f"{part}_{name}": torch.from_numpy(figure)
            for part, accounts in parts.items()
            for name, figure in accounts._asdict().items()
        } | {"identity": torch.tensor(list(self.noise_identity), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a copy of such accounts; raises ValueError for accounts of other examples."""
        loaded = LeakLedger(len(self))
        loaded.noise_identity = bytes(state["identity"].tolist()) if "identity" in state else b""
        expected = loaded.state_dict()
        if state.keys() != expected.keys():
            raise ValueError(f"expected the state of a ledger, got {sorted(state)}")
        for name, own in expected.items():
            part = state[name]
            if part.shape != own.shape or part.dtype != own.dtype:
                raise ValueError(
                    f"{name}: expected {own.dtype} of shape {tuple(own.shape)}, got "
                    f"{part.dtype} of shape {tuple(part.shape)}"
                )
            if name.endswith("_caveats") and bool((part & ~ALL_CAVEATS).any()):
                raise ValueError(f"{name}: expected known bits")
            least, most = (0.5, 1.0) if name.endswith("_leak_auc") else (0.0, math.inf)
            if not bool(((part >= least) & (part <= most)).all()):
                raise ValueError(f"{name}: expected AUCs of 0.5 to 1, and no negative numbers")
            own.copy_(part)  # it shares its memory with the accounts
        self.settled, self.current = loaded.settled, loaded.current
        self.noise_identity = loaded.noise_identity

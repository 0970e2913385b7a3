"""The leak ledger: how much all answers about an example may together reveal about its label.

Each answer comes with a charge, the divergence K between the classes that it leaves. Fresh noise is
independent from answer to answer, so divergences add up (the chain rule). A charge may depend on
earlier answers; that changes nothing as long as the sum that counts is the one that was really
charged. Repeated noise gives the same answer again: for one noise identity, only the largest charge
counts.

Two bounds hold for the AUC of anyone who has seen answers of divergence K about each example:

    estimate    Phi(sqrt(K/2))                          best score, if the classes are Gaussian with
                                                        equal variances
    guarantee   1/2 + V - V^2/2 with 4 V artanh V = K   every score, under any distributions
                                                        (Gilardoni 2010 for the total variation V)

Both hold as far as the charges do. Charges of fresh noise compare the means of the classes in a
batch. A peer that knows what the model predicts for an example may ask instead how much the
example's own label moves its own gradient: as much at first, twice as much (squared) once the model
has learned something, and many times as much once it fits the data nearly perfectly. Against such a
peer neither bound holds late in training; charges of persistent noise and of noisy labels do not
depend on this. Charges of persistent noise assume that the peer sends its model's activations, and
charges of fresh ``marvell`` do not describe what lies across the gap of the means. Only the charges
of noisy labels describe every peer (docs/defenses.md, "Which bounds do not hold").
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from operator import ge
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.common.run.sample_order import Positions
from splitveil.common.storage.answer_log import ChargedAnswer

Divergences = npt.NDArray[np.float64]

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


class LeakBounds(NamedTuple):
    """Bounds on the information about the labels that a run may have revealed so far."""

    sum_kl: Spread
    estimate: Spread
    """AUC of the best score under the Gaussian model."""
    guarantee: Spread
    """AUC that no score of a peer exceeds, if the charges describe that peer."""
    epsilon: float | None
    """Label differential privacy of all answers together; None if an answer had none."""

    def or_more(self, other: "LeakBounds | None") -> "LeakBounds":
        """Return the larger of these bounds and others, figure by figure.

        The result bounds what either of two sets of answers revealed if one contains the other.
        """
        if other is None or all(map(ge, self.sum_kl, other.sum_kl)):
            return self  # bit for bit: AUCs of nearly equal divergences may differ in either way
        bounded = self.epsilon is not None and other.epsilon is not None
        return LeakBounds(
            Spread(*map(max, self.sum_kl, other.sum_kl)),
            Spread(*map(max, self.estimate, other.estimate)),
            Spread(*map(max, self.guarantee, other.guarantee)),
            max(self.epsilon or 0.0, other.epsilon or 0.0) if bounded else None,
        )


class LeakLedger:
    """One account per aligned example.

    Memory stays at two numbers per example, however often the noise changes: the charge of the
    current noise identity is kept apart from the sum of all earlier charges. An identity that comes
    back after another one is charged again, which is never too little.
    """

    def __init__(self, num_examples: int) -> None:
        self._settled: Divergences = np.zeros(num_examples)
        """Charges of fresh noise, and of earlier noise identities."""
        self._current: Divergences = np.zeros(num_examples)
        """Largest charge under the current noise identity."""
        self._identity = b""
        """Digest of the current noise identity; empty before the first one."""
        self._settled_epsilon = 0.0
        self._current_epsilon = 0.0

    def __len__(self) -> int:
        return len(self._settled)

    def charge(self, positions: Positions, charge: LeakCharge) -> None:
        """Charge one answer, before it leaves.

        Args:
            positions: the batch's rows in the common order, each once.
            charge: the charge of each of them.
        """
        self.enter(positions, logged(charge))

    def enter(self, positions: Positions, charge: ChargedAnswer) -> None:
        """Charge one answer as the log of answers keeps it.

        Args:
            positions: as for ``charge``.
            charge: the charge as ``logged`` returns it.
        """
        if not charge.identity:
            self._settled[positions] += charge.sum_kl
            self._settled_epsilon += charge.epsilon
            return
        if charge.identity != self._identity:
            self._settle()
            self._identity = charge.identity
        self._current[positions] = np.maximum(self._current[positions], charge.sum_kl)
        self._current_epsilon = max(self._current_epsilon, charge.epsilon)

    def after(self, positions: Positions, charge: LeakCharge) -> float:
        """Return the largest divergence that an example of the batch would reach with an answer."""
        settled, current = self._settled[positions], self._current[positions]
        if charge.noise_identity is None or _digest(charge.noise_identity) != self._identity:
            return float((settled + current).max()) + charge.sum_kl
        return float((settled + np.maximum(current, charge.sum_kl)).max())

    def most(self, positions: Positions) -> float:
        """Return the largest divergence among some examples."""
        return float((self._settled[positions] + self._current[positions]).max())

    def add(self, positions: Positions, other: "LeakLedger", other_positions: Positions) -> None:
        """Add the charges of another ledger for some of its examples.

        For one noise identity the larger charge of the two counts, as within one run.

        Args:
            positions: positions of the examples in this ledger, each once.
            other: the other ledger, with an order of its own.
            other_positions: positions of the same examples in the other ledger.
        """
        theirs = other.state_dict()
        identity = bytes(theirs["identity"].tolist())
        epsilon, current_epsilon = theirs["epsilon"].tolist()
        settled, current = (theirs[n].numpy()[other_positions] for n in ("settled", "current"))
        self._identity = self._identity or identity
        self._settled[positions] += settled
        self._settled_epsilon += epsilon
        if identity == self._identity:
            self._current[positions] = np.maximum(self._current[positions], current)
            self._current_epsilon = max(self._current_epsilon, current_epsilon)
        else:
            self._settled[positions] += current
            self._settled_epsilon += current_epsilon

    def carrying_over(self, earlier: "LeakLedger", positions: Positions) -> "LeakLedger":
        """Return this ledger, with some accounts of an earlier one appended.

        Args:
            earlier: the ledger with which this one began.
            positions: positions in the earlier ledger of the examples that this one lacks.
        """
        whole = LeakLedger(len(self) + len(positions))
        whole.add(np.arange(len(self), len(whole)), earlier, positions)
        own, carried = self.state_dict(), whole.state_dict()
        if not torch.equal(own["identity"], carried["identity"]):
            carried["settled"] += carried["current"]
            carried["current"].zero_()
        for name in ("settled", "current"):
            carried[name][: len(self)] = own[name]
        # This ledger's epsilon already covers the earlier answers together with its own.
        whole.load_state_dict(carried | {name: own[name] for name in ("identity", "epsilon")})
        return whole

    def num_charged(self, positions: Positions) -> int:
        """Return the number of examples, among those given, that have been charged anything."""
        return int(np.count_nonzero(self._settled[positions] + self._current[positions]))

    def bounds(self, positions: Positions) -> LeakBounds:
        """Bound how much the run may have revealed so far.

        Args:
            positions: the examples whose accounts count, which are the training examples.
        """
        sums = self._settled[positions]
        if self._identity:
            sums += self._current[positions]
        by_root, sum_kl = _count_by_root(sums), _spread(sums)
        epsilon = self._settled_epsilon + self._current_epsilon
        return LeakBounds(
            sum_kl,
            _auc_spread(estimated_auc, sum_kl, by_root),
            _auc_spread(leak_auc_bound, sum_kl, by_root),
            epsilon if math.isfinite(epsilon) else None,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the accounts in the common order, without any ids."""
        return {
            "settled": torch.from_numpy(self._settled),
            "current": torch.from_numpy(self._current),
            "identity": torch.tensor(list(self._identity), dtype=torch.uint8),
            "epsilon": torch.tensor(
                [self._settled_epsilon, self._current_epsilon], dtype=torch.float64
            ),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the accounts that ``state_dict`` returned.

        Raises:
            ValueError: the state has another number of examples, or does not come from a ledger.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"expected the state of a ledger, got {sorted(state)}")
        for name in ("settled", "current"):
            if state[name].shape != (len(self),) or bool((~(state[name] >= 0)).any()):
                raise ValueError(
                    f"{name}: expected {len(self)} divergences of at least 0, "
                    f"got shape {tuple(state[name].shape)}"
                )
        self._settled = state["settled"].numpy().astype(np.float64, copy=True)
        self._current = state["current"].numpy().astype(np.float64, copy=True)
        self._identity = bytes(state["identity"].tolist())
        self._settled_epsilon, self._current_epsilon = state["epsilon"].tolist()

    def _settle(self) -> None:
        """Add the charges of the current noise identity to those of the earlier ones."""
        self._settled += self._current
        self._current.fill(0.0)
        self._settled_epsilon += self._current_epsilon
        self._current_epsilon = 0.0


def estimated_auc(sum_kl: float) -> float:
    """Return the AUC of the best score between two Gaussians of equal variance."""
    return 0.5 * (1 + math.erf(math.sqrt(sum_kl) / 2))


def logged(charge: LeakCharge) -> ChargedAnswer:
    """Return a charge in the form of the log of answers, with a digest instead of the identity."""
    identity = charge.noise_identity
    if identity is None:  # fresh noise is Gaussian: the odds of a single answer have no bound
        return ChargedAnswer(charge.sum_kl, b"", math.inf)
    epsilon = math.inf if charge.epsilon is None else charge.epsilon
    return ChargedAnswer(charge.sum_kl, _digest(identity), epsilon)


def _digest(identity: str) -> bytes:
    return hashlib.sha256(identity.encode()).digest()


def _spread(sums: Divergences) -> Spread:
    """Summarise the accounts, and leave them in another order: that saves a copy."""
    largest, mean = float(sums.max()), float(sums.mean())
    rank = math.ceil(0.95 * (len(sums) - 1))
    sums.partition(rank)
    return Spread(max=largest, q95=float(sums[rank]), mean=mean)


def _count_by_root(sums: Divergences) -> npt.NDArray[np.int64]:
    """Count the accounts by the square root of their divergence: both AUCs are smooth in it."""
    roots = np.minimum(sums, _SATURATED)
    np.sqrt(roots, out=roots)
    roots *= _CELLS_PER_UNIT
    return np.bincount(roots.astype(np.int32))


def _auc_spread(
    auc: Callable[[float], float], sum_kl: Spread, by_root: npt.NDArray[np.int64]
) -> Spread:
    # The AUC rises with the divergence: the quantile of the AUCs is the AUC of the quantile.
    cells = np.flatnonzero(by_root)
    highest = [auc(((cell + 1) / _CELLS_PER_UNIT) ** 2) for cell in cells.tolist()]
    mean = float(np.average(highest, weights=by_root[cells]))
    return Spread(auc(sum_kl.max), auc(sum_kl.q95), min(mean, auc(sum_kl.max)))

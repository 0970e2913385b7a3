"""The leak ledger: how much all answers about an example may together reveal about its label.

Each answer comes with a charge, the divergence K between the classes that it leaves. Fresh noise is
independent from answer to answer, so divergences add up (the chain rule). A charge may depend on
earlier answers; that changes nothing as long as the sum that counts is the one that was really
charged. Repeated noise gives the same answer again: for one noise identity, only the largest charge
counts.

An account also remembers what does not hold of its charges: whom they do not describe, and whether
one is not of a Gaussian mechanism. ``bounds`` says what follows from a divergence, and for whom. No
charge is ever forgotten, so that the circle of peers only becomes narrower.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.ledger.bounds import (
    UNKNOWN,
    Caveats,
    Divergences,
    LeakBounds,
    bounds_of,
    caveats_of,
)
from splitveil.common.run.sample_order import Positions
from splitveil.common.storage.answer_log import ChargedAnswer


class Exposure(NamedTuple):
    """What the answers about some examples may have revealed, example by example."""

    sum_kl: Divergences
    caveats: Caveats

    @property
    def most(self) -> float:
        """The largest divergence."""
        return float(self.sum_kl.max())


class LeakLedger:
    """One account per aligned example.

    Memory stays at two numbers and a byte per example, however often the noise changes: the charge
    of the current noise identity is kept apart from the sum of all earlier charges. An identity
    that comes back after another one is charged again, which is never too little.
    """

    def __init__(self, num_examples: int) -> None:
        self._settled: Divergences = np.zeros(num_examples)
        """Charges of fresh noise, and of earlier noise identities."""
        self._current: Divergences = np.zeros(num_examples)
        """Largest charge under the current noise identity."""
        self._caveats: Caveats = np.zeros(num_examples, dtype=np.uint8)
        """What does not hold of some charge."""
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
        self._caveats[positions] |= np.uint8(charge.caveats)
        if not charge.identity:
            self._settled[positions] += charge.sum_kl
            self._settled_epsilon += charge.epsilon
            return
        if charge.identity != self._identity:
            self._settle()
            self._identity = charge.identity
        self._current[positions] = np.maximum(self._current[positions], charge.sum_kl)
        self._current_epsilon = max(self._current_epsilon, charge.epsilon)

    def after(self, positions: Positions, charge: ChargedAnswer) -> Exposure:
        """Return what the examples of a batch would be exposed to with an answer.

        Args:
            positions: as for ``charge``.
            charge: as for ``enter``.
        """
        settled, current = self._settled[positions], self._current[positions]
        caveats = self._caveats[positions] | np.uint8(charge.caveats)
        if not charge.identity or charge.identity != self._identity:
            return Exposure(settled + current + charge.sum_kl, caveats)
        return Exposure(settled + np.maximum(current, charge.sum_kl), caveats)

    def exposure(self, positions: Positions) -> Exposure:
        """Return what some examples have been exposed to."""
        return Exposure(
            self._settled[positions] + self._current[positions], self._caveats[positions]
        )

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
        settled, current, caveats = (
            theirs[name].numpy()[other_positions] for name in ("settled", "current", "caveats")
        )
        self._identity = self._identity or identity
        self._caveats[positions] |= caveats
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
        for name in ("settled", "current", "caveats"):
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
        epsilon = self._settled_epsilon + self._current_epsilon
        return bounds_of(sums, self._caveats[positions], epsilon)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the accounts in the common order, without any ids."""
        return {
            "settled": torch.from_numpy(self._settled),
            "current": torch.from_numpy(self._current),
            "caveats": torch.from_numpy(self._caveats),
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
        if state.keys() | {"caveats"} != self.state_dict().keys():
            raise ValueError(f"expected the state of a ledger, got {sorted(state)}")
        for name in ("settled", "current"):
            if state[name].shape != (len(self),) or bool((~(state[name] >= 0)).any()):
                raise ValueError(
                    f"{name}: expected {len(self)} divergences of at least 0, "
                    f"got shape {tuple(state[name].shape)}"
                )
        self._settled = state["settled"].numpy().astype(np.float64, copy=True)
        self._current = state["current"].numpy().astype(np.float64, copy=True)
        self._caveats = self._caveats_in(state)
        self._identity = bytes(state["identity"].tolist())
        self._settled_epsilon, self._current_epsilon = state["epsilon"].tolist()

    def _caveats_in(self, state: Mapping[str, Tensor]) -> Caveats:
        """Return a state's caveats; a ledger of before there were any covers the fewest peers.

        Raises:
            ValueError: they are not of this many examples.
        """
        found = state.get("caveats")
        if found is None:
            charged = self._settled + self._current > 0
            return np.where(charged, UNKNOWN, 0).astype(np.uint8)
        if (
            found.dtype != torch.uint8
            or found.shape != (len(self),)
            or bool((found & ~UNKNOWN).any())
        ):
            raise ValueError(
                f"caveats: expected {len(self)} bytes of known bits, got {found.dtype} of shape "
                f"{tuple(found.shape)}"
            )
        return found.numpy().copy()

    def _settle(self) -> None:
        """Add the charges of the current noise identity to those of the earlier ones."""
        self._settled += self._current
        self._current.fill(0.0)
        self._settled_epsilon += self._current_epsilon
        self._current_epsilon = 0.0


def logged(charge: LeakCharge) -> ChargedAnswer:
    """Return a charge in the form of the log of answers, with a digest instead of the identity."""
    caveats, identity = caveats_of(charge), charge.noise_identity
    if identity is None:
        # Fresh noise is Gaussian: the odds of a single answer have no bound, unless it tells
        # nobody anything.
        tells_nothing = charge.sum_kl == 0 and not caveats
        return ChargedAnswer(charge.sum_kl, b"", 0.0 if tells_nothing else math.inf, caveats)
    epsilon = math.inf if charge.epsilon is None else charge.epsilon
    return ChargedAnswer(charge.sum_kl, _digest(identity), epsilon, caveats)


def _digest(identity: str) -> bytes:
    return hashlib.sha256(identity.encode()).digest()

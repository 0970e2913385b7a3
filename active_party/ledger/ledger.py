"""The leak ledger: how much all answers about an example may together reveal about its label.

Each answer comes with a charge, the divergence K between the classes that it leaves. Fresh noise is
independent from answer to answer, so divergences add up (the chain rule). A charge may depend on
earlier answers; that changes nothing as long as the sum that counts is the one that was really
charged. Repeated noise gives the same answer again: for one noise identity, only the largest charge
counts.

An account also remembers what does not hold of its charges: whom they do not describe, and whether
one is not of a Gaussian mechanism; and it remembers what is known besides the divergence, such as
the best AUC of a label that was drawn once (``odds``). ``bounds`` says what follows from all this,
and for whom. No charge is ever forgotten, so that the circle of peers only becomes narrower.
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
    odds_of_entry,
)
from splitveil.active_party.ledger.kept_odds import NAMES, odds_before, odds_in, tensors_of
from splitveil.active_party.ledger.odds import NOTHING, ManyOdds, Odds
from splitveil.common.run.sample_order import Positions
from splitveil.common.storage.answer_log import ChargedAnswer


class Exposure(NamedTuple):
    """What the answers about some examples may have revealed, example by example."""

    sum_kl: Divergences
    caveats: Caveats
    odds: ManyOdds

    @property
    def most(self) -> float:
        """The largest divergence."""
        return float(self.sum_kl.max())


class LeakLedger:
    """One account per aligned example.

    Memory stays at two numbers and five bytes per example, however often the noise changes: the
    charge of the current noise identity is kept apart from the sum of all earlier charges. An
    identity that comes back after another one is charged again, which is never too little.
    """

    def __init__(self, num_examples: int) -> None:
        self._settled: Divergences = np.zeros(num_examples)
        """Charges of fresh noise, and of earlier noise identities."""
        self._current: Divergences = np.zeros(num_examples)
        """Largest charge under the current noise identity."""
        self._caveats: Caveats = np.zeros(num_examples, dtype=np.uint8)
        """What does not hold of some charge."""
        self._odds = ManyOdds.alike(NOTHING, num_examples)
        """What is known of the settled charges."""
        self._current_odds: Odds = NOTHING
        """What is known of the charges under the current noise identity."""
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
        if _tells_nothing(charge):  # as each answer that was computed from releases
            return
        self._caveats[positions] |= np.uint8(charge.caveats)
        odds = odds_of_entry(charge)
        if not charge.identity:
            self._settled[positions] += charge.sum_kl
            self._settled_epsilon += charge.epsilon
            self._odds = self._odds.charged(positions, ManyOdds.alike(odds, len(positions)))
            return
        if charge.identity != self._identity:
            self._settle()
            self._identity = charge.identity
        self._current[positions] = np.maximum(self._current[positions], charge.sum_kl)
        self._current_epsilon = max(self._current_epsilon, charge.epsilon)
        self._current_odds = self._current_odds.or_more(odds)

    def after(self, positions: Positions, charge: ChargedAnswer) -> Exposure:
        """Return what the examples of a batch would be exposed to with an answer.

        Args:
            positions: as for ``charge``.
            charge: as for ``enter``.
        """
        settled, current = self._settled[positions], self._current[positions]
        caveats = self._caveats[positions] | np.uint8(charge.caveats)
        odds = odds_of_entry(charge)
        if not charge.identity or charge.identity != self._identity:
            before, more = self._odds_at(positions), ManyOdds.alike(odds, len(positions))
            return Exposure(settled + current + charge.sum_kl, caveats, before.and_also(more))
        current = np.maximum(current, charge.sum_kl)
        repeated = ManyOdds.where(current > 0, self._current_odds.or_more(odds))
        return Exposure(settled + current, caveats, self._odds.at(positions).and_also(repeated))

    def exposure(self, positions: Positions) -> Exposure:
        """Return what some examples have been exposed to."""
        return Exposure(
            self._settled[positions] + self._current[positions],
            self._caveats[positions],
            self._odds_at(positions),
        )

    def _odds_at(self, positions: Positions) -> ManyOdds:
        settled = self._odds.at(positions)
        if not self._identity:
            return settled
        return settled.and_also(ManyOdds.where(self._current[positions] > 0, self._current_odds))

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
        odds, current_odds = odds_in(theirs, len(other))
        self._identity = self._identity or identity
        self._caveats[positions] |= caveats
        self._settled[positions] += settled
        self._settled_epsilon += epsilon
        self._odds = self._odds.charged(positions, odds.at(other_positions))
        if identity == self._identity:
            self._current[positions] = np.maximum(self._current[positions], current)
            self._current_epsilon = max(self._current_epsilon, current_epsilon)
            self._current_odds = self._current_odds.or_more(current_odds)
        else:
            self._settled[positions] += current
            self._settled_epsilon += current_epsilon
            told = ManyOdds.where(current > 0, current_odds)
            self._odds = self._odds.charged(positions, told)

    def carrying_over(self, earlier: "LeakLedger", positions: Positions) -> "LeakLedger":
        """Return this ledger, with some accounts of an earlier one appended.

        Args:
            earlier: the ledger with which this one began.
            positions: positions in the earlier ledger of the examples that this one lacks.
        """
        whole = LeakLedger(len(self) + len(positions))
        whole.add(np.arange(len(self), len(whole)), earlier, positions)
        own, carried = self.state_dict(), whole.state_dict()
        odds, current_odds = odds_in(carried, len(whole))
        if not torch.equal(own["identity"], carried["identity"]):
            told = ManyOdds.where((carried["current"] > 0).numpy(), current_odds)
            odds, current_odds = odds.and_also(told), NOTHING
            carried["settled"] += carried["current"]
            carried["current"].zero_()
        for name in ("settled", "current", "caveats"):
            carried[name][: len(self)] = own[name]
        odds = odds.charged(np.arange(len(self)), self._odds)
        carried |= tensors_of(odds, self._current_odds.or_more(current_odds))
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
        return bounds_of(sums, self._caveats[positions], self._odds_at(positions), epsilon)

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
            **tensors_of(self._odds, self._current_odds),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the accounts that ``state_dict`` returned.

        Raises:
            ValueError: the state has another number of examples, or does not come from a ledger.
        """
        keeps_odds = not NAMES.isdisjoint(state)
        optional = frozenset() if keeps_odds else NAMES | {"caveats"}
        if state.keys() | optional != self.state_dict().keys():
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
        self._odds, self._current_odds = (
            odds_in(state, len(self))
            if keeps_odds
            else odds_before(self._settled, self._current, self._caveats, self._current_epsilon)
        )

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
        told = ManyOdds.where(self._current > 0, self._current_odds)
        self._odds, self._current_odds = self._odds.and_also(told), NOTHING
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
        epsilon, digest = 0.0 if tells_nothing else math.inf, b""
    else:
        epsilon = math.inf if charge.epsilon is None else charge.epsilon
        digest = _digest(identity)
    return ChargedAnswer(
        charge.sum_kl,
        digest,
        epsilon,
        caveats,
        1.0 if charge.leak_auc is None else charge.leak_auc,
        math.inf if charge.dominating_mu is None else charge.dominating_mu,
    )


def _tells_nothing(charge: ChargedAnswer) -> bool:
    return not (charge.sum_kl or charge.epsilon or charge.caveats or charge.identity)


def _digest(identity: str) -> bytes:
    return hashlib.sha256(identity.encode()).digest()

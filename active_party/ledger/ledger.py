"""The leak ledger: how much all answers about an example may together reveal about its label.

Each answer comes with a charge, the divergence K between the classes that it leaves. Fresh noise is
independent from answer to answer, so divergences add up (the chain rule). A charge may depend on
earlier answers; that changes nothing as long as the sum that counts is the one that was really
charged. Repeated noise gives the same answer again: for one noise identity, only the largest charge
counts.

An account also remembers whom its charges do not describe, whether one is not of a Gaussian
mechanism, and what is known besides the divergence, such as the best AUC of a label that was drawn
once. ``bounds`` says what follows from all this, and for whom. No charge is ever forgotten.
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
    ALL_CAVEATS,
    NOTHING,
    Caveats,
    Divergences,
    KnownBounds,
    LeakBounds,
    bounds_of,
    caveats_of,
    compose,
    known_of_entry,
    where_charged,
)
from splitveil.common.record.answer_log import ChargedAnswer
from splitveil.common.run.sample_order import Positions


class Exposure(NamedTuple):
    """What the answers about some examples may have revealed, example by example."""

    sum_kl: Divergences
    caveats: Caveats
    known: KnownBounds

    @property
    def most(self) -> float:
        """The largest divergence."""
        return float(self.sum_kl.max())


class LeakLedger:
    """One account per aligned example, in addition to what ``earlier`` has of the same examples.

    Memory stays at five numbers and one byte per example, however often the noise changes: the
    charge of the current noise identity is kept apart from the sum of all earlier charges. An
    identity that comes back after another one is charged again, which is never too little.
    """

    def __init__(self, num_examples: int, earlier: "LeakLedger | None" = None) -> None:
        self.earlier = earlier  # counted in all figures; no charge and no state changes it
        # Settled: charges of fresh noise, and of earlier noise identities. Current: the largest
        # under the current identity, of which the digest is kept; empty before the first one.
        self._settled: Divergences = np.zeros(num_examples)
        self._current: Divergences = np.zeros(num_examples)
        self._caveats: Caveats = np.zeros(num_examples, dtype=np.uint8)
        self._known: KnownBounds = np.repeat(NOTHING[:, None], num_examples, axis=1)
        self._current_known = NOTHING
        self._identity = b""
        self._settled_epsilon = 0.0
        self._current_epsilon = 0.0

    def __len__(self) -> int:
        return len(self._settled)

    def charge(self, positions: Positions, charge: LeakCharge) -> None:
        """Charge one answer about these examples, each once, before it leaves."""
        self.enter(positions, logged(charge))

    def enter(self, positions: Positions, charge: ChargedAnswer) -> None:
        """Charge one answer as the log of answers keeps it."""
        if not (charge.sum_kl or charge.epsilon or charge.caveats or charge.identity):
            return  # it reveals nothing, as each answer that was computed from releases
        self._caveats[positions] |= np.uint8(charge.caveats)
        known = known_of_entry(charge)
        if not charge.identity:
            self._settled[positions] += charge.sum_kl
            self._settled_epsilon += charge.epsilon
            before = self._known.take(positions, axis=1)  # a third of the time of an index
            after = compose(before, known[:, None])
            if not np.array_equal(after, before):
                self._known[:, positions] = after
            return
        if charge.identity != self._identity:
            self._settle()
            self._identity = charge.identity
        self._current[positions] = np.maximum(self._current[positions], charge.sum_kl)
        self._current_epsilon = max(self._current_epsilon, charge.epsilon)
        self._current_known = np.maximum(self._current_known, known)

    def after(self, positions: Positions, charge: ChargedAnswer) -> Exposure:
        """Return what the examples of a batch would be exposed to with an answer."""
        known = known_of_entry(charge)
        if self.earlier is not None:
            return self.whole(positions).after(np.arange(len(positions)), charge)
        if not charge.identity or charge.identity != self._identity:
            before = self.exposure(positions)
            caveats = before.caveats | np.uint8(charge.caveats)
            return Exposure(
                before.sum_kl + charge.sum_kl, caveats, compose(before.known, known[:, None])
            )
        current = np.maximum(self._current[positions], charge.sum_kl)
        repeated = where_charged(current > 0, np.maximum(self._current_known, known))
        return Exposure(
            self._settled[positions] + current,
            self._caveats[positions] | np.uint8(charge.caveats),
            compose(self._known.take(positions, axis=1), repeated),
        )

    def exposure(self, positions: Positions) -> Exposure:
        """Return what some examples have been exposed to."""
        if self.earlier is not None:
            return self.whole(positions).exposure(np.arange(len(positions)))
        current, known = self._current[positions], self._known.take(positions, axis=1)
        if self._identity:
            known = compose(known, where_charged(current > 0, self._current_known))
        return Exposure(self._settled[positions] + current, self._caveats[positions], known)

    def whole(self, positions: Positions) -> "LeakLedger":
        """Return a ledger of some examples that has the earlier accounts among its own."""
        whole, every = LeakLedger(len(positions)), np.arange(len(positions))
        whole.add(every, self, positions)  # first: its noise is the current one
        if self.earlier is not None:
            whole.add(every, self.earlier, positions)
        return whole

    def share(self, group_of: Positions) -> None:
        """Give the examples of a group one account: figure by figure the largest of theirs."""
        figures = [self._settled, self._current, *self._known, self._caveats]
        for figure, largest in zip(figures, [np.maximum] * 5 + [np.bitwise_or], strict=True):
            shared = np.zeros(group_of.max(initial=-1) + 1, dtype=figure.dtype)
            largest.at(shared, group_of, figure)
            figure[:] = shared[group_of]

    def add(
        self,
        positions: Positions,
        other: "LeakLedger",
        other_positions: Positions,
        *,
        is_counted: bool = False,
    ) -> None:
        """Add the charges of another ledger for some of its examples, without its ``earlier``.

        For one noise identity the larger charge of the two counts, as within one run. Positions are
        those of the same examples in either ledger, each once; ``is_counted`` says that this
        ledger's epsilon covers the other's answers already.
        """
        theirs = other.state_dict()
        identity = bytes(theirs["identity"].tolist())
        current_known = theirs["current_known"].numpy()
        epsilon, current_epsilon = (0.0, 0.0) if is_counted else theirs["epsilon"].tolist()
        settled, current, caveats, known = (
            theirs[name].numpy()[..., other_positions]
            for name in ("settled", "current", "caveats", "known")
        )
        self._identity = self._identity or identity
        self._caveats[positions] |= caveats
        self._settled[positions] += settled
        self._settled_epsilon += epsilon
        known = compose(self._known[:, positions], known)
        if identity == self._identity:
            self._current[positions] = np.maximum(self._current[positions], current)
            self._current_epsilon = max(self._current_epsilon, current_epsilon)
            self._current_known = np.maximum(self._current_known, current_known)
        else:
            self._settled[positions] += current
            self._settled_epsilon += current_epsilon
            known = compose(known, where_charged(current > 0, current_known))
        self._known[:, positions] = known

    def num_charged(self, positions: Positions) -> int:
        """Return the number of examples, among those given, that have been charged anything."""
        return int(np.count_nonzero(self.exposure(positions).sum_kl))

    @property
    def reveals_nothing(self) -> bool:
        """Whether no charge but those of ``earlier`` says anything about any example."""
        return not (self._settled.any() or self._current.any() or self._caveats.any())

    def bounds(self, positions: Positions) -> LeakBounds:
        """Bound how much the run may have revealed so far about some examples, at least one."""
        if self.earlier is not None:
            return self.whole(positions).bounds(np.arange(len(positions)))
        return bounds_of(*self.exposure(positions), self._settled_epsilon + self._current_epsilon)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the accounts in the common order, without any ids and ``earlier``."""
        epsilons = [self._settled_epsilon, self._current_epsilon]
        return {
            "settled": torch.from_numpy(self._settled),
            "current": torch.from_numpy(self._current),
            "caveats": torch.from_numpy(self._caveats),
            "identity": torch.tensor(list(self._identity), dtype=torch.uint8),
            "epsilon": torch.tensor(epsilons, dtype=torch.float64),
            "known": torch.from_numpy(self._known),
            "current_known": torch.from_numpy(self._current_known.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a copy of such accounts; raises ValueError for those of other examples."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"expected the state of a ledger, got {sorted(state)}")
        for name in ("settled", "current", "caveats", "known", "current_known"):
            if state[name].shape != own[name].shape or state[name].dtype != own[name].dtype:
                raise ValueError(
                    f"{name}: expected {own[name].dtype} of shape {tuple(own[name].shape)}, got "
                    f"{state[name].dtype} of shape {tuple(state[name].shape)}"
                )
        if not bool((state["settled"] >= 0).all() and (state["current"] >= 0).all()):
            raise ValueError("expected divergences of at least 0")
        if bool((state["caveats"] & ~ALL_CAVEATS).any()):
            raise ValueError("caveats: expected known bits")
        for part in (state["known"], state["current_known"]):
            if not bool(((part[0] >= 0.5) & (part[0] <= 1) & (part[1:] >= 0)).all()):
                raise ValueError("known: expected AUCs of 0.5 to 1, and no negative numbers")
        self._settled = state["settled"].numpy().copy()
        self._current = state["current"].numpy().copy()
        self._caveats = state["caveats"].numpy().copy()
        self._known = state["known"].numpy().copy()
        self._current_known = state["current_known"].numpy().copy()
        self._identity = bytes(state["identity"].tolist())
        self._settled_epsilon, self._current_epsilon = state["epsilon"].tolist()

    def _settle(self) -> None:
        repeated = where_charged(self._current > 0, self._current_known)
        self._known, self._current_known = compose(self._known, repeated), NOTHING
        self._settled += self._current
        self._current.fill(0.0)
        self._settled_epsilon += self._current_epsilon
        self._current_epsilon = 0.0


def logged(charge: LeakCharge) -> ChargedAnswer:
    """Return a charge in the form of the log of answers, with a digest instead of the identity."""
    caveats, identity = caveats_of(charge), charge.noise_identity
    if identity is None:
        # Fresh noise is Gaussian: the odds of a single answer have no bound, unless it reveals
        # nothing to anybody.
        reveals_nothing = charge.sum_kl == 0 and not caveats
        epsilon, digest = 0.0 if reveals_nothing else math.inf, b""
    else:
        epsilon = math.inf if charge.epsilon is None else charge.epsilon
        digest = hashlib.sha256(identity.encode()).digest()
    return ChargedAnswer(
        charge.sum_kl,
        digest,
        epsilon,
        caveats,
        1.0 if charge.leak_auc is None else charge.leak_auc,
        math.inf if charge.dominating_mu is None else charge.dominating_mu,
    )

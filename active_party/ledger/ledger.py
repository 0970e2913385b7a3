"""The leak ledger: how much all answers about an example may together reveal about its label.

Each answer comes with a charge, the divergence K between the classes that it leaves. Fresh noise is
independent from answer to answer, so divergences add up (the chain rule). A charge may depend on
earlier answers; that changes nothing as long as the sum that counts is the one that was really
charged. Repeated noise gives the same answer again: for one noise identity, only the largest charge
counts.

``bounds`` says what else an account remembers, what follows from it, and for whom.
No charge is ever forgotten.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.ledger.bounds import Accounts, bounds_of
from splitveil.common.privacy.charge import ALL_CAVEATS, Charge
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.run.sample_order import Positions


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

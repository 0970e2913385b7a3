"""The leak budget of a run: admits or refuses an answer, and charges it before it leaves.

A run that resumes from a checkpoint takes its ledger from there, so that the ledger afterwards is,
bit for bit, what it would have been. Later answers stay known to the peer, whether or not the run
gets that far again. So the accounts of everything that was answered are kept as well, until the
same answers have been given again; these are reported and held against a budget. After a process
was killed they are rebuilt from the newest checkpoint and the log of answers.

A limit in divergences is the same for every account. A limit in AUCs allows an account a larger
divergence if all its charges are a Gaussian mechanism, whose AUC is exact, and any divergence if
another bound (see ``ledger``) is within the limit.

The charges of a defense are about its answers. Other settings let true labels reach the peer in
another way: by the end of a run, by the replies to requests, or by the top model's first weights.
No charge describes that, so no bound for anybody may be stated with it.

A bound for weaker adversary classes stays: these peers look only at answers, and their bound is
about a label beyond what the model predicts of it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from splitveil.active_party.defenses.sum_kl import sum_kl_for_estimated_auc, sum_kl_for_leak_auc
from splitveil.active_party.ledger.account_book import AccountBook, Names
from splitveil.active_party.ledger.ledger import Accounts, Figures, LeakLedger, auc_bound
from splitveil.common.errors import BudgetExhausted
from splitveil.common.privacy.charge import Adversary, Charge
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.wording import at_most, auc_at_most

ROUNDING = 1e-6  # relative excess that is allowed, so that ten times a strength pays for ten


@dataclass(frozen=True)
class Limit:
    """The most that an account may reveal, and the peers that all charges have to describe."""

    max_sum_kl: float  # for accounts of any distributions
    max_gaussian_sum_kl: float  # for accounts of Gaussian mechanisms
    peers: Adversary = Adversary.ANYBODY
    max_leak_auc: float | None = None  # any divergence is allowed up to it, if it counts

    @classmethod
    def of_sum_kl(cls, sum_kl: float, peers: Adversary = Adversary.ANYBODY) -> "Limit":
        """Return the limit to a divergence."""
        return cls(sum_kl, sum_kl, peers)

    @classmethod
    def of_leak_auc(cls, leak_auc: float, peers: Adversary = Adversary.ANYBODY) -> "Limit":
        """Return the limit to an AUC, above 0.5 and below 1."""
        general, gaussian = sum_kl_for_leak_auc(leak_auc), sum_kl_for_estimated_auc(leak_auc)
        return cls(general, gaussian, peers, leak_auc)

    def of(self, accounts: Accounts) -> Figures:
        """Return the divergence allowed to each account, (accounts,)."""
        leak_auc, epsilon = accounts.leak_auc, accounts.epsilon
        if self.max_leak_auc is None:
            return np.full(leak_auc.shape, self.max_sum_kl)
        bound = np.minimum(leak_auc, 0.5 + np.tanh(epsilon / 2) / 2)  # `dp_bounds.auc_of_epsilon`
        is_within = bound - 0.5 <= (self.max_leak_auc - 0.5) * (1 + ROUNDING)
        allowed = np.maximum(self.max_sum_kl, self.max_gaussian_sum_kl - accounts.excess)
        return np.where(is_within, math.inf, allowed)

    def objection(self, reached: Accounts) -> str | None:
        """Say by how much some accounts would exceed the limit; None if they are within it."""
        narrow = reached.adversary
        if not narrow.includes(self.peers):
            return (
                f"would leave an example without a bound for {self.peers.in_words}: what was "
                f"revealed about it is bounded for {narrow.in_words}"
            )
        excess = reached.sum_kl / self.of(reached)
        worst = int(excess.argmax())
        if excess[worst] <= 1 + ROUNDING:
            return None
        account = reached.at(worst)
        return (
            f"would take an example to {_in_words(float(account.sum_kl), auc_bound(account))} for "
            f"{self.peers.in_words}; the budget is {self.in_words(account)}"
        )

    def in_words(self, account: Accounts) -> str:
        """Describe the limit for one account, ()."""
        allowed = self.of(account)
        if self.max_leak_auc is None:
            infinite = np.asarray(math.inf)
            at_limit = account._replace(sum_kl=allowed, leak_auc=np.ones(()), epsilon=infinite)
            return _in_words(float(allowed), auc_bound(at_limit))
        if math.isfinite(allowed):
            return _in_words(float(allowed), self.max_leak_auc)
        return f"a leak AUC of at most {auc_at_most(self.max_leak_auc)}"


def _in_words(sum_kl: float, leak_auc: float) -> str:
    return f"sum_kl {at_most(sum_kl)}, a leak AUC of at most {auc_at_most(leak_auc)}"


def num_answers_within(max_sum_kl: float, charge: float) -> float:
    """Return the number of answers of equal charge that the rest of a budget pays for.

    A negative rest pays for no answer; an infinite one, or no charge, for all of them.
    """
    if charge == 0 or max_sum_kl == math.inf:
        return math.inf
    return max(max_sum_kl, 0.0) * (1 + ROUNDING) // charge


class LabelSignal(NamedTuple):
    """One way that labels reach the peer besides the answers, and a sentence about it."""

    setting: str
    why: str


LEARNED_FROM_LABELS = LabelSignal(
    "initial_weights",
    "The model of initial_weights has learned from true labels, which show in its predictions and "
    "so in the answers.",
)
LEARNED_FROM_RELEASES = LabelSignal(
    "initial_weights",
    "The model of initial_weights has learned from what an earlier run released, which shows in "
    "the answers and is not counted: name that run in earlier_ledgers.",
)
EARLY_STOPPING = LabelSignal(
    "early_stopping_epochs",
    "With early_stopping_epochs the validation labels decide when the run ends, which no charge "
    "counts: a peer that ranks one row first and then last reads its label from the end.",
)


def widest_adversary(signals: tuple[LabelSignal, ...]) -> Adversary:
    """Return the strongest adversary class for whom bounds on training labels can hold."""
    return Adversary.HONEST_BUT_CURIOUS if signals else Adversary.ANYBODY


def objection_to(peers: Adversary, signals: tuple[LabelSignal, ...]) -> str | None:
    """Say which setting voids a bound for some peers; None if there is none."""
    widest = widest_adversary(signals)
    if widest.includes(peers):
        return None
    return (
        f"{signals[0].setting} leaves no bound for {peers.in_words}. {signals[0].why} Expected a "
        f"run without it, or adversary: {widest} in run_budget"
    )


class LeakBudget:
    """The accounts of one run that may resume, after what earlier runs have left."""

    def __init__(
        self,
        ids: Sequence[str],
        rows: AlignedRows,
        persons: Names | None,
        earlier: AccountBook,
        limit: Limit | None,
        peers: Adversary,
        *,
        reveals_validation: bool,
    ) -> None:
        """Open the accounts.

        Args:
            ids: by row of this party's table.
            rows: in common with the passive parties.
            persons: by row of this party's table; None if every row has its own.
            earlier: the accounts of earlier runs, which count towards the limit.
            limit: what no example may exceed over the whole run; None for no limit.
            peers: the strongest adversary class that a charge may describe in this run. Where
                something else that depends on labels reaches the peer, the charge of an answer
                does not describe everybody.
            reveals_validation: whether validation labels decide when the run ends. No answer is
                about their rows, but a later run may train on them, and then has bounds for these
                peers at most.
        """
        self.earlier, self.peers, self._limit = earlier, peers, limit
        self._ids = ids
        self._rows = rows
        self._persons, self._begun = None, earlier
        if persons is not None:
            self._persons = persons[rows.file_rows]
            self._begun = earlier.by_person(ids, persons)
        begun = self._begun.opening_ledger(self._ids_in_order(), len(rows))
        if reveals_validation:
            begun.charge(rows.splits["validation"], Charge(0.0, adversary=peers))
        self.course = begun  # of answers on the course so far, the same in every such run
        self.total = begun  # of all answers ever; the same object while there are no others

    @property
    def is_behind(self) -> bool:
        """True if answers were given after the run's present position."""
        return self.total is not self.course

    def catch_up(self) -> None:
        """Note that the run has reached the end of all answers ever given."""
        self.course = self.total

    def go_back(self, course: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's accounts as the course's; ValueError for other examples."""
        self.course = self._loaded(course)

    def reopen(self, state: Mapping[str, Any], since: Iterable[tuple[Positions, Charge]]) -> None:
        """Rebuild the accounts that an earlier process of the run had.

        They combine the newest checkpoint with the answers given since. Raises ValueError as
        ``go_back``.
        """
        total = state["course"] if state["total"] is None else state["total"]
        self.total = self._loaded(total)
        for positions, charge in since:
            self.total.charge(positions, charge)
        self.go_back(state["course"])

    def state_dict(self) -> dict[str, Any]:
        """Return both ledgers, for a checkpoint."""
        total = self.total.state_dict() if self.is_behind else None
        return {"course": self.course.state_dict(), "total": total}

    def _loaded(self, state: Mapping[str, Tensor]) -> LeakLedger:
        ledger = LeakLedger(len(self.total), self.total.earlier)
        ledger.load_state_dict(state)
        return ledger

    def admit(
        self,
        positions: Positions,
        charge: Charge,
        what: str,
        *,
        is_repeated: bool,
        log: Callable[[], None],
    ) -> None:
        """Charge an answer that is about to be given, or refuse it.

        ``charge`` is that of each of these training rows, for no more than ``peers``; ``what``
        names the answer in the refusal. ``is_repeated`` says that the same answer has left before
        and reveals nothing new. ``log`` writes it to the log of answers once it is known to fit; if
        that fails, nothing is charged. Raises BudgetExhausted if it would take an example past the
        limit.
        """
        limit, total = self._limit, self.total
        if limit is not None and len(positions):
            reached = total.accounts(positions) if is_repeated else total.after(positions, charge)
            objection = limit.objection(reached)
            if objection is not None:
                raise BudgetExhausted(f"run_budget: {what} {objection}")
        log()
        # A run that is behind has given it before, so that only its course is charged.
        self.course.charge(positions, charge)

    def bounds(self) -> LeakBounds:
        """Bound what all answers ever given may have revealed about the training examples."""
        return self.total.bounds(self._rows.splits["train"])

    def bounds_on_course(self) -> LeakBounds:
        """Bound what the answers up to the run's present position may have revealed."""
        return self.course.bounds(self._rows.splits["train"])

    def account_book(self) -> AccountBook:
        """Return the accounts of this run and the runs before it, by example."""
        total = self.total
        if total.reveals_nothing:
            return self.earlier  # not even another run's: it would count what that charged again
        return self._begun.closing_book(self._ids_in_order(), total, self._persons)

    def num_charged(self) -> int:
        """Return the number of training examples that have been charged anything so far."""
        return self.course.num_charged(self._rows.splits["train"])

    def _ids_in_order(self) -> Iterator[str]:
        return (self._ids[row] for row in self._rows.file_rows)

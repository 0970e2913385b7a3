"""The leak budget of a run: decides whether an answer may leave, and charges it before it does.

The budget is compared with the charges of all answers ever given, not only of those up to the run's
present position: a run that resumes from an earlier checkpoint gets back none of the charges since.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.ledger import LeakBounds, logged
from splitveil.active_party.ledger.run_ledger import RunLedger
from splitveil.common.errors import BudgetExhausted
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.upper_bounds import at_most, auc_at_most

ROUNDING = 1e-6
"""Relative excess of a sum that a budget allows, so that ten times a strength pays for ten answers.
"""


def fits(sum_kl: float, max_sum_kl: float) -> bool:
    """Return whether a divergence is within a budget, up to rounding."""
    return sum_kl <= max_sum_kl * (1 + ROUNDING)


def num_answers_within(max_sum_kl: float, charge: float) -> float:
    """Return the number of answers of equal charge that a budget pays for; infinite for no charge.

    Args:
        max_sum_kl: the rest of the budget; a negative rest pays for no answer.
        charge: divergence that each answer adds.
    """
    return math.inf if charge == 0 else max(max_sum_kl, 0.0) * (1 + ROUNDING) // charge


@dataclass(frozen=True)
class Allowance:
    """The label owner's limit to what a run may reveal, and the part already used."""

    max_sum_kl: float = math.inf
    """Divergence that no example may exceed over the whole run."""

    earlier: AccountBook = field(default_factory=AccountBook.empty)
    """Accounts of earlier runs for some of the ids; they count towards the budget."""


class LeakBudget:
    """The accounts of one run, held against its allowance.

    Args:
        allowance: the limit, and the accounts of earlier runs.
        ids: this party's canonical ids, by row of its file.
        rows: the rows that all parties have in common.
    """

    def __init__(self, allowance: Allowance, ids: Sequence[str], rows: AlignedRows) -> None:
        self._allowance = allowance
        self._ids = ids
        self._rows = rows
        begun = allowance.earlier.begun(self._ids_in_order(), len(rows))
        self.accounts = RunLedger(begun)

    def admit(
        self,
        positions: Positions,
        charge: LeakCharge,
        what: str,
        *,
        is_repeated: bool,
        log: Callable[[], None],
    ) -> None:
        """Charge an answer or a release that is about to be given, or refuse it.

        Args:
            positions: positions of the training rows that it is about.
            charge: the charge of each of them.
            what: names it in the refusal.
            is_repeated: whether this very answer has left before, so that it tells nothing new.
            log: writes the answer to the log of answers. Called once the answer is known to fit;
                if it fails, nothing is charged.

        Raises:
            BudgetExhausted: the answer would take an example past the limit; nothing is charged.
        """
        told = self.accounts.told
        reached = told.most(positions) if is_repeated else told.after(positions, charge)
        budget = self._allowance.max_sum_kl
        if not fits(reached, budget):
            raise BudgetExhausted(
                f"run_budget: {what} would take an example to "
                f"sum_kl {at_most(reached)}, a guaranteed leak AUC of "
                f"{auc_at_most(leak_auc_bound(reached))}; the budget is sum_kl {at_most(budget)}, "
                f"a guaranteed leak AUC of {auc_at_most(leak_auc_bound(budget))}"
            )
        log()
        self.accounts.enter(positions, logged(charge))

    def told(self) -> LeakBounds:
        """Bound what all answers ever given may have told about the training examples."""
        return self.accounts.told.bounds(self._rows.splits["train"])

    def told_on_course(self) -> LeakBounds:
        """Bound what the answers up to the run's present position may have told."""
        return self.accounts.course.bounds(self._rows.splits["train"])

    def account_book(self) -> AccountBook:
        """Return the accounts of this run and the runs before it, by example."""
        return self._allowance.earlier.closed(self._ids_in_order(), self.accounts.told)

    @property
    def counts_earlier_runs(self) -> bool:
        """Whether answers of earlier runs are counted."""
        return len(self._allowance.earlier) > 0

    def num_charged(self) -> int:
        """Return the number of training examples that have been charged anything so far."""
        return self.accounts.course.num_charged(self._rows.splits["train"])

    def _ids_in_order(self) -> Iterator[str]:
        return (self._ids[row] for row in self._rows.file_rows)

"""The two ledgers of a run that may resume: of its course so far, and of all answers ever given.

A run that resumes from a checkpoint takes its ledger from there, so that the ledger afterwards is,
bit for bit, what it would have been. Later answers stay known to the peer, whether or not the run
gets that far again. So the accounts of everything that was answered are kept as well, until the
same answers have been given again; these are the ones that are reported and held against a budget.

After a process was killed they are rebuilt from the newest checkpoint and the log of answers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from splitveil.active_party.ledger.ledger import LeakLedger
from splitveil.common.run.sample_order import Positions
from splitveil.common.storage.answer_log import ChargedAnswer


class RunLedger:
    """The accounts of one run.

    Args:
        begun: the accounts that earlier runs have left.
    """

    def __init__(self, begun: LeakLedger) -> None:
        self.course = begun
        """Accounts of the answers on the run's course so far, the same in every such run."""
        self.told = begun
        """Accounts of all answers ever given; the same object while there are no others."""

    @property
    def is_behind(self) -> bool:
        """Whether answers were given beyond the run's present position."""
        return self.told is not self.course

    def enter(self, positions: Positions, charge: ChargedAnswer) -> None:
        """Charge one answer, before it leaves; a run that is behind has given it before.

        Args:
            positions: positions of its examples, each once.
            charge: the charge of each of them.
        """
        self.course.enter(positions, charge)

    def catch_up(self) -> None:
        """Note that the run has reached the end of all answers ever given."""
        self.course = self.told

    def go_back(self, course: Mapping[str, Tensor]) -> None:
        """Take the accounts of a checkpoint as those of the course so far; no charge is lost.

        Raises:
            ValueError: they do not come from a ledger, or have another number of examples.
        """
        self.course = _loaded(course, len(self.told))

    def reopen(
        self, state: Mapping[str, Any], since: Iterable[tuple[Positions, ChargedAnswer]]
    ) -> None:
        """Rebuild the accounts that an earlier process of the run had.

        Args:
            state: the state in the newest checkpoint, as ``state_dict`` returned it.
            since: the answers that were given after that checkpoint.

        Raises:
            ValueError: the state does not come from such a ledger.
        """
        told = state["course"] if state["told"] is None else state["told"]
        self.told = _loaded(told, len(self.told))
        for positions, charge in since:
            self.told.enter(positions, charge)
        self.go_back(state["course"])

    def state_dict(self) -> dict[str, Any]:
        """Return both ledgers, for a checkpoint."""
        told = self.told.state_dict() if self.is_behind else None
        return {"course": self.course.state_dict(), "told": told}


def _loaded(state: Mapping[str, Tensor], num_examples: int) -> LeakLedger:
    ledger = LeakLedger(num_examples)
    ledger.load_state_dict(state)
    return ledger

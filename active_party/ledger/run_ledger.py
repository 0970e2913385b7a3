"""The ledgers of a run that may go back: of where it is, and of all that was ever answered.

A run that goes back to a checkpoint takes its ledger from there, so that it is afterwards, bit for
bit, what it would have been. What was answered since stays known to the peer, whether or not the
run gets there again. So the accounts of everything that was answered are kept beside it, until
the same answers have been given again; what is reported, and held against a budget, is those.

After a process that was killed they are made of the newest checkpoint and the log of answers.
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
        begun: what earlier runs may have told.
    """

    def __init__(self, begun: LeakLedger) -> None:
        self.course = begun
        """Of the answers up to where the run is: the same in every run that gets there."""
        self.told = begun
        """Of all answers that were ever given; the same object while there are no others."""

    @property
    def is_behind(self) -> bool:
        """Whether answers were given beyond where the run is."""
        return self.told is not self.course

    def enter(self, positions: Positions, charge: ChargedAnswer) -> None:
        """Note one answer, before it leaves; where the run is behind, it was told before.

        Args:
            positions: of its examples, each once.
            charge: what it adds to each of them.
        """
        self.course.enter(positions, charge)

    def catch_up(self) -> None:
        """Take note that the run is where all answers that were ever given are behind it."""
        self.course = self.told

    def go_back(self, course: Mapping[str, Tensor]) -> None:
        """Take the accounts of a checkpoint as those of where the run is; what was told stays.

        Raises:
            ValueError: they are no ledger's, or of another number of examples.
        """
        self.course = _loaded(course, len(self.told))

    def reopen(
        self, state: Mapping[str, Any], since: Iterable[tuple[Positions, ChargedAnswer]]
    ) -> None:
        """Find out what was told, in a process before this one.

        Args:
            state: of the newest checkpoint, as ``state_dict`` returned it.
            since: the answers that were given after it was taken.

        Raises:
            ValueError: it is no such state.
        """
        told = state["course"] if state["told"] is None else state["told"]
        self.told = _loaded(told, len(self.told))
        for positions, charge in since:
            self.told.enter(positions, charge)
        self.go_back(state["course"])

    def state_dict(self) -> dict[str, Any]:
        """Return both, for a checkpoint."""
        told = self.told.state_dict() if self.is_behind else None
        return {"course": self.course.state_dict(), "told": told}


def _loaded(state: Mapping[str, Tensor], num_examples: int) -> LeakLedger:
    ledger = LeakLedger(num_examples)
    ledger.load_state_dict(state)
    return ledger

"""The settings of a run's leak budget: its limit, and the peers for whom it has to hold."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from splitveil.active_party.ledger.limit import Limit
from splitveil.common.privacy.covers import Covers
from splitveil.common.settings import Section, kind_by_key


class PeersOfBudget(Section):
    """The peers for whom a budget has to hold."""

    covers: Literal["anybody", "passive and honest", "knows class means only"] = "anybody"
    """The peers for whom the limit has to hold.

    ``anybody``: a peer that may choose its activations, and may know everything but one label.
    ``passive and honest``: one that sends its model's activations. ``knows class means only``: one
    that compares gradients with the class means of a batch, and looks at nothing else. A defense
    whose charges do not describe these peers is refused.
    """

    @property
    def peers(self) -> Covers:
        """The peers for whom the limit has to hold."""
        return Covers(self.covers)


class LeakAucBudget(PeersOfBudget):
    """Limit on what a run may reveal, as an AUC."""

    leak_auc: float = Field(gt=0.5, lt=1)
    """Highest AUC that a score computed from all answers together may reach on any example.

    The limit is compared with the ledger's bound for these peers. Where all answers are a Gaussian
    mechanism, or follow from one noisy label, that is the exact figure; otherwise it is the bound
    for any distributions, or a smaller one where the defense has it.
    """

    @property
    def limit(self) -> Limit:
        """The limit as divergences."""
        return Limit.of_leak_auc(self.leak_auc, self.peers)


class SumKlBudget(PeersOfBudget):
    """Limit on what a run may reveal, as a symmetrised divergence."""

    sum_kl: float = Field(gt=0, le=1e6)
    """Largest divergence between the classes in all answers about one example together."""

    @property
    def limit(self) -> Limit:
        """The limit as divergences."""
        return Limit.of_sum_kl(self.sum_kl, self.peers)


RunBudget = Annotated[
    Annotated[LeakAucBudget, Tag("leak_auc")] | Annotated[SumKlBudget, Tag("sum_kl")],
    kind_by_key("leak_auc", "sum_kl", error_type="run_budget_key"),
]
"""Limit on what a run may reveal about each label; the key that is present names the unit."""

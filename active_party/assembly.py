"""Builds a session from the settings, and says what limits a run."""

from collections.abc import Callable
from contextlib import nullcontext

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import Allowance
from splitveil.active_party.ledger.label_signals import (
    LabelSignal,
    label_signals,
    objection_to,
    widest_adversary,
)
from splitveil.active_party.named_inputs import label_uses_of
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.run.preparation import Counting, OwnRows, OwnRules
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import EarlyStop
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.id_rules import rules_as_bytes


def signals_of(
    settings: ActiveSettings, earlier: AccountBook | None = None
) -> tuple[LabelSignal, ...]:
    """Return what the peer of a run may learn about labels besides the answers."""
    return label_signals(label_uses_of(settings, earlier))


def allowance_of(settings: ActiveSettings, earlier: AccountBook | None = None) -> Allowance:
    """Return the limit on what a run may reveal, and the peers it can have bounds for."""
    budget, signals = settings.run_budget, signals_of(settings, earlier)
    objection = None if budget is None else objection_to(budget.peers, signals)
    if objection is not None:
        raise SettingsError(f"run_budget: {objection}")
    limit = None if budget is None else budget.limit
    if earlier is None:
        earlier = AccountBook.empty(rules_as_bytes(settings.contract.ids))
    can_end_early = settings.early_stopping_epochs is not None
    return Allowance(limit, earlier, widest_adversary(signals), can_end_early)


def build_session(
    settings: ActiveSettings,
    data: PartyData,
    build_trainer: Callable[[AlignedRows], TopTrainer],
    observer: SessionObserver,
    draw_nonce: Callable[[], bytes],
    store: RunStore | None = None,
    allowance: Allowance | None = None,
    counting: Counting = nullcontext,
) -> ActiveSession:
    patience = settings.early_stopping_epochs
    rules = OwnRules(
        early_stop=None if patience is None else EarlyStop(patience),
        allowance=allowance or allowance_of(settings),
        noise_seed=settings.defense.noise_seed,
        counting=counting,
    )
    own = OwnRows(data.ids, data.table.splits)
    return ActiveSession(settings.contract, own, build_trainer, observer, draw_nonce, rules, store)

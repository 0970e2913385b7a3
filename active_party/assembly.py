"""Builds a session from the settings, and says what limits a run."""

from collections.abc import Callable
from contextlib import nullcontext

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.label_signals import (
    LabelSignal,
    label_signals,
    objection_to,
    widest_adversary,
)
from splitveil.active_party.named_inputs import label_uses_of
from splitveil.active_party.run.lifecycle import Counting, OwnRows, OwnRules
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import EarlyStop
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.charge import Adversary
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.id_rules import rules_as_bytes


def signals_of(
    settings: ActiveSettings, earlier: AccountBook | None = None
) -> tuple[LabelSignal, ...]:
    """Return what the peer of a run may learn about labels besides the answers."""
    return label_signals(label_uses_of(settings, earlier))


def peers_of(settings: ActiveSettings, earlier: AccountBook | None = None) -> Adversary:
    """Return the peers that a run can have bounds for; SettingsError if its budget wants others."""
    budget, signals = settings.run_budget, signals_of(settings, earlier)
    objection = None if budget is None else objection_to(budget.peers, signals)
    if objection is not None:
        raise SettingsError(f"run_budget: {objection}")
    return widest_adversary(signals)


def build_session(
    settings: ActiveSettings,
    data: PartyData,
    build_trainer: Callable[[AlignedRows], TopTrainer],
    observer: SessionObserver,
    draw_nonce: Callable[[], bytes],
    store: RunStore | None = None,
    earlier: AccountBook | None = None,
    counting: Counting = nullcontext,
) -> ActiveSession:
    patience, own = settings.early_stopping_epochs, OwnRows(data.ids, data.table.splits)
    if earlier is None:
        earlier = AccountBook.empty(rules_as_bytes(settings.contract.ids))
    rules = OwnRules(
        early_stop=None if patience is None else EarlyStop(patience),
        earlier=earlier,
        limit=None if settings.run_budget is None else settings.run_budget.limit,
        peers=peers_of(settings, earlier),
        noise_seed=settings.defense.noise_seed,
        counting=counting,
    )
    return ActiveSession(settings.contract, own, build_trainer, observer, draw_nonce, rules, store)

"""Builds a session from the settings, and says what limits a run."""

from collections.abc import Callable
from contextlib import nullcontext

from splitveil.active_party.ledger.account_book import LEDGER, AccountBook
from splitveil.active_party.ledger.account_book import SETTING as LEDGERS
from splitveil.active_party.ledger.budget import (
    EARLY_STOPPING,
    LEARNED_FROM_LABELS,
    LEARNED_FROM_RELEASES,
    LabelSignal,
    objection_to,
    widest_adversary,
)
from splitveil.active_party.run.lifecycle import Counting, OwnRows, OwnRules, SessionObserver
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import EarlyStop
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.data.source_settings import expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.charge import Adversary
from splitveil.common.record import model_files
from splitveil.common.record.model_files import SETTING as INITIAL
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.id_rules import rules_as_bytes

HAS_KNOWN_NOISE = (
    "whoever knows the insecure_noise_seed of that run subtracts its noise, and its charges bound "
    "nothing"
)


def signals_of(
    settings: ActiveSettings, earlier: AccountBook | None = None
) -> tuple[LabelSignal, ...]:
    """Return what the peer may learn about labels besides the answers.

    ``earlier`` has the run's initial accounts, as far as they are known. Raises SettingsError if a
    named file of an earlier run cannot be taken over.
    """
    _refuse_known_noise(settings)
    signals = () if settings.early_stopping_epochs is None else (EARLY_STOPPING,)
    if settings.initial_weights is None or settings.contract.is_one_shot:
        return signals  # no model enters what a one-shot run sends
    folder = expand_path(INITIAL, settings.initial_weights, settings.base_dir)
    metadata = model_files.metadata_of(folder)
    if not metadata.items() >= model_files.RELEASED_LABELS.items():
        return (LEARNED_FROM_LABELS, *signals)
    is_counted = earlier is None or earlier.counts(metadata)
    return signals if is_counted else (LEARNED_FROM_RELEASES, *signals)


def _refuse_known_noise(settings: ActiveSettings) -> None:
    """Check that no named file was made with noise of a known seed, unless this run's is too."""
    if settings.defense.noise_seed is not None:
        return
    named = [(LEDGERS, one, LEDGER) for one in settings.earlier_ledgers or ()]
    if settings.initial_weights is not None:
        named.append((INITIAL, settings.initial_weights, model_files.WEIGHTS))
    for setting, text, file in named:
        folder = expand_path(setting, text, settings.base_dir)
        # A model that has learned from true labels leaves no bound for anybody, whatever its noise.
        is_bounded = (
            file != model_files.WEIGHTS
            or model_files.metadata_of(folder).items() >= model_files.RELEASED_LABELS.items()
        )
        if model_files.has_known_noise(folder / file) and is_bounded:
            raise SettingsError(
                f"{setting}: {folder / file}: {HAS_KNOWN_NOISE}: expected what a run without "
                f"insecure_noise_seed has left"
            )


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

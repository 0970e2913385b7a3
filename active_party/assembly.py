"""Builds a session from the settings, opens what they name, and says what limits a run."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import Allowance
from splitveil.active_party.ledger.label_signals import (
    LabelSignal,
    label_signals,
    objection_to,
    widest_adversary,
)
from splitveil.active_party.ledger.stored_labels import SETTING, ReleasedTargets, read_targets
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.run.preparation import OwnRows, OwnRules
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import EarlyStop
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.source_settings import expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.record.model_files import SETTING as WEIGHTS_SETTING
from splitveil.common.record.model_files import EarlierModel, is_label_free
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.id_rules import rules_as_bytes


def signals_of(settings: ActiveSettings) -> tuple[LabelSignal, ...]:
    """Return what the peer of a run may learn about labels besides the answers."""
    uses = settings.label_uses()
    if settings.initial_weights is not None:
        folder = expand_path(WEIGHTS_SETTING, settings.initial_weights, settings.base_dir)
        is_free = is_label_free(folder)
        uses = uses._replace(
            begins_with_labels=not is_free,
            begins_with_releases=is_free and not settings.counts_run_in(folder),
        )
    return label_signals(uses)


def allowance_of(settings: ActiveSettings, earlier: AccountBook | None = None) -> Allowance:
    """Return the limit to what a run may reveal, and the peers for whom it can have bounds."""
    budget, signals = settings.run_budget, signals_of(settings)
    objection = None if budget is None else objection_to(budget.peers, signals)
    if objection is not None:
        raise SettingsError(f"run_budget: {objection}")
    limit = None if budget is None else budget.limit
    if earlier is None:
        earlier = AccountBook.empty(rules_as_bytes(settings.contract.ids))
    return Allowance(limit, earlier, widest_adversary(signals), settings.stops_by_validation)


def build_session(
    settings: ActiveSettings,
    data: PartyData,
    build_trainer: Callable[[AlignedRows], TopTrainer],
    observer: SessionObserver,
    draw_nonce: Callable[[], bytes],
    store: RunStore | None = None,
    allowance: Allowance | None = None,
) -> ActiveSession:
    stopping = settings.early_stopping
    rules = OwnRules(
        early_stop=None if stopping is None else EarlyStop(stopping),
        allowance=allowance or allowance_of(settings),
        allow_audits=settings.allow_audits,
        noise_seed=settings.defense.noise_seed,
        has_survey=settings.defense.traits.is_staged,
    )
    own = OwnRows(data.ids, data.table.splits)
    return ActiveSession(settings.contract, own, build_trainer, observer, draw_nonce, rules, store)


def subjects_of(settings: ActiveSettings, data: PartyData) -> NDArray[np.object_] | None:
    """Return each row's person, "" for a row of its own; None if the defense reads none."""
    column = settings.defense.traits.subject_column
    if column is None:
        return None
    of_file = read_subjects(settings.data, settings.base_dir, column, settings.contract.ids)
    return of_file if data.kept is None else of_file[data.kept]


def earlier_targets_of(settings: ActiveSettings) -> ReleasedTargets | None:
    """Return the targets of earlier runs that the defense uses again; None if it uses none."""
    folders = settings.defense.traits.earlier_targets
    if folders and settings.data.id_column is None:
        raise SettingsError(
            f"{SETTING}: needs data.id_column: in another file, a row's number belongs to another "
            f"example"
        )
    paths = [expand_path(SETTING, text, settings.base_dir) for text in folders]
    context = settings.defense_context()
    rules = rules_as_bytes(settings.contract.ids)
    return read_targets(paths, context.num_classes, rules, context.label_bounds)


def open_label_owners_model(settings: ActiveSettings) -> EarlierModel | None:
    """Open the model to start from, if any, unless true labels in it would void the bound."""
    earlier = open_earlier_model(settings)
    defense = settings.defense
    if earlier is not None and defense.traits.is_staged and not earlier.is_label_free:
        raise SettingsError(
            f"initial_weights: {earlier.folder}: this model has learned from true labels, which "
            f"its predictions would reveal: the bound of {defense.name} would not hold; expected a "
            f"model that a run with {defense.name}, or with noisy_label and top_labels: noisy, "
            f"has left"
        )
    return earlier

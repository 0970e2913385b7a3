"""Opens what an active party's settings name beside its table: persons, targets, a model."""

import numpy as np
from numpy.typing import NDArray

from splitveil.active_party.ledger.account_book import LEDGER, AccountBook
from splitveil.active_party.ledger.account_book import SETTING as LEDGERS
from splitveil.active_party.ledger.label_signals import LabelUses
from splitveil.active_party.ledger.stored_labels import (
    SETTING,
    TARGETS,
    ReleasedTargets,
    read_targets,
)
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.source_settings import expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.record import model_files
from splitveil.common.record.model_files import SETTING as INITIAL
from splitveil.common.run.id_rules import rules_as_bytes

HAS_KNOWN_NOISE = (
    "whoever knows the insecure_noise_seed of that run subtracts its noise, and its charges bound "
    "nothing"
)


def label_uses_of(settings: ActiveSettings, earlier: AccountBook | None = None) -> LabelUses:
    """Return where labels are used besides the answers, in the model to start from as well.

    ``earlier`` has the accounts with which the run begins, as far as they are known.

    Raises SettingsError if a named file of an earlier run cannot be taken over.
    """
    uses = settings.label_uses()
    _refuse_known_noise(settings)
    if settings.initial_weights is None:
        return uses
    folder = expand_path(INITIAL, settings.initial_weights, settings.base_dir)
    metadata = model_files.metadata_of(folder)
    is_free = metadata.items() >= model_files.RELEASED_LABELS.items()
    is_counted = earlier is None or earlier.counts(metadata)
    return uses._replace(
        begins_with_labels=not is_free, begins_with_releases=is_free and not is_counted
    )


def refuse_uncounted_targets(settings: ActiveSettings, earlier: AccountBook) -> None:
    """Refuse targets that follow from what a run released and these accounts do not have."""
    for text in settings.defense.traits.earlier_targets:
        folder = expand_path(SETTING, text, settings.base_dir)
        if not earlier.counts(model_files.metadata_of(folder, TARGETS, SETTING)):
            raise SettingsError(
                f"{SETTING}: {folder}: these targets reveal what the runs that released them were "
                f"charged, and no ledger with which this run begins has all of it: needs "
                f"earlier_ledgers: [{text}]"
            )


def _refuse_known_noise(settings: ActiveSettings) -> None:
    """Check that no named file was made with noise of a known seed, unless this run's is too."""
    if settings.defense.noise_seed is not None:
        return
    named = [(SETTING, one, TARGETS) for one in settings.defense.traits.earlier_targets]
    named += [(LEDGERS, one, LEDGER) for one in settings.earlier_ledgers or ()]
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


def open_label_owners_model(settings: ActiveSettings) -> model_files.EarlierModel | None:
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

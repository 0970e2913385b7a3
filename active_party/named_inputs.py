"""Opens what an active party's settings name beside its table: persons, and a model."""

from typing import NamedTuple

import numpy as np

from splitveil.active_party.ledger.account_book import (
    LEDGER,
    AccountBook,
    Names,
    numbered,
    persons_of,
)
from splitveil.active_party.ledger.account_book import SETTING as LEDGERS
from splitveil.active_party.ledger.label_signals import LabelUses
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.source_settings import expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.record import model_files
from splitveil.common.record.model_files import SETTING as INITIAL
from splitveil.common.run.sample_order import SPLITS

HAS_KNOWN_NOISE = (
    "whoever knows the insecure_noise_seed of that run subtracts its noise, and its charges bound "
    "nothing"
)


def label_uses_of(settings: ActiveSettings, earlier: AccountBook | None = None) -> LabelUses:
    """Return where labels are used besides the answers, including the model to start from.

    ``earlier`` has the run's initial accounts, as far as they are known.

    Raises SettingsError if a named file of an earlier run cannot be taken over.
    """
    uses = settings.label_uses()
    _refuse_known_noise(settings)
    if settings.initial_weights is None or settings.contract.is_one_shot:
        return uses  # no model enters what a one-shot run sends
    folder = expand_path(INITIAL, settings.initial_weights, settings.base_dir)
    metadata = model_files.metadata_of(folder)
    is_free = metadata.items() >= model_files.RELEASED_LABELS.items()
    is_counted = earlier is None or earlier.counts(metadata)
    return uses._replace(
        begins_with_labels=not is_free, begins_with_releases=is_free and not is_counted
    )


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


class Persons(NamedTuple):
    """The persons whom a table's rows are about."""

    names: Names  # of each row's person, (rows, 16); a row without one is a person of its own
    number: int
    most_rows: int  # largest number of one person's rows that may be trained on

    @classmethod
    def of(cls, settings: ActiveSettings, data: PartyData) -> "Persons | None":
        """Read the persons; None if the defense does not bound rows of one person together."""
        column = settings.defense.traits.subject_column
        if column is None:
            return None
        of_file = read_subjects(settings.data, settings.base_dir, column, settings.contract.ids)
        names = persons_of(of_file if data.kept is None else of_file[data.kept], data.ids)
        numbers, splits = numbered(names), data.table.splits
        trained = numbers if splits is None else numbers[splits == SPLITS.index("train")]
        return cls(names, 1 + int(numbers.max()), int(np.bincount(trained, minlength=1).max()) or 1)

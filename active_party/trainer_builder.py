"""Builds the trainer of a run from the settings, the data, the persons, and the common rows."""

import hashlib
import logging
import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses import AnswerKeys, Secrets
from splitveil.active_party.defenses.example_keys import GRADIENT_NOISE, example_keys, key_name
from splitveil.active_party.defenses.interface import Objective, Schedule, TopModel
from splitveil.active_party.ledger.account_book import Names, names_of, numbered, persons_of
from splitveil.active_party.ledger.stored_labels import labels_first_used
from splitveil.active_party.settings import ActiveSettings, RefitSettings
from splitveil.active_party.training.label_kinds import LossWeights, OrdinaryObjective, kind_of
from splitveil.active_party.training.own_models import Fitting, KnownRows, fit
from splitveil.active_party.training.top_trainer import TopTrainer, TrainingRows
from splitveil.common.data.columns import (
    CategoricalColumn,
    WrittenColumn,
    check_columns_exist,
    read_categories,
)
from splitveil.common.data.features import FeatureEncoder, Features, FeatureShapes
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.kinds import open_source
from splitveil.common.data.stored_ids import ids_at
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.models.data_parallel import Beginning, Learner, begin
from splitveil.common.models.device import speed_up
from splitveil.common.models.factory import Trial, build_top_model, one_at_a_time
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.ranks import Ranks
from splitveil.common.models.settings import bins_of
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.party.workers import Rank
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.progress import Phases
from splitveil.common.run.sample_order import SPLITS

logger = logging.getLogger(__name__)

_MOST_REMEMBERED_BYTES = 2**28  # last activations of a run with gradients, in each checkpoint


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


def groups_of(settings: ActiveSettings, data: PartyData) -> CategoricalColumn | None:
    """Return the group of each of this party's rows, for its report; None if it has none."""
    column, own = settings.report.group_column, settings.data
    if column is None or own.num_classes != 2:
        return None
    source = open_source(own.source, settings.base_dir)
    where = f"report.group_column: {source.name}"
    check_columns_exist([column], source.column_names(), where)
    cells = source.read([column])[column]
    written = WrittenColumn(cells, f"{where}: column {column!r}", own.missing_texts(column))
    found = read_categories(written)
    return found if data.kept is None else found._replace(codes=found.codes[data.kept])


class TrainerBuilder:
    """Builds the trainer once the common rows are known, and keeps the encoder fitted on them."""

    @one_at_a_time
    def __init__(
        self,
        settings: ActiveSettings,
        data: PartyData,
        device: torch.device,
        phases: Phases | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.phases = phases
        self._ranks = ranks
        self.encoder: FeatureEncoder | None = None
        self._settings = settings
        self._data = data
        self._device = device
        self._earlier = open_earlier_model(settings)
        self._persons = Persons.of(settings, data)
        self.groups = groups_of(settings, data)
        frozen = getattr(settings.top_model, "frozen", ())
        if frozen or settings.optimizer.rates:
            # Before any id is exchanged: has the model what they name?
            found = data.fit(np.arange(len(data.ids)), self._earlier, bins_of(settings.top_model))
            build_optimizer(settings.optimizer, _fresh_model(settings, found))
        # Now, not at the first step: a key that others can read ends a run before it begins.
        most_rows = 1 if self._persons is None else self._persons.most_rows
        self._context = settings.defense_context(rows_of_person=most_rows)
        settings.defense.require_usable(self._context)
        self._noise_key = settings.defense.open_noise_key(self._context, settings.noise_key_file())

    @property
    def is_label_free(self) -> bool:
        """True if the trained model depends on labels only through what a defense released."""
        began_free = self._earlier is None or self._earlier.is_label_free
        return began_free and self._settings.defense.traits.model_is_label_free

    @one_at_a_time
    def __call__(self, rows: AlignedRows) -> TopTrainer:
        """Build the trainer.

        The peer has chosen its ids, and sees whether the run goes on: that must not depend on the
        labels of the aligned rows.
        """
        settings = self._settings
        if settings.early_stopping_epochs is not None and not len(rows.splits["validation"]):
            raise DataError(
                f"{self._data.table.source}: early_stopping_epochs needs validation rows, and none "
                f"of the aligned ones is"
            )
        labels = self._data.labels_at(rows.file_rows)
        self.encoder, features = self._data.encode(rows, self._earlier, bins_of(settings.top_model))
        digest = self._data.digest(self.encoder, features)
        features = None if features is None else features.to(self._device)
        model = self._model(rows)
        answer_keys = AnswerKeys()
        # Only if noise belongs to ids: many millions of texts take gigabytes.
        with_ids = self._noise_key is not None
        ids = [self._data.ids[row] for row in rows.file_rows] if with_ids else []
        train = rows.splits["train"]
        if self._noise_key is not None and settings.defense.noise_seed is None:
            path, trained = settings.noise_key_file(), [ids[position] for position in train]
            labels[train] = labels_first_used(path, self._noise_key, trained, labels[train])
        is_one_shot = settings.contract.is_one_shot
        remembers = is_one_shot or self._remembers_activations(len(labels))
        training = torch.from_numpy(train) if remembers else None
        persons, whose = None, ""
        if self._persons is not None:
            persons, file_rows = self._persons.names, rows.file_rows[train]
            digest += hashlib.sha256(persons.data).hexdigest()
            ids_of_rows = names_of(ids_at(self._data.ids, file_rows))
            pairs = np.concatenate([ids_of_rows, persons[file_rows]], axis=1)
            whose = hashlib.sha256(np.unique(pairs, axis=0).data).hexdigest()
        secrets = Secrets(self._noise_key, answer_keys, ids, labels, self._device, whose)
        return TopTrainer(
            self._build_objective(model, rows, features, secrets),
            settings.defense.build(self._context, secrets),
            TrainingRows(
                labels,
                features,
                settings.data.num_classes,
                self._example_keys(ids),
                digest,
                "" if self._noise_key is None else key_name(self._noise_key),
                persons,
                self._loss_weights(rows),
                training,
                kind_of(settings.data, labels[train]),
                partial(fitted_top, settings, self.encoder)
                if is_one_shot or settings.refit is not None
                else None,
            ),
            self._device,
            answer_keys,
            self.phases,
            gives_slopes=settings.defense.traits.needs_slopes or _knows_predictions(settings),
        )

    def _remembers_activations(self, num_rows: int) -> bool:
        shape = self._settings.contract.aggregate_shape
        is_small = 4 * num_rows * math.prod(shape) <= _MOST_REMEMBERED_BYTES
        if self._settings.refit is not None and not is_small:
            logger.warning(
                "no top model will be refitted: the activations of %d rows take more than %d MiB",
                num_rows,
                _MOST_REMEMBERED_BYTES // 2**20,
            )
        return self._settings.refit is not None and is_small

    def _model(self, rows: AlignedRows) -> nn.Module:
        settings = self._settings
        none = () if self._ranks is None else (0,)
        trial = Trial((*rows.order.batch_sizes, *none), self._device)
        model = _fresh_model(settings, self.encoder, trial)
        if self._earlier is not None:
            self._earlier.put_into(model)
        model.to(self._device)
        speed_up(model, settings.autocast, compiled=settings.compile)
        return model

    def _example_keys(self, ids: list[str]) -> Tensor | None:
        if self._noise_key is None or not self._settings.defense.traits.needs_example_keys:
            return None
        return example_keys(self._noise_key, ids, GRADIENT_NOISE)

    def _build_objective(
        self,
        model: nn.Module,
        rows: AlignedRows,
        features: Features | None,
        secrets: Secrets,
    ) -> Objective:
        settings, defense = self._settings, self._settings.defense
        total_steps = rows.total_steps(settings.contract)
        top = TopModel(
            model, build_optimizer(settings.optimizer, model), schedule_of(settings, total_steps)
        )
        own = defense.objective(top, secrets)
        if own is not None:
            return own
        objective = OrdinaryObjective(
            top,
            learns_targets=defense.traits.top_learns_targets,
            class_weights=_class_weights(settings, self._device),
            kind=kind_of(settings.data),
        )
        if self._ranks is not None:
            learner = Learner(model, top.optimizer, objective.schedule, self._device)
            shapes = None if self.encoder is None else self.encoder.shapes
            beginning = Beginning(shapes, tuple(settings.contract.aggregate_shape), total_steps)
            train = rows.splits["train"]
            objective.parallel = begin(self._ranks, learner, beginning, features, train)
        return objective

    def _loss_weights(self, rows: AlignedRows) -> LossWeights:
        of_rows = self._data.weights_at(rows)
        on_device = None if of_rows is None else of_rows.to(self._device)
        return LossWeights(on_device, _class_weights(self._settings, self._device))


def schedule_of(settings: ActiveSettings, total_steps: int) -> Schedule:
    return lambda step: settings.contract.schedule.factor(step, total_steps)


def _fresh_model(
    settings: ActiveSettings,
    encoder: FeatureEncoder | FeatureShapes | None,
    trial: Trial | None = None,
) -> nn.Module:
    return build_top_model(
        settings.top_model,
        settings.contract.aggregate_shape,
        encoder,
        seed=settings.model_seed,
        num_classes=settings.data.num_classes,
        trial=trial,
    )


def fitted_top(
    settings: ActiveSettings,
    encoder: FeatureEncoder | None,
    known: KnownRows,
    training: Tensor,
    trained: nn.Module | None = None,
) -> nn.Module:
    """Fit a top model with new weights to the true labels of some rows; nothing of it is sent.

    Returns ``trained`` in its place, if that is given and no worse on a tenth of the rows, which is
    held out.
    """
    contract, refit = settings.contract, settings.refit or RefitSettings()
    fresh = _fresh_model(settings, encoder).to(known.labels.device)
    speed_up(fresh, settings.autocast, compiled=settings.compile)
    fitting = Fitting(
        partial(build_optimizer, settings.optimizer),
        contract.batch_size,
        settings.model_seed,
        refit.epochs,
        contract.schedule.factor,
        refit.boosting,
    )
    found = fit(fresh, known, training, fitting, trained)
    return found if found is trained else settings.defense.predicting(found)


def known_rows(
    settings: ActiveSettings,
    data: PartyData,
    rows: AlignedRows,
    features: Features | None,
    device: torch.device,
) -> KnownRows:
    """Return what this party itself knows of some rows, on a device."""
    labels, of_rows = data.labels_at(rows.file_rows), data.weights_at(rows)
    weights = LossWeights(
        None if of_rows is None else of_rows.to(device), _class_weights(settings, device)
    )
    own = None if features is None else features.to(device)
    kind = kind_of(settings.data, labels[rows.splits["train"]])
    return KnownRows(labels.to(device), own, weights=weights, kind=kind)


def _class_weights(settings: ActiveSettings, device: torch.device) -> Tensor | None:
    weights = settings.data.class_weights
    return None if weights is None else torch.tensor(weights, device=device)


def check_processes(settings: ActiveSettings) -> None:
    """Raise SettingsError if several processes are to train what only one can."""
    if Rank.of_environment().size > 1 and settings.defense.traits.has_own_objective:
        raise SettingsError(
            f"defense: {settings.defense.title} trains more than the top model, and only one "
            f"process computes it"
        )


def learner_of_rank(
    settings: ActiveSettings, device: torch.device, beginning: Beginning
) -> Learner:
    """Return the learner of a rank above 0, which gets no labels, but gradients."""
    model = _fresh_model(settings, beginning.shapes).to(device)
    speed_up(model, settings.autocast, compiled=settings.compile)
    optimizer = build_optimizer(settings.optimizer, model)
    schedule = LambdaLR(optimizer, schedule_of(settings, beginning.total_steps))
    return Learner(model, optimizer, schedule, device)


def _knows_predictions(settings: ActiveSettings) -> bool:
    """Return whether an attack of the leak monitor reads the model's predictions."""
    monitor = settings.leak_monitor
    always = kind_of(settings.data).audited.needs_predictions
    return monitor is not None and (always or monitor.needs_predictions)

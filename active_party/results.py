"""What a run leaves in its folder: models, and the account book of its answers.

checkpoint/model.safetensors      the top model as it was trained
checkpoint/refitted.safetensors   the same, fitted to the true labels afterwards; only for this
                                  party's own predictions, never for another run
checkpoint/alone.safetensors      a model of this party's own features alone, for predictions
                                  while a passive party is away
checkpoint/ledger.safetensors     the account book
checkpoint/targets.safetensors    targets by example, if the defense releases any
checkpoint/test_predictions.safetensors
                                  the last predictions of the test rows, to compare runs
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from splitveil.active_party.ledger.account_book import LEDGER
from splitveil.active_party.ledger.stored_labels import TARGETS, targets_by_id
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.active_party.training.held_out import save_predictions
from splitveil.active_party.training.own_models import Fitting, build_alone, train_alone
from splitveil.active_party.training.predictions import PredictionFigures
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.record.initial_weights import RELEASED_LABELS, TRUE_LABELS
from splitveil.common.record.model_files import (
    ALONE,
    REFITTED,
    delete_saved,
    save_model,
    save_tensors,
)
from splitveil.common.record.trained_model import identity_metadata
from splitveil.common.run.id_rules import rules_as_bytes
from splitveil.common.run.inference import ModelIdentity

logger = logging.getLogger(__name__)


def forget_account(folder: Path) -> None:
    """Delete the account book: from the first answer on, none may pass for the whole account."""
    delete_saved(folder, LEDGER)


def save_results(
    settings: ActiveSettings, folder: Path, session: ActiveSession, builder: TrainerBuilder
) -> PredictionFigures | None:
    """Save the models and the account book of a run that is over, if it had begun to train.

    Returns the refitted model's figures on the test rows; None if it was not fitted.
    """
    trainer = session.trainer
    if trainer is None:
        return None
    learned_from = RELEASED_LABELS if builder.is_label_free else TRUE_LABELS
    result_of = _identity(settings, session)
    saved = save_model(folder, trainer.model, builder.encoder, learned_from | result_of)
    save_tensors(folder, LEDGER, session.account_book().state_dict())
    logger.info("model saved in %s", saved)
    predictions = session.answering.test_predictions
    if predictions is not None:
        save_predictions(folder, session.ids, session.answering.rows, predictions)
    targets = None if trainer.staged is None else trainer.staged.released_targets
    if targets is not None:
        _save_targets(settings, folder, session, targets)
    delete_saved(folder, REFITTED)
    # A run that may resume is not over: its last activations are still to come.
    if session.stage is not Stage.FINISHED or not settings.defense.traits.refits_top:
        return None
    return _refit(settings, folder, session, trainer)


def save_alone(
    settings: ActiveSettings, folder: Path, session: ActiveSession, builder: TrainerBuilder
) -> PredictionFigures | None:
    """Train and save a model of this party's own features alone, if the settings ask for one.

    It learns from true labels: the run is over, and nothing of this model is ever sent.

    Returns its figures on the test rows; None if there is no such model, or there are no test rows.
    """
    delete_saved(folder, ALONE)
    trainer, encoder = session.trainer, builder.encoder
    rows = None if trainer is None else trainer.rows_alone()
    is_wanted = settings.serving.fallback and session.stage is Stage.FINISHED
    if not is_wanted or rows is None or encoder is None:
        return None
    splits = session.answering.rows.splits
    model = train_alone(
        build_alone(encoder, settings.data.num_classes, settings.model_seed),
        rows,
        torch.from_numpy(splits["train"].copy()),
        _fitting(settings),
    )
    metadata = TRUE_LABELS | _identity(settings, session)
    save_tensors(folder, ALONE, model.state_dict(), metadata)
    if not len(splits["test"]):
        return None
    test = torch.from_numpy(splits["test"].copy())
    figures = rows.kind.measure(rows.logits(model, test), rows.labels[test])
    logger.info("this party's own features alone: test %s", figures.in_short)
    return figures


def _identity(settings: ActiveSettings, session: ActiveSession) -> dict[str, str]:
    model = ModelIdentity(session.run_id, session.answering.batch_number)
    return identity_metadata(model, settings.contract)


def _fitting(settings: ActiveSettings) -> Fitting:
    return Fitting(
        lambda model: build_optimizer(settings.optimizer, model),
        settings.contract.batch_size,
        settings.model_seed,
    )


def _save_targets(
    settings: ActiveSettings, folder: Path, session: ActiveSession, targets: Tensor
) -> None:
    rows = session.answering.rows
    training = rows.splits["train"]
    ids = (session.ids[row] for row in rows.file_rows[training])
    of_training = targets[torch.from_numpy(training.copy())]
    rules, bounds = rules_as_bytes(settings.contract.ids), settings.defense_context().label_bounds
    by_id = targets_by_id(ids, of_training, rules, bounds)
    save_tensors(folder, TARGETS, by_id.state_dict())


def _refit(
    settings: ActiveSettings, folder: Path, session: ActiveSession, trainer: TopTrainer
) -> PredictionFigures | None:
    model = trainer.refitted(_fitting(settings))
    if model is None:
        return None
    metadata = TRUE_LABELS | _identity(settings, session)
    save_tensors(folder, REFITTED, model.state_dict(), metadata)
    figures = trainer.measure(model, session.answering.rows.splits["test"])
    if figures is not None:
        logger.info(
            "the top model was fitted to the true labels: test %s; this copy is for this party's "
            "own predictions alone",
            figures.in_short,
        )
    return figures

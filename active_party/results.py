"""The folder of a run: opens it, recognises a finished run, and saves an ending run's results.

checkpoint/model.safetensors      the top model as it was trained
checkpoint/refitted.safetensors   a top model fitted to the true labels afterwards; only for this
                                  party's own predictions, never for another run
checkpoint/activations.safetensors
                                  the last activation of each row, to fit others like it
checkpoint/alone.safetensors      a model of this party's own features only, for predictions
                                  while a passive party is away
checkpoint/ledger.safetensors     the account book
checkpoint/test_predictions.safetensors
                                  the last predictions of the test rows, to compare runs

A run that its budget has ended for good is marked; the same limits never resume it.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from splitveil.active_party.ledger.account_book import LEDGER, Names, names_of
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.active_party.training.boosting import WithTrees
from splitveil.active_party.training.evaluation import measure_groups, save_predictions, score_bins
from splitveil.active_party.training.own_models import Fitting, build_alone, fit
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.alignment.store import ExchangeStores
from splitveil.common.data.stored_ids import ids_at
from splitveil.common.errors import EndedForGood, SettingsError
from splitveil.common.models.device import device_in_words, torch_device
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.party import command_line
from splitveil.common.privacy.figures import Groups, PredictionFigures
from splitveil.common.record import model_files
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.run_folder import clear_mark, end_of, mark_as_ended
from splitveil.common.record.run_record import Summary, provenance_of_process, write_summary
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.run.sample_order import SPLITS
from splitveil.common.text.wording import VERSION

logger = logging.getLogger("splitveil.active_party")

_EPOCHS_ALONE = 50
_ROWS_ALONE = 2**21  # in the epochs after the first: a large table needs few
_ACTIVATIONS = "activations.safetensors"

_WHAT_NOW = (
    "the same command trains nothing; a larger run_budget resumes the run, and "
    "--fresh starts over, which answers about the same labels again (the ledger counts both)"
)


def open_folder(settings: ActiveSettings, *, fresh: bool) -> Path | None:
    """Open the run's folder; None if the run is over."""
    is_over = partial(_is_over, settings)
    folder = command_line.open_folder(settings, ACTIVE, is_over, fresh=fresh)
    if folder is not None and fresh:
        ExchangeStores(folder).discard()
    return folder


def leave_summary(
    settings: ActiveSettings, folder: Path, summary: Summary, stopped: EndedForGood | None
) -> None:
    # A run need not wait for what its report is made with, nor hold it in memory.
    from splitveil.active_party.report import try_to_report  # noqa: PLC0415

    device = device_in_words(torch_device(settings.device))
    summary = replace(summary, version=VERSION, provenance=provenance_of_process(device))
    write_summary(folder, summary)
    if stopped is not None:
        mark_as_ended(folder, {"ended_by": "run_budget", **_limits_of(settings)})
    print_summary("active party", summary)
    logger.info("done: model and summary are in %s; the report follows", folder)
    try_to_report(folder.parent)
    if stopped is not None:
        logger.warning("the run has ended for good: %s", _WHAT_NOW)
        raise stopped


def _limits_of(settings: ActiveSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", include={"run_budget"})


def _is_over(settings: ActiveSettings, folder: Path) -> bool:
    """Return whether the run was ended by limits that are still set; say so."""
    end = end_of(folder)
    if end is None:
        return False
    limits = _limits_of(settings)
    if all(name in end and end[name] == limit for name, limit in limits.items()):
        logger.warning("this run was ended for good by its %s: %s", end["ended_by"], _WHAT_NOW)
        return True
    logger.info("resuming the run in %s, which was ended under other limits", folder)
    clear_mark(folder)
    return False


def forget_account(folder: Path) -> None:
    """Delete the account book: from the first answer on, none may pass for the whole account."""
    model_files.delete_saved(folder, LEDGER)


def fit_after_one_shot(session: ActiveSession, trainer: TopTrainer) -> nn.Module | None:
    """Fit the top model of a one-shot run that has received all rows, and measure it.

    Returns its mean with trees, which is to be the refitted model, if that is better.
    """
    logger.info("fitting the top model to the true labels, without any other party")
    mean = trainer.fit_top()
    for evaluation in session.lifecycle.answering.measure_held_out():
        session.lifecycle.observer.on_evaluation(evaluation)
        logger.info("%s %s", evaluation.split, evaluation.figures.in_short)
    return mean


def save_results(
    settings: ActiveSettings, folder: Path, session: ActiveSession, builder: TrainerBuilder
) -> tuple[PredictionFigures | None, Groups]:
    """Save the results of a run that is over.

    Returns the refitted model's figures, if any, and those by group of the model that predicts.
    """
    trainer = session.lifecycle.trainer
    if trainer is None:
        return None, None
    for stale in (model_files.REFITTED, _ACTIVATIONS):
        model_files.delete_saved(folder, stale)
    is_one_shot, is_over = settings.contract.is_one_shot, session.stage is Stage.FINISHED
    refitted: nn.Module | None = None
    if is_one_shot and is_over:
        refitted = fit_after_one_shot(session, trainer)
    is_label_free = builder.is_label_free and not is_one_shot
    learned_from = model_files.RELEASED_LABELS if is_label_free else model_files.TRUE_LABELS
    with session.lifecycle.stages:  # no handler still at work may charge meanwhile
        book = session.lifecycle.account_book()
    predictions = session.lifecycle.answering.test_predictions
    noise = {} if settings.defense.noise_seed is None else model_files.KNOWN_NOISE
    identity = model_files.identity_metadata(_identity(session), settings.contract)
    said = learned_from | identity | book.as_metadata() | noise
    said |= score_bins(trainer.kind, predictions)
    saved = model_files.save_model(folder, trainer.model, builder.encoder, said)
    model_files.save_tensors(folder, LEDGER, book.state_dict(), noise)
    logger.debug("model saved in %s", saved)
    if predictions is not None:
        save_predictions(folder, session.ids, session.lifecycle.answering.rows, predictions)
    # A run that may resume is not over: its last activations are still to come.
    if is_over and not is_one_shot:
        logger.info("fitting a new top model to the true labels")
        refitted = trainer.refitted()
    if is_over:
        _save_activations(settings, folder, session, trainer)
    rows, figures = session.lifecycle.answering.rows, None
    if refitted is not None:
        tested = trainer.logits(rows.splits["test"], refitted)
        save_refitted(settings, folder, refitted, identity | score_bins(trainer.kind, tested))
        if tested is not None:
            figures = trainer.kind.measure(*tested)
            logger.info(
                "a top model was fitted to the true labels: test %s; it is for this party's own "
                "predictions only",
                figures.in_short,
            )
            if settings.inference.model != "trained":
                predictions = tested
    of_test = rows.file_rows[rows.splits["test"]]
    return figures, measure_groups(builder.groups, of_test, predictions)


def save_alone(
    settings: ActiveSettings, folder: Path, session: ActiveSession, builder: TrainerBuilder
) -> PredictionFigures | None:
    """Train and save a model of this party's own features only, if the settings ask for one.

    It learns from true labels: the run is over, and nothing of this model is ever sent.
    """
    model_files.delete_saved(folder, model_files.ALONE)
    trainer, encoder = session.lifecycle.trainer, builder.encoder
    rows = None if trainer is None else trainer.rows_alone()
    is_wanted = settings.serving.fallback and session.stage is Stage.FINISHED
    if not is_wanted or rows is None or encoder is None:
        return None
    splits = session.lifecycle.answering.rows.splits
    logger.info("training a model of this party's own features only")
    # The rates are about modules of the top model.
    optimizer = settings.optimizer.model_copy(update={"rates": {}})
    model = fit(
        build_alone(encoder, settings.data.num_classes, settings.model_seed),
        rows,
        torch.from_numpy(splits["train"].copy()),
        Fitting(
            partial(build_optimizer, optimizer),
            settings.contract.batch_size,
            settings.model_seed,
            min(_EPOCHS_ALONE, 1 + _ROWS_ALONE // len(splits["train"])),
        ),
    )
    identity = model_files.identity_metadata(_identity(session), settings.contract)
    metadata = model_files.TRUE_LABELS | identity
    model_files.save_tensors(folder, model_files.ALONE, model.state_dict(), metadata)
    figures = rows.measure(model, splits["test"])
    if figures is not None:
        logger.info("this party's own features only: test %s", figures.in_short)
    return figures


def _identity(session: ActiveSession) -> ModelIdentity:
    return ModelIdentity(session.run_id, session.lifecycle.batch_number)


def save_refitted(
    settings: ActiveSettings, folder: Path, model: nn.Module, of_run: dict[str, str]
) -> None:
    """Save a run's model that was fitted to true labels, and the settings that build it."""
    built_by = {model_files.TOP_MODEL: settings.top_model.model_dump_json()}
    for part in model.modules():
        if isinstance(part, WithTrees):
            built_by[model_files.TREES] = part.sizes
    metadata = model_files.TRUE_LABELS | of_run | built_by
    model_files.save_tensors(folder, model_files.REFITTED, model.state_dict(), metadata)


def _save_activations(
    settings: ActiveSettings, folder: Path, session: ActiveSession, trainer: TopTrainer
) -> None:
    rows = session.lifecycle.answering.rows
    if trainer.memory is None:
        return
    of_split = torch.empty(len(rows), dtype=torch.uint8)
    for number, name in enumerate(SPLITS):
        of_split[torch.from_numpy(rows.splits[name].copy())] = number
    tensors = {
        "names": torch.from_numpy(names_of(ids_at(session.ids, rows.file_rows)).copy()),
        "splits": of_split,
        "activations": trainer.memory.at(torch.arange(len(rows))),
    }
    metadata = model_files.identity_metadata(_identity(session), settings.contract)
    model_files.save_tensors(folder, _ACTIVATIONS, tensors, metadata)


def read_activations(
    folder: Path, of_run: Mapping[str, str]
) -> tuple[Names, NDArray[np.uint8], Tensor]:
    """Return names, splits and last activations of a run's rows, in the common order.

    ``of_run`` is the metadata of the run's model. Raises SettingsError.
    """
    path = folder / "checkpoint" / _ACTIVATIONS
    said = model_files.metadata_of(path.parent, _ACTIVATIONS, "refit")
    if not of_run.items() >= said.items():
        raise SettingsError(f"{path}: expected the activations of the run whose model is there")
    try:
        found = load_file(path)
        return found["names"].numpy(), found["splits"].numpy(), found["activations"]
    except (OSError, SafetensorError, KeyError) as error:
        raise SettingsError(f"{path}: the activations of the run cannot be read") from error

"""``splitveil run passive.yaml``: trains with the active party, or resumes an unfinished run."""

import argparse
import logging
import secrets
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from splitveil.common.alignment.buckets import padded_size
from splitveil.common.errors import ContractMismatch, PeerEndedForGood, PeerError
from splitveil.common.party import command_line
from splitveil.common.party.endpoint import serving_status
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_status import RunStatus
from splitveil.common.party.process import Process, run_as_party
from splitveil.common.record.run_folder import end_of, open_run_folder
from splitveil.common.record.run_record import Summary, provenance_of_process, write_summary
from splitveil.common.record.run_store import RunStore
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.text.version import VERSION
from splitveil.passive_party import assembly
from splitveil.passive_party.commands.results import (
    leave_summary,
    try_to_measure,
    try_to_measure_run,
    try_to_report,
)
from splitveil.passive_party.connecting import ENDED, Connect, checked_connection, was_ended
from splitveil.passive_party.feature_exposure import Sample
from splitveil.passive_party.opening import Aligner
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger("splitveil.passive_party")


def run(parsed: argparse.Namespace) -> None:
    """Train with the active party, or resume a run; a rank above 0 computes with rank 0."""
    settings: PassiveSettings = parsed.loaded
    train = partial(_take_part, fresh=parsed.fresh)
    run_as_party(settings, ("bottom_model", "adversary"), assembly.learner_of_rank, train)


def _take_part(settings: PassiveSettings, process: Process, *, fresh: bool) -> None:
    take_part = _fit if settings.contract.is_one_sided else _train
    connect = checked_connection(settings)
    assembly.check_named_code(settings)
    status = RunStatus(settings.party, settings.contract)
    with serving_status(status, settings.status, process.interruption):
        take_part(settings, connect, process, status, fresh=fresh and not process.restarts)


def _fit(
    settings: PassiveSettings,
    _connect: Connect,
    process: Process,
    status: RunStatus,
    *,
    fresh: bool,
) -> None:
    """Fit the bottom model to the whole table, which ``splitveil serve`` then offers."""
    contract = settings.contract
    data = PartyData.of(settings)
    padded_size(len(data.ids), 1, contract.alignment.max_set_size)
    folder = _open_folder(settings, process, fresh=fresh)
    if folder is None:
        return
    rows = AlignedRows.of_whole_table(contract, len(data.ids))
    builder = assembly.BottomBuilder(settings, data, process.device, process.ranks)
    with PassiveRecorder(settings, folder, data.ids, None, status):
        trainer = builder(rows)
        builder.save(folder, trainer.model, ModelIdentity(secrets.token_hex(8), 0))
    provenance = provenance_of_process(process.device_in_words)
    write_summary(folder, Summary(version=VERSION, provenance=provenance))
    logger.info("done: the bottom model is fitted to %s rows; the report follows", f"{len(rows):,}")
    if builder.encoder is not None:
        sample = Sample.draw(np.arange(trainer.num_rows))
        try_to_measure(folder, trainer, builder.encoder, len(data.ids), sample, settings=settings)
    try_to_report(folder)
    logger.info("next: splitveil serve FILE, from which the active party takes the sealed table")


def _open_folder(settings: PassiveSettings, process: Process, *, fresh: bool) -> Path | None:
    """Open the run's folder; None if the run is over."""
    process.interruption.check()
    folder = open_run_folder(
        settings.runs_dir,
        settings.contract.run_name,
        settings.folder_name(),
        lambda folder: command_line.takes_up(settings, fresh=fresh, folder=folder),
    )
    if was_ended(settings, folder, process.interruption):
        return None
    command_line.save_resolved(settings, folder)
    return folder


def _train(
    settings: PassiveSettings,
    connect: Connect,
    process: Process,
    status: RunStatus,
    *,
    fresh: bool,
) -> None:
    data, device, interruption = (
        PartyData.of(settings),
        process.device_in_words,
        process.interruption,
    )
    ids = data.table.id_report.in_words()
    read = (f"{len(data.ids):,}", data.table.source, ids, device)
    logger.info("%s rows read from %s, %s, device %s", *read)
    labels = assembly.evaluation_labels(settings)
    folder = _open_folder(settings, process, fresh=fresh)
    if folder is None:
        return
    aligner = Aligner.of(settings, data, folder, fresh=fresh)
    build_trainer = assembly.BottomBuilder(settings, data, process.device, process.ranks)
    with ExitStack() as resources:
        wanted = Transcript(folder, settings.party) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        recorder = resources.enter_context(
            PassiveRecorder(settings, folder, data.ids, labels, status)
        )
        store = resources.enter_context(RunStore(folder, in_background=True))
        run = PassiveRun(
            aligner,
            build_trainer,
            recorder,
            store,
            interruption,
            status.phases,
        )
        stopped: PeerEndedForGood | None = None
        try:
            with connect(transcript, status, interruption) as peer:
                status.enter_stage("waiting")
                status.set_ready("waiting for the active party", ready=False)
                run.run(peer)
        except PeerEndedForGood as error:
            stopped = error  # it ends with a summary, like any other run
        except (PeerError, ContractMismatch) as error:
            if end_of(folder) is None:
                raise
            logger.warning("the active party does not resume this run: %s", error)
        finally:
            # A run that has ended for good and is not resumed keeps the model that it ended with.
            if run.trainer is not None and end_of(folder) is None:
                build_trainer.save(folder, run.trainer.model, run.model_identity)
    if end_of(folder) is not None:
        logger.warning(ENDED)
        return
    found = recorder.summary(getattr(run.trainer, "feature_values", None))
    leave_summary(folder, found, transcript, stopped, device)
    try_to_measure_run(folder, run, build_trainer.encoder, len(data.ids), recorder, settings)
    try_to_report(folder)
    if stopped is not None:
        raise stopped
    aligner.tried.forget()
    store.forget_finished()  # last: a process that ends before this does not train from scratch

"""``splitveil run passive.yaml``: trains with the active party, or resumes an unfinished run."""

import argparse
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from splitveil.common.alignment.buckets import padded_size
from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import ContractMismatch, PeerEndedForGood, PeerError, SplitveilError
from splitveil.common.party import command_line
from splitveil.common.party.command_line import Process, run_as_party
from splitveil.common.party.endpoint import serving_status
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_folder import end_of, mark_as_ended
from splitveil.common.record.run_record import Summary, provenance_of_process, write_summary
from splitveil.common.record.run_store import RunStore
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.run.progress import Phases
from splitveil.common.text.wording import VERSION
from splitveil.common.wire.connection import FIRST_WAIT_S
from splitveil.passive_party import assembly
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.exposure_plan import remedy_of
from splitveil.passive_party.feature_exposure import Sample, SentInEpochs, measure_exposure
from splitveil.passive_party.grpc_peer import Connect, checked_connection, idle_peer
from splitveil.passive_party.information_value import information_values, losses
from splitveil.passive_party.opening import Aligner
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger("splitveil.passive_party")


_BACK_WITHIN_S = 15.0
"""Time limit for the active party to serve again after it ended a run for good."""

_ENDED = (
    "the active party has ended this run for good, and nothing is trained; --fresh starts over "
    "once the active party does"
)


def run(parsed: argparse.Namespace) -> bool:
    """Train with the active party, or resume a run; return whether it was ended for good.

    A rank above 0 computes with rank 0.
    """
    settings: PassiveSettings = parsed.loaded
    train = partial(_take_part, fresh=parsed.fresh)
    learner_of_rank: Any = None
    if settings.has_network:
        from splitveil.passive_party.bottom_trainer import learner_of_rank  # noqa: PLC0415
    run_as_party(settings, ("bottom_model", "adversary"), learner_of_rank, train)
    return end_of(settings.run_folder(settings.folder_name())) is not None


def _take_part(settings: PassiveSettings, process: Process, *, fresh: bool) -> None:
    connect, interruption = checked_connection(settings), process.interruption
    open_earlier_model(settings)
    if settings.adversary is not None:
        from splitveil.common.privacy.custom_attacks import try_custom_attacks  # noqa: PLC0415

        try_custom_attacks(settings.adversary, settings.contract.cut_shape)
    status = RunStatus(settings.party, settings.contract)
    with serving_status(status, settings.status, interruption):
        data = command_line.read_data(settings, process)
        if is_one_sided := settings.contract.is_one_sided:
            padded_size(len(data.ids), 1, settings.contract.alignment.max_set_size)
        labels = None if is_one_sided else assembly.evaluation_labels(settings)
        interruption.check()
        fresh = fresh and not process.restarts
        is_over = partial(_is_over, settings, interruption)
        name = settings.folder_name()
        folder = command_line.open_folder(settings, name, is_over, fresh=fresh)
        if folder is not None and is_one_sided:
            _fit(settings, data, folder, process, status)
        elif folder is not None:
            aligner = Aligner.of(settings, data, folder, fresh=fresh)
            _train(settings, data, labels, folder, aligner, connect, process, status)


def _fit(
    settings: PassiveSettings, data: PartyData, folder: Path, process: Process, status: RunStatus
) -> None:
    """Fit the bottom model to the whole table, which ``splitveil serve`` then offers."""
    rows = AlignedRows.of_whole_table(settings.contract, len(data.ids))
    builder = assembly.BottomBuilder(settings, data, process.device, process.ranks)
    with PassiveRecorder(settings, folder, data.ids, None, status):
        trainer = builder(rows)
        builder.save(folder, trainer.model, ModelIdentity(secrets.token_hex(8), 0))
    provenance = provenance_of_process(process.device_in_words)
    write_summary(folder, Summary(version=VERSION, provenance=provenance))
    logger.info("done: the bottom model is fitted to %s rows; the report follows", f"{len(rows):,}")
    sample = Sample.draw(np.arange(trainer.num_rows))
    try_to_measure(folder, trainer, builder.encoder, len(data.ids), sample, settings=settings)
    try_to_report(folder)
    logger.info("next: splitveil serve FILE, from which the active party takes the sealed table")


def _is_over(settings: PassiveSettings, interruption: Interruption, folder: Path) -> bool:
    """Return whether the run was ended for good, and nobody is back; say so."""
    if end_of(folder) is None:
        return False
    until = time.monotonic() + min(_BACK_WITHIN_S, settings.reconnect.max_s)
    with idle_peer(settings) as peer:
        while time.monotonic() < until:
            interruption.check()
            with suppress(PeerError):
                if peer.is_ready():
                    return False
            time.sleep(FIRST_WAIT_S)
    logger.warning("no active party answers at %s; %s", settings.connect, _ENDED)
    return True


@contextmanager
def taking_part(
    folder: Path,
    aligner: Aligner,
    builder: assembly.BottomBuilder,
    recorder: PassiveRecorder,
    store: RunStore | None = None,
    interruption: Callable[[], int | None] = lambda: None,
    phases: Phases | None = None,
) -> Iterator[PassiveRun]:
    """Yield a run, over any link to the active party; its model is saved in the end."""
    run = PassiveRun(aligner, builder, recorder, store, interruption, phases)
    try:
        yield run
    finally:
        # A run that has ended for good and is not resumed keeps the model that it ended with.
        if run.trainer is not None and end_of(folder) is None:
            builder.save(folder, run.trainer.model, run.model_identity)


def _train(
    settings: PassiveSettings,
    data: PartyData,
    labels: PartyData | None,
    folder: Path,
    aligner: Aligner,
    connect: Connect,
    process: Process,
    status: RunStatus,
) -> None:
    builder = assembly.BottomBuilder(settings, data, process.device, process.ranks)
    with ExitStack() as resources:
        wanted = Transcript(folder, settings.party) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        recorder = resources.enter_context(
            PassiveRecorder(settings, folder, data.ids, labels, status)
        )
        store = resources.enter_context(RunStore(folder, in_background=True))
        interruption, phases = process.interruption, status.phases
        run = resources.enter_context(
            taking_part(folder, aligner, builder, recorder, store, interruption, phases)
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
    if end_of(folder) is not None:
        logger.warning(_ENDED)
        return
    found = recorder.summary(getattr(run.trainer, "feature_values", None))
    leave_summary(folder, found, transcript, stopped, process.device_in_words)
    sample, sent = recorder.sample, recorder.sent_in_epochs()
    try_to_measure(folder, run.trainer, builder.encoder, len(data.ids), sample, sent, settings)
    try_to_report(folder)
    if stopped is not None:
        raise stopped
    aligner.tried.forget()
    store.forget_finished()  # last: a process that ends before this does not train from scratch


def try_to_measure(
    folder: Path,
    trainer: ComponentsTrainer | None,
    encoder: FeatureEncoder | None,
    own_rows: int,
    sample: Sample | None,
    of_epochs: SentInEpochs | None = None,
    settings: PassiveSettings | None = None,
) -> None:
    """Write what activations reveal, and with settings what fewer numbers would have revealed."""
    from splitveil.passive_party.report_page import write_exposure  # noqa: PLC0415

    if trainer is None or encoder is None:
        return
    what = "what the activations reveal of the features"
    try:
        with ProgressBar("measuring what the columns have given away"):
            found = measure_exposure(trainer, encoder, own_rows, sample, of_epochs)
            if found is not None and sample is not None and settings is not None:
                found = replace(found, remedy=remedy_of(settings, trainer, encoder, sample, found))
        if found is not None:
            write_exposure(folder, found)
            # By itself: no release that the peer makes up may keep the rest from being written.
            what = "information values of the columns"
            found = replace(found, values=information_values(trainer, encoder))
            write_exposure(folder, found)
            what = "what is lost without a column"
            write_exposure(folder, replace(found, losses=losses(trainer, encoder)))
    except SplitveilError as error:  # a full disk needs no traceback
        logger.error("%s", error)
    except Exception:
        logger.exception("%s could not be measured", what)


def try_to_report(folder: Path) -> None:
    # A run need not wait for what its report is made with, nor hold it in memory.
    from splitveil.passive_party.report_page import write_passive_report  # noqa: PLC0415

    try:
        logger.info("report written to %s", write_passive_report(folder))
    except SplitveilError as error:
        logger.error("%s; once the cause is gone: splitveil report %s", error, folder)
    except Exception:
        logger.exception("the report could not be written: splitveil report %s", folder)


def leave_summary(
    folder: Path,
    recorded: Summary,
    transcript: Transcript | None,
    stopped: PeerEndedForGood | None,
    device: str,
) -> None:
    """Write and print the figures: what is measured and reported afterwards may take longer."""
    summary = replace(
        recorded,
        transcript=None if transcript is None else transcript.summary(),
        version=VERSION,
        provenance=provenance_of_process(device),
    )
    write_summary(folder, summary)
    if stopped is not None:
        mark_as_ended(folder, {"ended_by": "the active party"})
    print_summary("passive party", summary)
    logger.info("done: model and summary are in %s; the report follows", folder)

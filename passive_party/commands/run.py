"""``splitveil passive run``: trains with the active party, or resumes an unfinished run."""

import argparse
import logging
import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from splitveil.common.errors import ContractMismatch, PeerEndedForGood, PeerError
from splitveil.common.models.data_parallel import work
from splitveil.common.models.device import device_in_words
from splitveil.common.models.ranks import Ranks
from splitveil.common.party import command_line
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.party.endpoint import serving_status
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.party.party_status import RunStatus
from splitveil.common.party.workers import Rank, facts_of, joined
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.record.model_files import identity_metadata, save_model
from splitveil.common.record.run_folder import end_of, open_run_folder
from splitveil.common.record.run_store import RunStore
from splitveil.common.record.transcript import Transcript
from splitveil.passive_party.assembly import (
    BottomBuilder,
    build_aligner,
    build_peer,
    checked_credentials,
    evaluation_labels,
    idle_peer,
    learner_of_rank,
)
from splitveil.passive_party.commands.results import leave_results, try_to_measure
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger("splitveil.passive_party")

BACK_WITHIN_S = 15.0
"""Time in which the active party of a run that it has ended for good has to serve again."""


_ENDED = (
    "the active party has ended this run for good, and nothing is trained; --fresh starts over "
    "once the active party does"
)


def run(parsed: argparse.Namespace) -> None:
    """Train with the active party, or resume a run; a rank above 0 computes with rank 0."""
    settings = command_line.load_settings(PassiveSettings, parsed, "passive")
    rank = Rank.of_environment()
    device = command_line.prepare(settings, rank)
    facts = facts_of(settings, device, "bottom_model", "adversary")
    interruption = Interruption()
    if not rank.number:
        interruption.install()
    with joined(rank, device, facts, interruption) as ranks:
        if ranks is not None and rank.number:
            work(ranks, partial(learner_of_rank, settings, device))
            return
        credentials = checked_credentials(settings)
        open_earlier_model(settings)
        try_custom_attacks(settings.adversary, settings.contract.cut_shape)
        status = RunStatus(settings.party, settings.contract)
        with serving_status(status, settings.status, interruption):
            fresh = parsed.fresh and not rank.restarts
            _train(settings, credentials, interruption, status, device, ranks, fresh=fresh)


def _train(
    settings: PassiveSettings,
    credentials: CredentialFiles | None,
    interruption: Interruption,
    status: RunStatus,
    device: torch.device,
    ranks: Ranks | None,
    *,
    fresh: bool,
) -> None:
    data = PartyData.of(settings)
    logger.info(
        "%d rows read from %s, device %s", len(data.ids), data.table.source, device_in_words(device)
    )
    labels = evaluation_labels(settings)
    interruption.check()
    folder = open_run_folder(
        settings.runs_dir,
        settings.contract.run_name,
        settings.folder_name(),
        lambda folder: command_line.takes_up(settings, fresh=fresh, folder=folder),
    )
    if _was_ended(settings, folder, interruption):
        return
    command_line.save_resolved(settings, folder)
    aligner = build_aligner(settings, data, folder, fresh=fresh)
    build_trainer = BottomBuilder(settings, data, device, ranks)
    with ExitStack() as resources:
        wanted = Transcript(folder, settings.party) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        recorder = resources.enter_context(
            PassiveRecorder(settings, folder, data.ids, labels, status)
        )
        keep = settings.contract.checkpoints.keep
        store = resources.enter_context(RunStore(folder, keep, in_background=True))
        run = PassiveRun(
            aligner,
            build_trainer,
            recorder,
            store,
            recorder if settings.audits else None,
            interruption,
            status.phases,
        )
        stopped: PeerEndedForGood | None = None
        try:
            with build_peer(settings, credentials, transcript, status, interruption) as peer:
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
                identity = identity_metadata(run.model_identity, settings.contract)
                saved = save_model(folder, run.trainer.model, build_trainer.encoder, identity)
                logger.debug("model saved in %s", saved)
    if end_of(folder) is not None:
        logger.warning(_ENDED)
        return
    if run.trainer is not None and build_trainer.encoder is not None:
        try_to_measure(settings.report, folder, run.trainer, build_trainer.encoder, len(data.ids))
    features = None if run.trainer is None else run.trainer.feature_values
    leave_results(folder, recorder.summary(features), transcript, stopped, device_in_words(device))
    aligner.tried.forget()
    store.forget_finished()  # last: a process that ends before this does not train from scratch


def _was_ended(settings: PassiveSettings, folder: Path, interruption: Interruption) -> bool:
    if command_line.is_finished(folder):
        return True
    if end_of(folder) is None or _peer_is_back(settings, interruption):
        return False
    logger.warning("no active party answers at %s; %s", settings.connect, _ENDED)
    return True


def _peer_is_back(settings: PassiveSettings, interruption: Interruption) -> bool:
    until = time.monotonic() + min(BACK_WITHIN_S, settings.reconnect.max_s)
    with idle_peer(settings) as peer:
        while time.monotonic() < until:
            interruption.check()
            with suppress(PeerError):
                if peer.is_ready():
                    return True
            time.sleep(settings.reconnect.first_wait_s)
    return False

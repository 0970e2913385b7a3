"""The command ``splitveil passive align``."""

import argparse
import logging
from contextlib import ExitStack, nullcontext
from functools import partial

from splitveil.common.alignment import engine_of, records_of
from splitveil.common.party import command_line
from splitveil.common.party.aligned_table import (
    FOLDER,
    aligning,
    check_outputs,
    print_aligned,
    read_own_ids,
    write_aligned,
)
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.transcript import Transcript
from splitveil.common.record.alignment_progress import AlignmentProgress
from splitveil.common.run.common_order import CommonOrder
from splitveil.common.status.endpoint import check_free, serving_status
from splitveil.common.status.run_status import RunStatus
from splitveil.common.storage.run_folder import open_run_folder
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import check_security
from splitveil.common.wire.noted_calls import AllNotes
from splitveil.passive_party.aligning import AlignmentObserver, AlignmentRun
from splitveil.passive_party.assembly import http_proxy
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.settings import PassiveSettings
from splitveil.passive_party.status_observer import WatchedCalls

logger = logging.getLogger(__name__)


def align(parsed: argparse.Namespace) -> None:
    """Find the common rows with the active party, and write this party's.

    Raises:
        SplitveilError: settings or data cannot be used, the active party cannot be reached, or the
            parties have too few ids in common.
    """
    interruption = Interruption()
    interruption.install()
    settings = aligning(command_line.load_settings(PassiveSettings, parsed, "passive"))
    check_outputs(settings, parsed.output)
    credentials = credential_files(settings, settings.party)
    security = check_security(credentials, settings.connect, "connect")
    logger.log(logging.WARNING if credentials is None else logging.INFO, "security: %s", security)
    http_proxy(settings)
    check_free(settings.status)
    own = read_own_ids(settings)
    logger.info("%d ids read from %s", len(own.data.ids), own.data.table.source)
    interruption.check()
    status = RunStatus(settings.party, settings.contract)
    with (
        AlignmentProgress(settings.party) as progress,
        serving_status(status, settings.status, interruption),
    ):
        order = _find_common_order(settings, own.data, status, progress, interruption)
    print_aligned(write_aligned(settings, own, order, parsed.output), as_json=parsed.json)


def _find_common_order(
    settings: PassiveSettings,
    data: PartyData,
    status: RunStatus,
    progress: AlignmentProgress,
    interruption: Interruption,
) -> CommonOrder:
    contract = settings.contract
    folder = open_run_folder(settings.runs_dir / contract.run_name, FOLDER, settings.folder_name())
    command_line.save_resolved(settings, folder)
    kept, tried = records_of(settings, folder)
    aligner = Aligner(
        Participant(contract, settings.party, data.ids, data.table.splits),
        engine_of(settings, len(data.ids)),
        partial(command_line.draw_nonce, settings),
        tried,
        kept,
    )

    def show(done_ids: int, total_ids: int) -> None:
        status.enter_stage("aligning")
        status.note_alignment(done_ids, total_ids)
        progress.note(done_ids, total_ids)

    with ExitStack() as resources:
        resources.callback(aligner.engine.close)
        wanted = Transcript(folder, settings.party) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        connection = PeerConnection(
            settings.connect,
            contract,
            credential_files(settings, settings.party),
            status if transcript is None else AllNotes(transcript, status),
            http_proxy(settings),
        )
        peer = resources.enter_context(
            GrpcPeer(
                connection, settings.reconnect, interruption, settings.party, WatchedCalls(status)
            )
        )
        status.enter_stage("waiting")
        run = AlignmentRun(aligner, AlignmentObserver(status.name_run, show), interruption)
        run.run(peer)
    kept.discard()
    aligner.tried.forget()
    return run.common_order()

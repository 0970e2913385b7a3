"""``splitveil passive align``: finds the rows that all parties have, without training."""

import argparse
import logging
from contextlib import ExitStack, nullcontext

from splitveil.common.party import command_line
from splitveil.common.party.aligned_table import (
    FOLDER,
    aligning,
    check_outputs,
    print_aligned,
    read_own_ids,
    write_aligned,
)
from splitveil.common.party.endpoint import serving_status
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.progress import CountProgress
from splitveil.common.record.run_folder import open_run_folder
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.sample_order import CommonOrder
from splitveil.passive_party.aligning import AlignmentObserver, AlignmentRun
from splitveil.passive_party.connecting import Connect, checked_connection
from splitveil.passive_party.opening import Aligner
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger(__name__)


def align(parsed: argparse.Namespace) -> None:
    interruption = Interruption()
    interruption.install()
    settings = aligning(parsed.loaded)
    check_outputs(settings, parsed.output, positions=parsed.positions)
    connect = checked_connection(settings)
    own = read_own_ids(settings)
    logger.info("%d ids read from %s", len(own.data.ids), own.data.table.source)
    interruption.check()
    status = RunStatus(settings.party, settings.contract)
    with (
        CountProgress(f"{settings.party}: aligning") as progress,
        serving_status(status, settings.status, interruption),
    ):
        order = _find_common_order(settings, own.data, connect, status, progress, interruption)
    written = write_aligned(settings, own, order, parsed.output, positions=parsed.positions)
    print_aligned(written, as_json=parsed.json)


def _find_common_order(
    settings: PassiveSettings,
    data: PartyData,
    connect: Connect,
    status: RunStatus,
    progress: CountProgress,
    interruption: Interruption,
) -> CommonOrder:
    contract = settings.contract
    folder = open_run_folder(settings.runs_dir / contract.run_name, FOLDER, settings.folder_name())
    command_line.save_resolved(settings, folder)
    aligner = Aligner.of(settings, data, folder)

    def show(done_ids: int, total_ids: int) -> None:
        status.enter_stage("aligning")
        status.note_alignment(done_ids, total_ids)
        progress.note(done_ids, total_ids)

    with ExitStack() as resources:
        wanted = Transcript(folder, settings.party) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        peer = resources.enter_context(connect(transcript, status, interruption))
        status.enter_stage("waiting")
        run = AlignmentRun(aligner, AlignmentObserver(status.name_run, show), interruption)
        run.run(peer)
    aligner.forget()
    return run.common_order()

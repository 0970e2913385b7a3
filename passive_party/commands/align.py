"""``splitveil align passive.yaml``: finds the rows that all parties have, without training."""

import argparse
from pathlib import Path

from splitveil.common.party import aligned_table
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.sample_order import CommonOrder
from splitveil.passive_party.aligning import AlignmentObserver, AlignmentRun
from splitveil.passive_party.connecting import checked_connection
from splitveil.passive_party.opening import Aligner
from splitveil.passive_party.settings import PassiveSettings


def align(parsed: argparse.Namespace) -> None:
    aligned_table.align(parsed, _alignment_of)


def _alignment_of(settings: PassiveSettings) -> aligned_table.Alignment:
    connect, status = checked_connection(settings), RunStatus(settings.party, settings.contract)

    def show(done_ids: int, total_ids: int) -> None:
        status.enter_stage("aligning")
        status.note_alignment(done_ids, total_ids)

    def find(
        data: PartyData, folder: Path, transcript: Transcript | None, interruption: Interruption
    ) -> CommonOrder:
        aligner = Aligner.of(settings, data, folder)
        run = AlignmentRun(aligner, AlignmentObserver(status.name_run, show), interruption)
        with connect(transcript, status, interruption) as peer:
            status.enter_stage("waiting")
            run.run(peer)
        aligner.forget()
        return run.common_order()

    return aligned_table.Alignment(settings.folder_name(), status, find)

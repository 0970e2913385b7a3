"""``splitveil active align``: finds the rows that all parties have, without training."""

import argparse
import logging
from contextlib import nullcontext
from functools import partial

from splitveil.active_party.grpc_server.server import Serve, checked_server
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.run.aligning import AlignmentSession
from splitveil.active_party.run.preparation import OwnRows
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party import aligned_table, command_line
from splitveil.common.party.endpoint import check_free, serving_status
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.progress import CountProgress
from splitveil.common.record.run_folder import open_run_folder
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.sample_order import CommonOrder

logger = logging.getLogger(__name__)


def align(parsed: argparse.Namespace) -> None:
    interruption = Interruption()
    interruption.install()
    settings = aligned_table.aligning(parsed.loaded)
    aligned_table.check_outputs(settings, parsed.output, positions=parsed.positions)
    serve = checked_server(settings)
    check_free(settings.status)
    own = aligned_table.read_own_ids(settings)
    logger.info("%d ids read from %s", len(own.data.ids), own.data.table.source)
    interruption.check()
    with CountProgress(f"{ACTIVE}: aligning") as progress:
        status = _ShownStatus(settings, progress)
        with serving_status(status, settings.status, interruption):
            order = _find_common_order(settings, own.data, serve, status, interruption)
    written = aligned_table.write_aligned(
        settings, own, order, parsed.output, positions=parsed.positions
    )
    aligned_table.print_aligned(written, as_json=parsed.json)


def _find_common_order(
    settings: ActiveSettings,
    data: PartyData,
    serve: Serve,
    status: ActiveStatus,
    interruption: Interruption,
) -> CommonOrder:
    contract = settings.contract
    folder = open_run_folder(settings.runs_dir / contract.run_name, aligned_table.FOLDER, ACTIVE)
    command_line.save_resolved(settings, folder)
    draw_nonce = partial(command_line.draw_nonce, settings)
    session = AlignmentSession(contract, OwnRows(data.ids, data.table.splits), draw_nonce)
    wanted = Transcript(folder, ACTIVE) if settings.transcript else nullcontext()
    with wanted as transcript:
        _, _, forget = serve(session, data, folder, transcript, status, interruption)
    forget()
    return session.common_order()


class _ShownStatus(ActiveStatus):
    """The state of an alignment for its operators, shown as a bar as well."""

    def __init__(self, settings: ActiveSettings, progress: CountProgress) -> None:
        super().__init__(settings)
        # With several passive parties at a time, a single bar would jump between them.
        self._progress = progress if len(settings.contract.passive_parties) == 1 else None

    def note_alignment(self, done_ids: int, total_ids: int) -> None:
        super().note_alignment(done_ids, total_ids)
        if self._progress is not None:
            self._progress.note(done_ids, total_ids)

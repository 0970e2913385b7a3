"""The command ``splitveil active align``."""

import argparse
import logging
from contextlib import ExitStack, nullcontext
from functools import partial

from splitveil.active_party.run.aligning import AlignmentSession
from splitveil.active_party.run.preparation import OwnRows
from splitveil.active_party.serving.server import start_server
from splitveil.active_party.serving.service import ActiveService
from splitveil.active_party.serving.supervisor import wait_for_end
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.watch.active_status import ActiveStatus
from splitveil.common.alignment import engine_of, records_of
from splitveil.common.data.id_forms import form_of
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
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.run.sample_order import CommonOrder
from splitveil.common.status.endpoint import check_free, serving_status
from splitveil.common.storage.run_folder import open_run_folder
from splitveil.common.wire.endpoint import check_security
from splitveil.common.wire.noted_calls import AllNotes
from splitveil.common.wire.probes import ProbeDesk

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
_LAST_WORDS_S = 2.0


def align(parsed: argparse.Namespace) -> None:
    """Find the common rows with all passive parties, and write this party's.

    Raises:
        SplitveilError: settings or data cannot be used, or the parties have too few ids in common.
    """
    interruption = Interruption()
    interruption.install()
    settings = aligning(command_line.load_settings(ActiveSettings, parsed, "active"))
    check_outputs(settings, parsed.output)
    security = check_security(credential_files(settings, ACTIVE), settings.listen, "listen")
    level = logging.INFO if settings.security.mode == "mtls" else logging.WARNING
    logger.log(level, "security: %s", security)
    check_free(settings.status)
    own = read_own_ids(settings)
    logger.info("%d ids read from %s", len(own.data.ids), own.data.table.source)
    interruption.check()
    with AlignmentProgress(ACTIVE) as progress:
        status = _ShownStatus(settings, progress)
        with serving_status(status, settings.status, interruption):
            order = _find_common_order(settings, own.data, status, interruption)
    print_aligned(write_aligned(settings, own, order, parsed.output), as_json=parsed.json)


def _find_common_order(
    settings: ActiveSettings, data: PartyData, status: ActiveStatus, interruption: Interruption
) -> CommonOrder:
    """Serve one alignment until every passive party has left."""
    contract = settings.contract
    folder = open_run_folder(settings.runs_dir / contract.run_name, FOLDER, ACTIVE)
    command_line.save_resolved(settings, folder)
    kept, tried = records_of(settings, folder)
    engine = engine_of(settings, len(data.ids))
    with ExitStack() as resources:
        resources.callback(engine.close)
        wanted = Transcript(folder, ACTIVE) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        session = AlignmentSession(
            contract,
            OwnRows(data.ids, data.table.splits),
            partial(command_line.draw_nonce, settings),
        )
        service = ActiveService(session, engine, settings.reconnect.deadline_s, tried, status, kept)
        server = start_server(
            service,
            contract,
            settings.listen,
            credential_files(settings, ACTIVE),
            status if transcript is None else AllNotes(transcript, status),
            ProbeDesk(contract, form_of(data.ids)),
        )
        logger.info("waiting for %s at %s", _names(contract), settings.listen)
        try:
            with status.serving(session):
                wait_for_end(session, service, settings, interruption)
        finally:
            service.tell_end(min(_LAST_WORDS_S, settings.reconnect.max_s), interruption)
            server.stop(_GRACE_S).wait()
    kept.discard()
    tried.forget()
    return session.common_order()


class _ShownStatus(ActiveStatus):
    """The state of an alignment for its operators, shown as a bar as well."""

    def __init__(self, settings: ActiveSettings, progress: AlignmentProgress) -> None:
        super().__init__(settings)
        # With several passive parties at a time, a single bar would jump between them.
        self._progress = progress if len(settings.contract.passive_parties) == 1 else None

    def note_alignment(self, done_ids: int, total_ids: int) -> None:
        """Note how far the alignment is, and show it."""
        super().note_alignment(done_ids, total_ids)
        if self._progress is not None:
            self._progress.note(done_ids, total_ids)


def _names(contract: Contract) -> str:
    names = contract.passive_parties
    return "the passive party" if len(names) == 1 else f"the passive parties {', '.join(names)}"

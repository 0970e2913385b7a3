"""``splitveil align active.yaml``: finds the rows that all parties have, without training."""

import argparse
from functools import partial
from pathlib import Path

from splitveil.active_party.grpc_server.server import checked_server
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.run.lifecycle import OwnRows, Unobserved
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party import aligned_table, command_line
from splitveil.common.party.endpoint import check_free
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.sample_order import CommonOrder


def align(parsed: argparse.Namespace) -> None:
    aligned_table.align(parsed, _alignment_of)


def _alignment_of(settings: ActiveSettings) -> aligned_table.Alignment:
    serve, contract = checked_server(settings), settings.contract
    check_free(settings.status)
    status = ActiveStatus(settings)

    def find(
        data: PartyData, folder: Path, transcript: Transcript | None, interruption: Interruption
    ) -> CommonOrder:
        own = OwnRows(data.ids, data.table.splits)
        draw_nonce = partial(command_line.draw_nonce, settings)
        session = ActiveSession(contract, own, None, Unobserved(), draw_nonce)
        _, _, forget = serve(session, data, folder, transcript, status, interruption)
        forget()
        return session.common_order()

    # With several passive parties at a time, a single bar would jump between them.
    return ACTIVE, status, find, len(contract.passive_parties) == 1

"""Connects the passive party to the active one, and shows the connection in its status."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from splitveil.common.errors import PeerError, PeerUnreachable
from splitveil.common.party import command_line
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.endpoint import check_free
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_status import OPEN, RunStatus
from splitveil.common.record.run_folder import end_of
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.wire.connection import FIRST_WAIT_S, NoteAttempt, PeerConnection
from splitveil.common.wire.endpoint import log_security
from splitveil.common.wire.http_proxy import HttpProxy, named_proxy, proxy_of_environment
from splitveil.common.wire.recorded_calls import AllNotes, Notes
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger("splitveil.passive_party")

_BACK_WITHIN_S = 15.0
"""Time limit for the active party to serve again after it ended a run for good."""

ENDED = (
    "the active party has ended this run for good, and nothing is trained; --fresh starts over "
    "once the active party does"
)

Connect = Callable[[Transcript | None, RunStatus, Interruption], GrpcPeer]


def noting_attempts(status: RunStatus) -> NoteAttempt:
    status.peers.expect(ACTIVE)

    def note(error: PeerError | None) -> None:
        if error is not None:
            status.note_failed_call(error)
            if isinstance(error, PeerUnreachable):
                status.peers.lost(ACTIVE)
                status.set_ready("the active party does not answer", ready=False)
            return
        status.peers.heard(ACTIVE)
        if status.run_id and not status.readiness.ready:
            status.set_ready(OPEN)

    return note


def http_proxy(settings: PassiveSettings) -> HttpProxy | None:
    match settings.proxy:
        case None:
            return None
        case "environment":
            return proxy_of_environment(settings.connect)
        case url:
            known = settings.proxy_credentials
            return named_proxy(url, None if known is None else settings.base_dir / known)


def checked_connection(settings: PassiveSettings) -> Connect:
    """Check the settings of connection and status, and return a function that connects."""
    credentials = credential_files(settings, settings.party)
    log_security(credentials, settings.connect, "connect")
    http_proxy(settings)
    check_free(settings.status)
    return partial(_connect, settings, credentials)


def connection_of(
    settings: PassiveSettings, credentials: CredentialFiles | None, notes: Notes | None = None
) -> PeerConnection:
    return PeerConnection(
        settings.connect, settings.contract, credentials, notes, http_proxy(settings)
    )


def _connect(
    settings: PassiveSettings,
    credentials: CredentialFiles | None,
    transcript: Transcript | None,
    status: RunStatus,
    interruption: Interruption,
) -> GrpcPeer:
    notes = status if transcript is None else AllNotes(transcript, status)
    return GrpcPeer(
        connection_of(settings, credentials, notes),
        settings.reconnect,
        interruption,
        settings.party,
        noting_attempts(status),
    )


def idle_peer(settings: PassiveSettings) -> GrpcPeer:
    connection = connection_of(settings, credential_files(settings, settings.party))
    return GrpcPeer(connection, settings.reconnect, party=settings.party)


def was_ended(settings: PassiveSettings, folder: Path, interruption: Interruption) -> bool:
    """Return whether the run is over, finished or ended for good with nobody back; say so."""
    if command_line.is_finished(folder):
        return True
    if end_of(folder) is None or _is_back(settings, interruption):
        return False
    logger.warning("no active party answers at %s; %s", settings.connect, ENDED)
    return True


def _is_back(settings: PassiveSettings, interruption: Interruption) -> bool:
    until = time.monotonic() + min(_BACK_WITHIN_S, settings.reconnect.max_s)
    with idle_peer(settings) as peer:
        while time.monotonic() < until:
            interruption.check()
            with suppress(PeerError):
                if peer.is_ready():
                    return True
            time.sleep(FIRST_WAIT_S)
    return False

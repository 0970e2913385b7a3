"""Supervises a served run: waits for its end, and ends it on a signal or a party's silence."""

import logging

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import Interrupted, PeerError, PeerUnreachable
from splitveil.common.party.interruption import Interruption

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


def wait_for_end(
    session: ActiveSession,
    service: ActiveService,
    settings: ActiveSettings,
    interruption: Interruption,
) -> None:
    """Wait until the run is over and every passive party has left, or is not expected any more.

    Raises:
        SplitveilError: the error that ended the run early.
    """
    while not session.wait_for_farewell(_LOOK_EVERY_S):
        if interruption.signal_number is not None:
            if session.over:
                break
            session.end(Interrupted(interruption.signal_number))
            continue
        silent = _silent_party(session, service, settings)
        if silent is None:
            continue
        who, patience_s = silent
        if session.stage is Stage.FINISHED:
            logger.warning("%s has not said goodbye; ending without it", who)
            break
        session.end(PeerUnreachable(f"nothing came from {who} for {patience_s:g} s"))
    if session.error is None:
        return
    # Ctrl-C in a terminal reaches both parties: the peer's goodbye may then come first.
    if isinstance(session.error, PeerError):
        interruption.check()
    raise session.error


def _silent_party(
    session: ActiveSession, service: ActiveService, settings: ActiveSettings
) -> tuple[str, float] | None:
    """Return the party that has kept the run waiting for too long, in words, and its patience."""
    for party, waited_s in session.awaited().items():
        met = session.was_met(party)
        patience_s = settings.reconnect.max_s if met else settings.first_contact_s
        if min(service.silent_s(party), waited_s) > patience_s:
            alone = len(settings.contract.passive_parties) == 1
            return "the passive party" if alone else f"passive party {party!r}", patience_s
    return None

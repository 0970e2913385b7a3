"""Serves a run with gRPC until its end, which a signal or a silent party may bring about."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.parties import PartyStage
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment.exchange import build_engine, records_of
from splitveil.common.data.canonical_form import form_of
from splitveil.common.errors import EndedForGood, Interrupted, PeerError, PeerUnreachable
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.wire import limits
from splitveil.common.wire.endpoint import build_server, check_security
from splitveil.common.wire.limits import SERVICE
from splitveil.common.wire.probes import ProbeResponder
from splitveil.common.wire.recorded_calls import AllNotes, Notes
from splitveil.common.wire.tensor_codec import Frame
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger("splitveil.active_party")

_FIRST_CONTACT_S = 3600.0
"""Time without the first call of a passive party after which the run ends."""
_LOOK_EVERY_S = 0.2
_GRACE_S = 5.0
_LAST_WORDS_S = 2.0
"""Time that a party that ends early waits for its peer's next call, whose status says so."""
_FINAL_WORDS_S = 30.0
"""The same time if the run ends for good: a peer that did not learn of it would retry forever."""


def start_server(
    service: ActiveService,
    contract: Contract,
    address: str,
    credentials: CredentialFiles | None = None,
    transcript: Notes | None = None,
    responder: ProbeResponder | None = None,
) -> grpc.Server:
    """Serve at an address, together with the standard health service."""
    parties = len(contract.passive_parties)
    server, _ = build_server(
        contract,
        SERVICE,
        address,
        credentials,
        service.on_error,
        notes=transcript,
        threads=limits.SERVER_THREADS + limits.THREADS_PER_PARTY * (parties - 1),
        callers=parties,
    )
    handlers = method_handlers(service)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    (responder or ProbeResponder(contract)).add_to(server)
    server.start()
    return server


def method_handlers(service: ActiveService) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    return {
        "Handshake": _unary(
            service.handshake, limits.reader(pb.HandshakeRequest, limits.HANDSHAKE_BYTES)
        ),
        "Leave": _unary(service.leave, limits.reader(pb.LeaveRequest, limits.SMALL_BYTES)),
        "Align": grpc.stream_stream_rpc_method_handler(
            service.align,
            limits.reader(pb.AlignFrame, limits.ALIGN_FRAME_BYTES),
            pb.AlignFrame.SerializeToString,
        ),
        # Tensors pass as frames, which tensor_codec encodes and decodes.
        "Train": grpc.stream_stream_rpc_method_handler(service.train, Frame, Frame.serialised),
        "Evaluate": grpc.stream_stream_rpc_method_handler(
            service.evaluate, Frame, pb.EvaluateReply.SerializeToString
        ),
    }


def _unary(
    behaviour: Callable[[Any, grpc.ServicerContext], Any], read: Callable[[bytes], Any]
) -> "grpc.RpcMethodHandler[Any, Any]":
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return behaviour(limits.believed(request), context)

    return grpc.unary_unary_rpc_method_handler(
        answer, read, lambda reply: reply.SerializeToString()
    )


Served = tuple[dict[str, int], EndedForGood | None, Callable[[], None]]
"""The numbers of refused messages by kind, the limit that has ended the run for good, if one has,
and what forgets the exchange of ids, once the results are written."""
Serve = Callable[
    [ActiveSession, PartyData, Path, Transcript | None, ActiveStatus, Interruption], Served
]
"""Serves a session until it is over and the passive parties have heard so."""


def checked_server(settings: ActiveSettings) -> Serve:
    """Open this server's credentials, and log what protects it."""
    credentials = credential_files(settings, ACTIVE)
    security = check_security(credentials, settings.listen, "listen")
    level = logging.WARNING if credentials is None else logging.INFO
    logger.log(level, "security: %s", security)
    return partial(_serve_until_end, settings, credentials)


def _serve_until_end(
    settings: ActiveSettings,
    credentials: CredentialFiles | None,
    session: ActiveSession,
    data: PartyData,
    folder: Path,
    transcript: Transcript | None,
    status: ActiveStatus,
    interruption: Interruption,
) -> Served:
    contract = settings.contract
    engine = build_engine(contract.alignment)
    exchanges, tried = records_of(settings, folder)
    service = ActiveService(
        session, engine, settings.reconnect.deadline_s, tried, status, exchanges
    )
    notes = status if transcript is None else AllNotes(transcript, status)
    responder = ProbeResponder(contract, form_of(data.ids))
    server = start_server(service, contract, settings.listen, credentials, notes, responder)
    names = contract.passive_parties
    who = f"parties {', '.join(names)}" if len(names) > 1 else "party"
    logger.info("waiting for the passive %s at %s", who, settings.listen)
    stopped: EndedForGood | None = None
    try:
        with status.serving(session):
            wait_for_end(session, service, settings, interruption)
    except EndedForGood as error:
        stopped = error  # as configured: it ends with a summary, like any other run
    finally:
        patience_s = _LAST_WORDS_S if stopped is None else _FINAL_WORDS_S
        service.announce_end(min(patience_s, settings.reconnect.max_s), interruption)
        server.stop(_GRACE_S).wait()
    return dict(service.refused), stopped, service.settle


def wait_for_end(
    session: ActiveSession,
    service: ActiveService,
    settings: ActiveSettings,
    interruption: Interruption,
) -> None:
    """Wait until the run is over and every passive party has left, or is not expected any more."""
    while not session.wait_for_farewell(_LOOK_EVERY_S):
        if (number := interruption()) is not None:
            if session.stage.is_over:
                break
            session.end(Interrupted(number))
            continue
        silent = _silent_party(session, service, settings)
        if silent is None:
            continue
        who, patience_s = silent
        if session.stage is Stage.FINISHED:
            logger.warning("%s has not said goodbye; ending without it", who)
            break
        session.end(PeerUnreachable(f"nothing came from {who} for {patience_s:g} s"))
    if session.lifecycle.error is None:
        return
    # Ctrl-C in a terminal reaches both parties: the peer's goodbye may then come first.
    if isinstance(session.lifecycle.error, PeerError):
        interruption.check()
    raise session.lifecycle.error


def _silent_party(
    session: ActiveSession, service: ActiveService, settings: ActiveSettings
) -> tuple[str, float] | None:
    for party, waited_s in session.lifecycle.stages.awaited().items():
        met = (
            session.stage is Stage.FINISHED
            or session.parties.named(party).stage is not PartyStage.UNKNOWN
        )
        patience_s = settings.reconnect.max_s if met else _FIRST_CONTACT_S
        if min(service.silent_s(party), waited_s) > patience_s:
            is_only = len(settings.contract.passive_parties) == 1
            return "the passive party" if is_only else f"passive party {party!r}", patience_s
    return None

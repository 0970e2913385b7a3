"""Encodes, checks and decodes probes of the connection, and answers those of the peer.

The same probe gets the same reply at any time, and nothing changes by it.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.run.messages import ID_CHARACTERS, IdForm
from splitveil.common.text.version import VERSION
from splitveil.common.text.visible_text import visible
from splitveil.common.wire.limits import (
    PROBE_BYTES,
    PROTOCOL_VERSION,
    VERSION_CHARACTERS,
    Refused,
    believed,
    reader,
)
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = "splitveil.v1.Diagnosis"


class Introduction(NamedTuple):
    """What a party says about itself."""

    party: str
    contract: str  # its canonical contract
    clock_s: float  # its clock, in seconds since 1970
    id_form: IdForm | None  # how its ids are written; None if it does not know
    version: str = VERSION[:VERSION_CHARACTERS]
    protocol_version: int = PROTOCOL_VERSION


def encode_introduction(own: Introduction) -> pb.Introduction:
    return pb.Introduction(
        protocol_version=own.protocol_version,
        version=own.version,
        party=own.party,
        contract=own.contract,
        clock_ms=max(round(1000 * own.clock_s), 0),
        id_form=None if own.id_form is None else pb.IdForm(**own.id_form._asdict()),
    )


def decode_introduction(received: pb.Introduction) -> Introduction:
    """Decode what the peer says about itself, or raise InvalidMessage."""
    if not received.contract:
        raise InvalidMessage("an introduction without a contract")
    if not ID_CHARACTERS.keys() >= {*received.id_form.most, *received.id_form.some}:
        raise InvalidMessage("unknown kinds of characters in ids")
    form = IdForm(*(getattr(received.id_form, name) for name in IdForm._fields))
    return Introduction(
        party=received.party,
        contract=received.contract,
        clock_s=received.clock_ms / 1000,
        id_form=form if received.HasField("id_form") else None,
        version=received.version,
        protocol_version=received.protocol_version,
    )


def method_path() -> str:
    return f"/{SERVICE}/Probe"


Listener = Callable[[Introduction, grpc.ServicerContext], None]


class ProbeResponder:
    """Answers the probes of the passive parties.

    It has no part in a run: it touches no session, and a probe is no sign of life.

    Args:
        id_form: how this party's ids are written, if that is known.
        listener: told who has introduced itself; by default a line of the log says it.
    """

    def __init__(
        self, contract: Contract, id_form: IdForm | None = None, listener: Listener | None = None
    ) -> None:
        self._contract = contract
        self._id_form = id_form
        self._listener = listener or self._log
        self.probed_at = time.monotonic()  # when the last probe came, by the monotonic clock

    def add_to(self, server: grpc.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            self.probe, reader(pb.ProbeRequest, PROBE_BYTES), pb.ProbeReply.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Probe": handler}),)
        )

    def probe(
        self, request: pb.ProbeRequest | Refused, context: grpc.ServicerContext
    ) -> pb.ProbeReply:
        """Answer one probe, with no more bytes than it carries, or raise ProtocolError."""
        told = believed(request)
        peer = decode_introduction(told.introduction) if told.HasField("introduction") else None
        self.probed_at = time.monotonic()
        reply = pb.ProbeReply(padding=told.padding)
        if peer is not None:
            self._listener(peer, context)
            own = Introduction(ACTIVE, self._contract.canonical_json(), time.time(), self._id_form)
            reply.introduction.CopyFrom(encode_introduction(own))
        return reply

    def _log(self, peer: Introduction, _context: Any) -> None:
        fields = self._contract.fields_differing_from(peer.contract)
        differ = f"differ in {', '.join(fields)}" if fields else "agree"
        logger.info("probed by party %s: the contracts %s", visible(peer.party), differ)

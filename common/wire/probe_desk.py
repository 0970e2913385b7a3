"""Answers probes of the connection: the same reply at any time, and nothing changes by it."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.run.messages import IdForm
from splitveil.common.text.visible_text import visible
from splitveil.common.wire.limits import PROBE_BYTES, Refused, believed, reader
from splitveil.common.wire.probe_codec import (
    SERVICE,
    Introduction,
    decode_introduction,
    encode_introduction,
)
from splitveil.protos import split_learning_pb2 as pb

if TYPE_CHECKING:
    from splitveil.common.wire.interceptor import Handler

logger = logging.getLogger(__name__)

Listener = Callable[[Introduction, grpc.ServicerContext], None]


class ProbeDesk:
    """Answers the probes of the passive parties.

    It has no part in a run: it touches no session, and a probe is no sign of life.

    Args:
        contract: this party's.
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
        handler: Handler = grpc.unary_unary_rpc_method_handler(
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

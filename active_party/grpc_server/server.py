"""Serves the active party's calls with gRPC: its methods, interceptors, limits and health."""

from collections.abc import Callable
from typing import Any

import grpc

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.run.contract import Contract
from splitveil.common.wire.endpoint import SERVICE
from splitveil.common.wire.limits import (
    ALIGN_FRAME_BYTES,
    HANDSHAKE_BYTES,
    SERVER_THREADS,
    SMALL_BYTES,
    THREADS_PER_PARTY,
    believed,
    reader,
)
from splitveil.common.wire.noted_calls import Notes
from splitveil.common.wire.probes import ProbeResponder
from splitveil.common.wire.server import build_server
from splitveil.common.wire.tensor_codec import Frame
from splitveil.protos import split_learning_pb2 as pb


def start_server(
    service: ActiveService,
    contract: Contract,
    address: str,
    credentials: CredentialFiles | None = None,
    transcript: Notes | None = None,
    desk: ProbeResponder | None = None,
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
        threads=SERVER_THREADS + THREADS_PER_PARTY * (parties - 1),
        callers=parties,
    )
    handlers = method_handlers(service, contract)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    (desk or ProbeResponder(contract)).add_to(server)
    server.start()
    return server


def method_handlers(
    service: ActiveService, contract: Contract
) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    return {
        "Handshake": _unary(service.handshake, reader(pb.HandshakeRequest, HANDSHAKE_BYTES)),
        "Audit": _unary(service.audit, reader(pb.AuditRequest, contract.max_message_bytes)),
        "Leave": _unary(service.leave, reader(pb.LeaveRequest, SMALL_BYTES)),
        "Align": grpc.stream_stream_rpc_method_handler(
            service.align, reader(pb.AlignFrame, ALIGN_FRAME_BYTES), pb.AlignFrame.SerializeToString
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
        return behaviour(believed(request), context)

    return grpc.unary_unary_rpc_method_handler(
        answer, read, lambda reply: reply.SerializeToString()
    )

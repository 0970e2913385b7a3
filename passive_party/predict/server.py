"""Serves joint inference with gRPC: methods, interceptors, limits and health."""

from contextlib import AbstractContextManager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.wire.endpoint import INFERENCE_SERVICE
from splitveil.common.wire.limits import HANDSHAKE_BYTES, believed, reader
from splitveil.common.wire.noted_calls import Notes
from splitveil.common.wire.server import build_server
from splitveil.passive_party.predict.service import MAX_STREAMS, InferenceService
from splitveil.protos import split_learning_pb2 as pb

OTHER_THREADS = 8  # for single calls, and for streams that are turned away


class InferenceServer(AbstractContextManager["InferenceServer"]):
    """Serves a service at an address, together with the standard health service.

    Args:
        contract: gives the limits, and the active party's identity.
        credentials: this party's; without them it serves plain text, on loopback only.
    """

    def __init__(
        self,
        service: InferenceService,
        contract: Contract,
        address: str,
        credentials: CredentialFiles | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._service = service
        self._server, self._health = build_server(
            contract,
            INFERENCE_SERVICE,
            address,
            credentials,
            service.on_error,
            notes=notes,
            threads=MAX_STREAMS + OTHER_THREADS,
            admitted=(ACTIVE,),
        )
        handlers = method_handlers(service, contract)
        generic = grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.start()

    def __exit__(self, *_: object) -> None:
        self.stop(0)

    def stop(self, grace_s: float) -> None:
        """Stop serving: requests under way have some seconds to be answered."""
        self._health.set(INFERENCE_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        stopped = self._server.stop(grace_s)
        self._service.stop()
        stopped.wait()


def method_handlers(
    service: InferenceService, contract: Contract
) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    """Return the handler of each method, with its parser and serialiser."""

    def describe(request: Any, context: grpc.ServicerContext) -> pb.DescribeReply:
        return service.describe(believed(request), context)

    return {
        "Describe": grpc.unary_unary_rpc_method_handler(
            describe,
            reader(pb.DescribeRequest, HANDSHAKE_BYTES),
            pb.DescribeReply.SerializeToString,
        ),
        "Embed": grpc.stream_stream_rpc_method_handler(
            service.embed,
            reader(pb.EmbedRequest, contract.max_message_bytes),
            pb.EmbedReply.SerializeToString,
        ),
        "EmbedTable": grpc.stream_stream_rpc_method_handler(
            service.embed_table,
            reader(pb.TableRequest, contract.max_message_bytes),
            pb.TableReply.SerializeToString,
        ),
    }

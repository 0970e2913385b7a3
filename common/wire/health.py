"""The standard gRPC health service, as both kinds of party serve it."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class HealthService(health.HealthServicer):  # type: ignore[misc]
    """Answers whether this party serves; there is no stream of later changes."""

    def Watch(self, request: Any, context: grpc.ServicerContext) -> None:  # noqa: ARG002, N802 (gRPC's)
        """Refuse: long-lived streams would occupy every slot that calls have."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check")


def add_health(server: grpc.Server, service: str) -> HealthService:
    """Let a server answer that it serves a service, and return what answers."""
    servicer = HealthService()
    servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer

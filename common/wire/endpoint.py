"""Names and channel options that both ends of the connection must agree on."""

from common.contract import Contract

SERVICE = "splitveil.v1.SplitLearning"

HANDSHAKE_TIMEOUT_S = 20.0


def method_path(method: str) -> str:
    """Return the full name of an RPC, as gRPC wants it."""
    return f"/{SERVICE}/{method}"


def channel_options(contract: Contract) -> list[tuple[str, int]]:
    """Return the options of a channel or server: explicit limits, keepalive, no surprises.

    HTTP/2 windows, frame sizes and the bandwidth probe stay at gRPC's defaults: those measured
    best.
    """
    return [
        ("grpc.max_send_message_length", contract.max_message_bytes),
        ("grpc.max_receive_message_length", contract.max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A server that thinks pings of every 30 s are an attack would drop the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.enable_retries", 0),
        # Two servers on one port would each get some of the calls: the second must fail instead.
        ("grpc.so_reuseport", 0),
    ]

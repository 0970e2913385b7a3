"""The active party's gRPC server."""

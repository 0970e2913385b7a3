"""Defines a run: its contract, order of examples and course. No gRPC, no protobuf, no disk."""

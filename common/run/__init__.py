"""What a run is: its contract, its order of examples, its course. No gRPC, no protobuf, no disk."""

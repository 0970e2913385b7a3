"""The feature owner: bottom model, adversary, gRPC client."""

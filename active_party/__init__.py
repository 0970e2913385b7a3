"""The label owner: top model, defenses, session, gRPC service."""

"""The label owner: top model, defenses, session, gRPC service."""

import splitveil.common  # noqa: F401 (before gRPC)

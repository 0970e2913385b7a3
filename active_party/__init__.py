"""The label owner: top model, defenses, session, gRPC service."""

import common  # noqa: F401 (before gRPC)

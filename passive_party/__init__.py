"""The feature owner: bottom model, adversary, gRPC client."""

import common  # noqa: F401 (before gRPC)

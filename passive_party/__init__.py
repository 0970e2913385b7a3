"""The feature owner: bottom model, adversary, gRPC client."""

import splitveil.common  # noqa: F401 (before gRPC)

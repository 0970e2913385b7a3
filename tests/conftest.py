"""What all tests share."""

import common  # noqa: F401 (before any test imports gRPC)

"""What all tests share."""

import os

import common  # noqa: F401 (before any test imports gRPC)

for _name in (*("grpc_proxy", "https_proxy", "http_proxy"), "no_grpc_proxy", "no_proxy"):
    os.environ.pop(_name, None)  # channels of the tests' own would obey it, on loopback, too

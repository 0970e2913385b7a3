"""What all tests share.

Sums over several threads are in another order, and so have other last digits: with one thread the
figures of a test are the same however many cores there are.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy reads it; processes of tests inherit it

import torch

import common  # noqa: F401 (before any test imports gRPC)

for _name in (*("grpc_proxy", "https_proxy", "http_proxy"), "no_grpc_proxy", "no_proxy"):
    os.environ.pop(_name, None)  # channels of the tests' own would obey it, on loopback, too
torch.set_num_threads(1)

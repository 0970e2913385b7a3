"""What all tests share.

Sums over several threads are in another order, and so have other last digits: with one thread the
figures of a test are the same however many cores there are.
"""

import logging
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy reads it; processes of tests inherit it

import threading
from collections.abc import Iterator

import pytest
import torch

import common  # noqa: F401 (before any test imports gRPC)

for _name in (*("grpc_proxy", "https_proxy", "http_proxy"), "no_grpc_proxy", "no_proxy"):
    os.environ.pop(_name, None)  # channels of the tests' own would obey it, on loopback, too
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Put back what a command that runs in the tests' own process sets up for its log."""
    root, hook = logging.getLogger(), threading.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    threading.excepthook = hook
    root.handlers[:] = handlers
    root.setLevel(level)
    for package in ("active_party", "passive_party", "common", "deploy"):
        logging.getLogger(package).setLevel(logging.NOTSET)

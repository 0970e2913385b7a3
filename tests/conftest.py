"""Fixtures and settings that all tests share.

Sums over several threads are added in another order and differ in their last digits: with one
thread, the figures of a test are the same for any number of cores.
"""

import logging
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy reads it; processes of tests inherit it

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
import torch

import splitveil.common  # noqa: F401 (before any test imports gRPC)
from splitveil.common.alignment import ecdh
from tests.support.certificates import make
from tests.support.inference import Trained, free_port, train, write_wide_deep
from tests.support.pretended_cuda import CUDA, pretended_cuda
from tests.support.runs import write_example, write_several

for _name in (*("grpc_proxy", "https_proxy", "http_proxy"), "no_grpc_proxy", "no_proxy"):
    os.environ.pop(_name, None)  # channels of the tests' own would obey it, on loopback, too
torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "any machine", deadline=None
)  # a busy one is slow now and then
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Restore the logging that a command changes when it runs in the tests' own process."""
    root, hook = logging.getLogger(), threading.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    threading.excepthook = hook
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("splitveil").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small example; a module may override it with another example."""
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    return folder


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with both parties' certificates, of one authority."""
    return make(tmp_path_factory.mktemp("trusted"))


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """Return the device of a GPU, which is pretended where there is none."""
    with nullcontext() if torch.cuda.is_available() else pretended_cuda():
        yield CUDA


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    write_several(folder, 3)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a small trained run whose parties can serve, with a fallback."""
    folder = tmp_path_factory.mktemp("small")
    write_wide_deep(folder)
    return train(folder, folder / "runs", active=("serving.fallback=true",))


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ecdh, "CHUNK_IDS", 16)

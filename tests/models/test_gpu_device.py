"""The device of a party: which one, what it is called, how it computes, and what is pretended."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitveil.common.data.features import FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models import device as devices
from splitveil.common.models.device import device_in_words, restoring_devices, speed_up, use_device
from splitveil.common.models.factory import Trial, build_bottom_model
from splitveil.common.models.settings import CustomModel
from tests.support.pretended_cuda import CUDA, NAME, pretended_cuda
from tests.support.runs import CPU

ON_CPU = torch.ones(3)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda there: there + ON_CPU, "same device"),
        (lambda there: torch.cat([there, ON_CPU]), "same device"),
        (lambda there: torch.stack([there.sum(), torch.tensor(1.0)]), "same device"),
        (lambda there: torch.zeros(()).lerp_(there.sum(), 0.5), "same device"),
        (lambda there: there.masked_fill(ON_CPU > 0, 0.0), "same device"),
        (nn.Linear(3, 2), "same device"),
        (lambda there: ON_CPU[there.long()], "indices on cuda:0"),
        (lambda there: there.numpy(), "can't convert cuda:0"),
        (lambda there: torch.randn(3, generator=torch.Generator(), device=there.device), "gener"),
        (lambda there: torch.randn(3, generator=torch.Generator(there.device)), "generator"),
        (lambda there: there.cumsum(0), "deterministic"),
        (lambda there: there[None].median(dim=1), "deterministic"),
        (lambda there: torch.bincount(there.long(), there), "deterministic"),
    ],
)
def test_a_pretended_gpu_refuses_what_cuda_refuses(
    work: Callable[[Tensor], object], said: str
) -> None:
    with restoring_devices(), pretended_cuda(), pytest.raises(Exception, match=said):
        work(torch.ones(3, device=use_device("cuda")))


@pytest.mark.parametrize(
    "work",
    [
        lambda there: there * torch.tensor(2.0),
        lambda there: there[torch.tensor([0, 2])],
        lambda there: there[[0, 2]],
        lambda there: there.clone().index_put_((torch.tensor([0]),), torch.tensor(5.0)),
        lambda there: there.clone().copy_(ON_CPU),
        lambda there: torch.randn(3, generator=torch.Generator(CUDA), device=CUDA),
        lambda there: there.long().cumsum(0),
        lambda there: torch.tensor(there.tolist(), device=CUDA),
    ],
)
def test_a_pretended_gpu_allows_what_cuda_allows(work: Callable[[Tensor], Tensor]) -> None:
    with restoring_devices(), pretended_cuda():
        assert work(torch.ones(3, device=use_device("cuda"))).device == CUDA


@NO_GPU
def test_a_gpu_that_is_not_there_is_refused_in_a_sentence() -> None:
    with pytest.raises(SettingsError, match=r"^device: cuda:1 needs a GPU, and torch \S+ \w+"):
        use_device("cuda:1")


@NO_GPU
@pytest.mark.parametrize("is_there", [True, False])
def test_auto_warns_of_a_gpu_that_torch_cannot_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_there: bool,
) -> None:
    if is_there:
        (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    assert use_device("auto") == use_device("cpu") == CPU
    (*said,) = caplog.messages
    assert len(said) == is_there
    assert all("this machine has a GPU, but torch" in line for line in said)


def test_what_is_computed_on_a_gpu_is_repeatable_and_not_rounded_to_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    memory: Any = torch.utils.deterministic
    before = cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    with pretended_cuda(), restoring_devices():
        cudnn.allow_tf32 = products.allow_tf32 = cudnn.benchmark = True
        use_device("cuda", deterministic=False)
        assert [cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark] == [False] * 3
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        use_device("auto")
        assert torch.are_deterministic_algorithms_enabled()
        assert not memory.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()) == before
    assert memory.fill_uninitialized_memory


@pytest.mark.parametrize(
    ("version", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release",
            "550.54.14",
        ),
        ("something else", ""),
    ],
)
def test_a_gpu_is_named_with_its_driver_and_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, driver: str
) -> None:
    (tmp_path / "version").write_text(f"{version}\nGCC version: 12.3\n")
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    with pretended_cuda():
        known = f"driver {driver}, " if driver else ""
        assert device_in_words(CUDA) == f"cuda:0 ({NAME}, {known}CUDA 12.6)"
    assert device_in_words(CPU) == "cpu"


class Summing(nn.Linear):
    """A model of a user's own, with an operation that on CUDA never repeats its bits."""

    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, features: Any) -> Tensor:
        return super().forward(features.numeric.cumsum(1))


def test_an_operation_that_cannot_repeat_its_bits_is_named_before_the_run() -> None:
    settings = CustomModel(kind="custom", module=f"{__name__}:Summing")
    with restoring_devices(), pretended_cuda():
        trial = Trial((4,), use_device("cuda"))
        with pytest.raises(SettingsError, match=r"cumsum does not .*; deterministic: false allows"):
            build_bottom_model(settings, FeatureShapes(numeric_dim=5), (2,), seed=0, trial=trial)


@pytest.mark.parametrize(
    ("kind", "has_triton", "missing"),
    [
        ("cpu", False, "no C\\+\\+ compiler \\(such as g\\+\\+\\)"),
        ("cuda", False, "no Triton \\(pip install triton\\)"),
        ("cuda", True, "no C compiler \\(such as gcc\\) for Triton"),
    ],
)
def test_a_machine_that_cannot_compile_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_triton: bool, missing: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: has_triton or None)
    with pretended_cuda():
        model = nn.Linear(2, 2).to(CUDA if kind == "cuda" else CPU)
        with pytest.raises(SettingsError, match=f"compile: there is {missing}"):
            speed_up(model, None, compiled=True)

"""Copies between device and host: none on the CPU, and one wait for each answer on a GPU.

Without a GPU the order of the calls is tested with tensors that have a device and no content; what
only a GPU can show, that bits survive and memory stays, is skipped elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from splitveil.common.models import device
from splitveil.common.models.device import to_device, to_host

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Write down what is asked of a GPU that is not there."""
    noted, current = list[str](), ["main"]

    def note(call: str) -> None:
        noted.append(f"{current[-1]}: {call}")

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda one: note(f"waits for {one.name}"))

    @contextmanager
    def on(one: Any) -> Iterator[None]:
        current.append(one.name)
        yield
        current.pop()

    def event() -> Any:
        return SimpleNamespace(
            record=lambda one: note(f"event on {one.name}"), synchronize=lambda: note("host waits")
        )

    copy, move = Tensor.copy_, Tensor.to

    def copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        note(f"{source.device.type} to {into.device.type}{'' if non_blocking else ', blocking'}")
        return copy(into, source)

    def moved(values: Tensor, *where: object, non_blocking: bool = False) -> Tensor:
        if isinstance(where[0], torch.device):
            blocks = "" if non_blocking else ", blocking"
            note(f"{values.device.type} to {where[0].type}{blocks}")
        return move(values, *where)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(device, "_side_stream", lambda _device: stream("side"))
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "to", moved)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, one: note(f"held for {one.name}"))
    with FakeTensorMode():
        yield noted


def test_on_the_cpu_nothing_is_copied() -> None:
    values = torch.randn(4, 3)
    assert to_host(values) is values
    assert to_device(values, CPU, torch.float32) is values


def test_the_dtype_of_the_wire_becomes_the_one_that_is_needed() -> None:
    received = torch.randn(4, 3).bfloat16()
    assert torch.equal(to_device(received, CPU, torch.float32), received.float())


def test_what_is_sent_is_waited_for_once_and_what_is_queued_after_it_is_not(
    calls: list[str],
) -> None:
    """The event is recorded behind the copy: `torch.cuda.synchronize` would wait for everything."""
    found = to_host(torch.empty(8, 3, device="cuda"))
    assert found.device == CPU
    assert calls == ["main: cuda to cpu", "main: event on main", "main: host waits"]


def test_what_is_received_is_copied_beside_the_computation_and_never_waited_for(
    calls: list[str],
) -> None:
    """The bytes of the message are copied by the host first, so that they may go at once."""
    found = to_device(torch.empty(8, 3, dtype=torch.bfloat16), CUDA, torch.float32)
    assert (found.device, found.dtype) == (CUDA, torch.float32)
    assert calls == [
        "side: cpu to cpu, blocking",
        "side: cpu to cuda",
        "main: waits for side",
        "main: held for main",
    ]


def test_what_is_on_the_device_stays_there(calls: list[str]) -> None:
    values = torch.empty(8, 3, device="cuda")
    assert to_device(values, CUDA, torch.float32) is values
    assert not any("waits" in call for call in calls)


@NEEDS_GPU
def test_on_a_gpu_the_bits_survive_while_it_computes_and_memory_stays() -> None:
    """Every round queues work before and after the copies; the blocks are those of the first."""
    device = torch.device("cuda", torch.cuda.current_device())
    busy = torch.randn(2048, 2048, device=device)
    generator = torch.Generator().manual_seed(0)
    held: list[int] = []
    for round_number in range(40):
        sent = torch.randn(1024, 128, generator=generator)
        product = busy @ busy
        there = to_device(sent.clone(), device, torch.float32)
        back = to_host(there * 2)
        product = product @ busy
        assert torch.equal(back, sent * 2)
        if round_number >= 10:
            held.append(torch.cuda.memory_allocated(device))
    assert len(set(held)) == 1
    assert product.shape == busy.shape
